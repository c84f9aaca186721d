"""How quick this machine is with one model: a few constants, measured once and kept in the cache folder."""

import json
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

from infoflow_kv.models import LanguageModel, LocalMemory, forward_rows
from infoflow_kv.models.embedded import cache_folder
from infoflow_kv.positions import assemble
from infoflow_kv.prefilling import identify
from infoflow_kv.records import ChunkKV
from infoflow_kv.store import DiskStore

logger = logging.getLogger(__name__)

FORMAT = 1
_FEW, _MANY, _LONG = 16, 256, 2048  # rows, rows, slots
_REPEATS = 3
_SLOW = 1.0  # seconds after which one repeat must do


@dataclass(frozen=True, slots=True)
class Speeds:
    """Seconds of one forward: `forward` for any, `row` for each row, `pair` for each row and slot that it sees. Bytes
    of KV per second: `load` from a disk store, `assemble` into a context."""

    forward: float
    row: float
    pair: float
    load: float
    assemble: float

    def seconds(self, rows: float, pairs: float) -> float:
        """What a forward of so many rows takes."""
        return self.forward + rows * self.row + pairs * self.pair


def measure_speeds(model: LanguageModel, folder: Path | None = None) -> Speeds:
    """This machine's speeds with this model: some seconds. `folder`: where a disk store is, for the load's speed.

    Three forwards that differ in one thing each: few rows, many rows, many rows far back.
    """
    long = min(_LONG, model.window_tokens // 2)
    many = min(_MANY, long // 2)
    few = min(_FEW, many // 2)
    keys, values = model.empty_slots(long)
    keys.zero_()
    values.zero_()
    rotary = model.rotary()

    def forward(start: int, count: int) -> float:
        ranks = torch.arange(start, start + count, device=model.device)
        ids = ranks % 97 + 3
        tables = rotary.tables(ranks)
        return _median(lambda: forward_rows(model, ids, ranks, tables, LocalMemory(keys, values), num_logits=1))

    forward(0, few)  # warm-up
    little, wide, far = forward(0, few), forward(0, many), forward(long - many, many)
    pair = max(0.0, far - wide) / (many * (long - many))
    row = max(1e-9, wide - little - pair * (many**2 - few**2) / 2) / (many - few)
    start = max(0.0, little - row * few - pair * few**2 / 2)
    ids = tuple(3 + index % 97 for index in range(many))
    part = ChunkKV(identify(model, ids), keys[:, :, :many].contiguous(), values[:, :, :many].contiguous())
    with tempfile.TemporaryDirectory(dir=folder, prefix="speeds-") as scratch:
        store = DiskStore(scratch)
        store.put(part)
        load = _median(lambda: store.get(part.identity))
    tables = rotary.tables(torch.arange(many, device=model.device))
    copied = _median(lambda: assemble(model, [part], tables, many, 0))
    return Speeds(start, row, pair, part.num_bytes / load, part.num_bytes / copied)


def find_speeds(model: LanguageModel) -> Speeds | None:
    """The speeds that were measured of this model on this machine, device and number of threads, if they were."""
    file = speeds_file(model)
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        if record["format"] != FORMAT:
            raise ValueError(f"format {record['format']!r}, expected {FORMAT}")
        found = Speeds(**{field.name: float(record["speeds"][field.name]) for field in fields(Speeds)})
        if not (found.forward >= 0 and found.row > 0 and found.pair >= 0 and found.load > 0 and found.assemble > 0):
            raise ValueError(f"speeds that cannot be: {found}")
        return found
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("the speeds in %s are not used: %s; they are measured anew by `ingest`", file, error)
        return None


def keep_speeds(model: LanguageModel, speeds: Speeds) -> Path:
    """The file in which the speeds are now, whole."""
    file = speeds_file(model)
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
    record = {"format": FORMAT, "model": model.name, "speeds": asdict(speeds)}
    partial.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, file)
    return file


def speeds_file(model: LanguageModel) -> Path:
    """Where the speeds of this model on this machine are kept."""
    identity = model.identity
    device = str(model.device).replace(":", "-")
    name = f"{identity.weights[:32]}-{identity.dtype}-{device}-{torch.get_num_threads()}.json"
    return cache_folder() / "speeds" / name


def _median(work: Callable[[], object]) -> float:
    seconds: list[float] = []
    for _ in range(_REPEATS):
        if seconds and seconds[0] > _SLOW:
            break
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return max(statistics.median(seconds), 1e-9)
