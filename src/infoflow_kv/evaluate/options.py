"""How items are measured: what one run of the laboratory keeps the same for all of them."""

from collections.abc import Mapping
from dataclasses import dataclass

from infoflow_kv.errors import OptionError
from infoflow_kv.evaluate.json_text import cleaned

MAX_NEW_TOKENS = 32
INSTRUCTION = "Answer the question using the documents. Give the answer only, in a few words."


@dataclass(frozen=True, slots=True)
class Options:
    """How items are measured. `continuation`: places over which distances are taken. `generate`: budgets, or names of
    arms, that also write an answer of up to `max_new_tokens` (None: all arms); without that number, of as many as the
    item's set asks for. `kv_error`: ΔK and ΔV per layer.
    `instruction`: for items that have none of their own. `prompts`: instead, a template for each data set (see
    `prompts.worded`). `lengthen`: passage tokens to which items were lengthened, None if they were not. Lone surrogates
    in texts are replaced, as in data files.
    """

    max_new_tokens: int | None = MAX_NEW_TOKENS
    continuation: int = 16
    generate: tuple[float | str, ...] | None = None
    kv_error: bool = False
    chunk_tokens: int = 512
    head_policy: str = "head"
    instruction: str = INSTRUCTION
    seed: int = 0
    lengthen: int | None = None
    prompts: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "continuation", "lengthen"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise OptionError(f"{name} is {value!r}; expected a whole number of at least 1")
        if not 0 <= self.seed < 2**63:
            raise OptionError(f"seed {self.seed} is outside 0..2^63-1")
        object.__setattr__(self, "instruction", cleaned(self.instruction))
        object.__setattr__(self, "prompts", None if self.prompts is None else cleaned(dict(self.prompts)))
