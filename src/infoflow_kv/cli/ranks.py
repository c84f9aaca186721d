"""Verbs that torchrun started on several ranks: which ones may, what each rank does, who speaks. Imports no torch.

Rank 0 speaks for all; another rank only with an error that rank 0 does not have. torchrun ends all ranks when one of
them ends with an error, so whoever has nothing to say then leaves last.
"""

import contextlib
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from infoflow_kv.cli.options import LAYOUT, TIMEOUT_SECONDS
from infoflow_kv.errors import InfoFlowError, OptionError, ParallelError
from infoflow_kv.parallel.environment import Place, from_environment

if TYPE_CHECKING:
    from infoflow_kv.engine import Engine
    from infoflow_kv.parallel.group import Group

VERBS = ("ask", "demo")

_SET_BY_TORCHRUN = ("RANK", "WORLD_SIZE")
_PREPARE_SECONDS = 3600.0  # one rank may fetch a model while another has it; one that is lost is noticed at once
_LEAVE_LAST_SECONDS = 10.0
_TELL_LATER_SECONDS = 1.0


def place() -> Place | None:
    """This process's place among several ranks; None for a process of its own, OptionError where the variables of
    torchrun contradict each other."""
    if any(name not in os.environ for name in _SET_BY_TORCHRUN):
        return None
    if (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("0", "1"):
        return None
    try:
        return from_environment(os.environ)
    except OptionError:
        voice.speak()  # variables that were set by hand may be wrong on this rank alone
        raise


def check_verb(args: Sequence[str]) -> None:
    """Nothing; OptionError under torchrun for a verb that only one process can run."""
    verb = next((arg for arg in args if not arg.startswith("-")), None)
    if place() is None or verb in (None, *VERBS) or {"-h", "--help"} & set(args):
        return
    raise OptionError(
        f"'{verb}' does not run on several ranks; under torchrun there are {' and '.join(VERBS)}: start every other "
        "verb without torchrun (bench sp starts its ranks itself)"
    )


class Voice:
    """Whether this process is heard: rank 0 is, another rank after `speak()`."""

    def __init__(self) -> None:
        self.is_muted = False
        self._streams = contextlib.ExitStack()

    @contextlib.contextmanager
    def rank_zero_alone(self) -> Iterator[None]:
        """While it lasts, stdout and stderr of the ranks behind the first lead nowhere."""
        with self._streams, open(os.devnull, "w", encoding="utf-8") as nowhere:
            if os.environ.get("RANK", "0") != "0" and all(name in os.environ for name in _SET_BY_TORCHRUN):
                self._streams.enter_context(contextlib.redirect_stdout(nowhere))
                self._streams.enter_context(contextlib.redirect_stderr(nowhere))
                self._streams.callback(setattr, self, "is_muted", False)
                self.is_muted = True
            yield

    def speak(self) -> None:
        """This rank is heard from now on."""
        self._streams.close()

    def leave(self, error: BaseException) -> None:
        """Returns when a rank that failed may end without cutting off another one that has more to say."""
        with contextlib.suppress(KeyboardInterrupt):
            if self.is_muted:
                time.sleep(_LEAVE_LAST_SECONDS)  # torchrun ends this process as soon as rank 0 has
            elif isinstance(error, ParallelError):
                time.sleep(_TELL_LATER_SECONDS)


voice = Voice()


@dataclass(slots=True)
class Ranks:
    """The ranks that run this verb together, or this process alone (`group` is None).

    `device`: where this rank computes. `settings`: what `Engine` is given for it.
    """

    device: str
    group: "Group | None" = None
    settings: dict[str, Any] = field(default_factory=dict)
    has_begun: bool = False

    @property
    def is_first(self) -> bool:
        """Whether this process is rank 0, which alone does what is wanted once."""
        return self.group is None or self.group.rank == 0

    def ready(self) -> None:
        """Returns when all ranks are; ParallelError where another one has failed."""
        if self.group is not None:
            with self.group.phase("prepare"):
                self.group.world.agree("ready")

    def fail(self, error: BaseException) -> None:
        """Nothing; a rank whose error rank 0 does not have as well may speak."""
        if self.group is None or isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit)):
            return
        # Until a request begins, all other ranks come to an exchange of just this form: with the same error, with
        # "ready", or with the request.
        if not self.has_begun and not isinstance(error, ParallelError):
            with contextlib.suppress(ParallelError), self.group.phase("prepare"):
                self.group.world.agree(f"{type(error).__name__}: {error}")
                return
        voice.speak()
        if isinstance(error, InfoFlowError) and not isinstance(error, ParallelError):
            error.args = (f"rank {self.group.rank} of {self.group.size}: {error}", *error.args[1:])


@contextlib.contextmanager
def shared(
    device: str, layout: str = LAYOUT, timeout: float = TIMEOUT_SECONDS, paths: Sequence[str] = ()
) -> Iterator[Ranks]:
    """The ranks that torchrun started, joined, and left at the end; this process alone without torchrun.

    OptionError for options that do not fit: a layout without ranks, a device or a document that ranks cannot share.
    """
    if not (math.isfinite(timeout) and timeout >= 0.001):
        raise OptionError(f"--timeout {timeout:g} is no time; expected a number of seconds, at least 0.001")
    here = place()
    if here is None:
        if layout != LAYOUT:
            raise OptionError(
                f"--layout {layout} says how several ranks share a request, and there is one; start them with "
                "torchrun --nproc-per-node 2 -m infoflow_kv ask …, or leave the option out"
            )
        yield Ranks(device)
        return
    if device.startswith("cuda:"):
        raise OptionError(f"--device {device} would be every rank's; give cuda, and each rank takes its own")
    if "-" in paths:
        raise OptionError("standard input (-) cannot be read by several ranks; give files or folders")

    import torch

    from infoflow_kv.parallel.group import Group

    has_gpus = device == "cuda" and torch.cuda.is_available()  # without any, every rank gets the same error
    ranks = Ranks(f"cuda:{here.local_rank}" if has_gpus else device)

    def on_phase(name: str) -> None:
        ranks.has_begun = ranks.has_begun or name == "begin"

    prepare = max(timeout, _PREPARE_SECONDS)
    try:
        group = Group.join(timeout, None if has_gpus else "gloo", on_phase, {"prepare": prepare})
    except BaseException:
        voice.speak()  # the others may have met no error yet
        raise
    with group:
        ranks.group, ranks.settings = group, {"group": group, "layout": layout}
        try:
            yield ranks
        except BaseException as error:
            ranks.fail(error)
            raise


def described(engine: "Engine", method: str) -> dict[str, Any]:
    """What `--json` tells of the ranks: how many, the layout of a request and why; empty for one process.

    `method`: of the request; full prefill has but one layout.
    """
    from infoflow_kv.methods import METHODS
    from infoflow_kv.spreading import Spread

    if not isinstance(engine.place, Spread):
        return {}
    spread = engine.place
    if not METHODS[method].reuse:
        return {"ranks": spread.layout.ranks, "layout": "ring", "rule": "ring: keys and values go round the ranks"}
    return {"ranks": spread.layout.ranks, "layout": spread.layout.name, "rule": spread.rule}


def told(parallel: dict[str, Any]) -> str:
    """The same in words, behind a comma; empty for one process.

    >>> told({"ranks": 2, "layout": "H", "rule": "H: 2 ranks share 8 K/V heads evenly"})
    ', 2 ranks in layout H (2 ranks share 8 K/V heads evenly)'
    """
    if not parallel:
        return ""
    reason = parallel["rule"].removeprefix(f"{parallel['layout']}: ")
    return f", {parallel['ranks']} ranks in layout {parallel['layout']} ({reason})"
