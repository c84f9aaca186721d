"""`eval predict` on questions about pictures: items × arms × tiles → OUT/rows.jsonl, as for texts."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infoflow_kv.errors import OptionError
from infoflow_kv.evaluate.arms import Arm, check_distinct
from infoflow_kv.evaluate.predict import Done, Progress, write_rows
from infoflow_kv.evaluate.run_records import run_record
from infoflow_kv.evaluate.vision_items import VisionItem
from infoflow_kv.evaluate.vision_measuring import VisionBench, VisionOptions

if TYPE_CHECKING:
    from infoflow_kv.models import LanguageModel


def predict_vision(
    model: "LanguageModel",
    items: Sequence[VisionItem],
    arms: Sequence[Arm],
    out: Path,
    options: VisionOptions,
    data: Sequence[dict[str, str]] = (),
    environment: dict[str, Any] | None = None,
    on_progress: Progress | None = None,
) -> Done:
    """Measures every item under every arm and appends a row each to `out`/rows.jsonl; resumable, see `predict`.

    An item over the model's window, or with a picture that cannot be read, is left out with the reason: no picture is
    made smaller than the model's own processor makes it. `arms`: see `with_tiles`.

    Raises OptionError for a model that reads text only, and where `out` holds a run of another model, data or options,
    or another process writes to it.
    """
    if not items:
        raise OptionError("no item is left to measure; give at least one")
    bench = VisionBench(model, options)
    bench.engine()  # refuses options that no item could be measured with, before anything is written
    check_distinct(arms, model)
    skipped: dict[str, str] = {}

    def fitted(item: VisionItem) -> tuple[VisionItem | None, str]:
        reason = bench.check(item)
        return (None, reason) if reason else (item, "")

    datasets = list(dict.fromkeys(item.dataset for item in items))
    record = run_record(model, arms, options, data, environment or {}, datasets)
    written, found = write_rows(out, record, items, arms, fitted, bench.rows, skipped, on_progress)
    return Done(written, found, skipped, {})
