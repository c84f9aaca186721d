"""A process's place among the ranks, from the variables that torchrun sets."""

from collections.abc import Mapping
from dataclasses import dataclass

from infoflow_kv.errors import OptionError

_HINT = "start the ranks with torchrun, for example: torchrun --nproc-per-node=2 …"


@dataclass(frozen=True)
class Place:
    """`rank` of `size`, and `local_rank` among those on the same machine; all from 0."""

    rank: int
    size: int
    local_rank: int


def from_environment(environment: Mapping[str, str]) -> Place:
    """The place that RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT give; raises OptionError."""
    size = _number(environment, "WORLD_SIZE", 1, 1_000_000)
    rank = _number(environment, "RANK", 0, size - 1)
    local_rank = _number(environment, "LOCAL_RANK", 0, size - 1)
    _number(environment, "MASTER_PORT", 1, 65_535)
    if not environment.get("MASTER_ADDR"):
        raise OptionError(f"MASTER_ADDR is not set; expected the address of the first rank's machine; {_HINT}")
    return Place(rank, size, local_rank)


def _number(environment: Mapping[str, str], name: str, low: int, high: int) -> int:
    given = environment.get(name)
    if given is None:
        raise OptionError(f"{name} is not set; expected a number from {low} to {high}; {_HINT}")
    if not (given.isascii() and given.isdigit() and low <= int(given) <= high):
        raise OptionError(f"{name} is '{given}'; expected a number from {low} to {high}; {_HINT}")
    return int(given)
