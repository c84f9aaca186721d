"""The one tree of errors. Every message says what was given, what was expected and what to do.

InfoFlowError
├── InputError              the caller gave something that cannot work (CLI: exit code 2)
│   ├── DocumentError       a file or text that cannot become a document
│   ├── PromptTooLongError  prompt + new tokens do not fit the model's window
│   ├── OptionError         a number, name or flag outside its range
│   └── ModelError          a model that cannot be found or read
│       └── UnsupportedModelError   the support probe refused it, with the reason
├── StoreError              the store cannot do what was asked (unwritable, newer format)
├── ComputeError            the arithmetic went wrong (NaN in logits, a layer that was skipped)
└── ParallelError           a rank was lost, or did not answer in time; the request ends on all ranks
"""

import difflib
from collections.abc import Iterable


class InfoFlowError(Exception):
    """Base of all errors that this package raises on purpose."""


class InputError(InfoFlowError, ValueError):
    """The caller gave something that cannot work."""


class DocumentError(InputError):
    """A file or text that cannot become a document."""


class OptionError(InputError):
    """A number, a name or a flag outside its range."""


class ModelError(InputError):
    """A model that cannot be found or read."""


class UnsupportedModelError(ModelError):
    """A model that the support probe refused; the message is the reason, in one line."""


class PromptTooLongError(InputError):
    """Prompt and new tokens together exceed the model's window.

    Attributes: `prompt_tokens`, `new_tokens`, `window_tokens`.
    """

    def __init__(self, prompt_tokens: int, new_tokens: int, window_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.new_tokens = new_tokens
        self.window_tokens = window_tokens
        super().__init__(
            f"the prompt has {prompt_tokens} tokens and {new_tokens} new tokens were asked for, together more than "
            f"the model's window of {window_tokens}; give fewer documents or ask for fewer new tokens"
        )


class StoreError(InfoFlowError):
    """The store cannot do what was asked."""


class ComputeError(InfoFlowError, RuntimeError):
    """The arithmetic went wrong; no answer is given rather than a wrong one."""


class ParallelError(InfoFlowError, RuntimeError):
    """A rank was lost, or did not answer in time; the request ends on all ranks.

    Attributes: `phase`, in which it happened, and `rank`, the one that tells (not the one that was lost).
    """

    def __init__(self, message: str, phase: str, rank: int) -> None:
        self.phase = phase
        self.rank = rank
        super().__init__(message)


def unknown_name(kind: str, given: str, known: Iterable[str]) -> OptionError:
    """The error for a name that is in no table, with the nearest known one if there is one."""
    names = sorted(known)
    near = difflib.get_close_matches(given, names, n=1)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    return OptionError(f"unknown {kind} '{given}'{hint} (known: {', '.join(names)})")
