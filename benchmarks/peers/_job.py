"""What a peer of `infoflow-kv bench compare` gets and gives. Standard library only: it runs in the peer's own venv.

The job (JSON file, its path is the first argument): `token_ids` of the request; `earlier_ids` of a request with the
same chunks in the opposite order; `head_ids`, `chunks`, `suffix_ids`, of which `token_ids` consists; `new_tokens`;
`warmup`; `dtype`; `device`; `threads`; `model_folder`; `gguf` or null.

The answer (one JSON object, last line on stdout): `version`, `notes`, and `arms`: name → `ttft_seconds` (from ids in
hand to the first new token known), `token_ids` of the answer (greedy), and where known `decode_seconds` (all tokens
after the first) and `cached_tokens`. An arm is measured once; arms: `prefill` (nothing cached), `reordered` (after
`earlier_ids`), or the peer's own names.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

WARM_TOKENS = 512


def read() -> dict[str, Any]:
    """The job; ends the process with a word where there is none."""
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} JOB.json")
    return json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))


def warm_ids(job: dict[str, Any]) -> list[int]:
    """Ids for warming up that share no beginning with the request."""
    return job["token_ids"][::-1][:WARM_TOKENS]


def answer(version: str, arms: dict[str, dict[str, Any]], notes: str = "") -> None:
    """Nothing; the object is on stdout."""
    print("\n" + json.dumps({"version": version, "notes": notes, "arms": arms}), flush=True)


class Watch:
    """Notes when each new token was known."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.times: list[float] = []
        self.ids: list[int] = []

    def add(self, token: int) -> None:
        self.times.append(time.perf_counter())
        self.ids.append(int(token))

    def arm(self, **more: Any) -> dict[str, Any]:
        """The arm that was watched."""
        decode = self.times[-1] - self.times[0] if len(self.times) > 1 else None
        return {"ttft_seconds": self.times[0] - self.start, "token_ids": self.ids, "decode_seconds": decode, **more}
