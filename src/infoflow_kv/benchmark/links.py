"""Ranks on one machine with links of a chosen speed between them: a network namespace each, joined by a bridge.

What an interface has sent is counted by the kernel: a check of our own byte counts from outside. Needs Linux, root
and iproute2. The speed is limited, the latency is not.
"""

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from infoflow_kv.errors import OptionError

MOST_RANKS = 250
# What a link may send at once after it was idle. Small, or short messages between computing would cost nothing.
BURST = "32kb"
# Jumbo frames, as between the machines of a cluster: headers are then no part of the measurement.
FRAME_BYTES = "9000"


@dataclass(frozen=True)
class Links:
    """The links while they last: `interfaces` and `addresses`, by rank; rank 0's address is that to meet at."""

    namespaces: tuple[str, ...]
    interfaces: tuple[str, ...]
    addresses: tuple[str, ...]

    def command(self, rank: int, command: Sequence[str]) -> list[str]:
        """The command, to be started on the rank's side of its link."""
        return ["ip", "netns", "exec", self.namespaces[rank], *command]

    def environment(self, rank: int, port: int = 29500) -> Mapping[str, str]:
        """The variables with which `Group.join` finds the others over the links, instead of torchrun's."""
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(len(self.namespaces)),
            "MASTER_ADDR": self.addresses[0],
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": self.interfaces[rank],
        }

    def sent_bytes(self, rank: int) -> int:
        """What the rank has sent since its link was made, with headers and acknowledgements."""
        shown = _run("ip", "-n", self.namespaces[rank], "-json", "-statistics", "link", "show", self.interfaces[rank])
        return int(json.loads(shown)[0]["stats64"]["tx"]["bytes"])


def missing() -> str | None:
    """Why links cannot be made here, in a few words; None if they can."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "only root may make network namespaces"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"the program '{tool}' is not installed (package iproute2)"
    try:
        with links(1, "1gbit"):
            return None
    except OptionError as error:
        return str(error)


@contextlib.contextmanager
def links(ranks: int, rate: str | None) -> Iterator[Links]:
    """Links for that many ranks, of a rate as tc writes it ("300mbit"; None: unlimited); all removed in the end.

    Each rank sends at most at that rate. Raises OptionError for numbers out of range, and if the system refuses.
    """
    if not 1 <= ranks <= MOST_RANKS:
        raise OptionError(f"links for {ranks} ranks; give a number from 1 to {MOST_RANKS}")
    own = f"ifkv{os.getpid()}"  # an interface's name may have 15 characters
    switch = f"{own}s"
    made = Links(
        tuple(f"{own}r{rank}" for rank in range(ranks)),
        tuple(f"ifkv{rank}" for rank in range(ranks)),
        tuple(f"10.77.0.{rank + 1}" for rank in range(ranks)),
    )
    namespaces: list[str] = []
    try:
        for name in (switch, *made.namespaces):
            _run("ip", "netns", "add", name)
            namespaces.append(name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "mtu", FRAME_BYTES, "up")
        for name, interface, address in zip(made.namespaces, made.interfaces, made.addresses, strict=True):
            _connect(switch, name, interface, address, rate)
        yield made
    finally:
        for name in reversed(namespaces):  # with a namespace go its interfaces
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _connect(switch: str, name: str, interface: str, address: str, rate: str | None) -> None:
    peer = f"to-{interface}"
    _run("ip", "-n", name, "link", "add", interface, "type", "veth", "peer", "name", peer, "netns", switch)
    _run("ip", "-n", switch, "link", "set", peer, "master", "bridge", "mtu", FRAME_BYTES, "up")
    _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", interface)
    _run("ip", "-n", name, "link", "set", interface, "mtu", FRAME_BYTES, "up")
    if rate is not None:
        limit = ("tbf", "rate", rate, "burst", BURST, "latency", "200ms")
        _run("tc", "-n", name, "qdisc", "add", "dev", interface, "root", *limit)


def _run(*command: str) -> str:
    """What the program prints; raises OptionError with its complaint."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        complaint = (done.stderr.strip() or f"it ended with {done.returncode}").splitlines()[0]
        raise OptionError(
            f"'{' '.join(command)}' failed: {complaint}; links between ranks need root, iproute2 and a kernel with "
            "veth, bridge and tbf, and a rate as tc writes it, for example 300mbit"
        )
    return done.stdout
