"""`infoflow-kv eval predict` on questions about pictures: arms × tiles → rows."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infoflow_kv.cli import opening
from infoflow_kv.cli.evaluation.lists import split_list
from infoflow_kv.cli.evaluation.running import budgets, run, tell, writing_arms
from infoflow_kv.errors import OptionError

if TYPE_CHECKING:
    from infoflow_kv.evaluate.vision_readers import VisionLoaded

TILES = "0,2,4"
"""The k of the paper's Table 4."""

_PICTURES = "Pictures"
Rules = Annotated[
    str | None,
    typer.Option(
        metavar="SET",
        help="By whose rules the pictures' questions are asked and scored: chartqa, infovqa, docvqa, ocrbench, "
        "realworldqa or hrbench4k; needed where a file does not tell.",
        show_default="what the file tells",
        rich_help_panel=_PICTURES,
    ),
]
Tiles = Annotated[
    str | None,
    typer.Option(
        metavar="LIST",
        help="Images are prefilled in k × k tiles, each arm once for every k; 0 is full prefill, 1 the whole image.",
        show_default=f"{TILES}, of pictures",
        rich_help_panel=_PICTURES,
    ),
]


def predict_pictures(
    data: list[str],
    out: str,
    *,
    limit: int | None,
    skip: int,
    rules: str | None,
    tiles: str | None,
    methods: str,
    budget: str,
    geometry: str | None,
    reorder: bool,
    generate: str,
    measuring: dict[str, Any],
    model: str,
    dtype: str,
    device: str,
    as_json: bool,
) -> int:
    """0, the rows being in the folder and that having been said. `measuring`: the fields of `VisionOptions` that are
    options of their own."""
    from infoflow_kv.evaluate.arms import parse_arms, with_tiles

    loaded = [read_pictures(name, rules) for name in data]
    items = [item for name, read in zip(data, loaded, strict=True) for item in taken(name, read, skip, limit)]
    check_ids([item.id for item in items])
    arms = with_tiles(
        parse_arms(methods, budgets(budget), geometry=geometry, reorder=reorder), wanted_tiles(tiles or TILES)
    )

    from infoflow_kv.evaluate.run_records import check_folder
    from infoflow_kv.evaluate.vision_measuring import VisionOptions

    chosen = VisionOptions(**measuring, rules=rules, generate=writing_arms(generate, arms, geometry, reorder))
    records = [{"file": Path(name).name, "sha256": read.sha256} for name, read in zip(data, loaded, strict=True)]
    check_folder(Path(out), chosen, records)
    language_model = opening.load_model(model, dtype, device)

    from infoflow_kv.evaluate.vision_predict import predict_vision as measure

    done = run(
        lambda environment, say: measure(language_model, items, arms, Path(out), chosen, records, environment, say),
        len(items) * len(arms),
        Path(out),
        device,
    )
    skipped = {identity: reason for read in loaded for identity, reason in read.skipped.items()}
    return tell(done, language_model, len(items), arms, out, skipped, as_json)


def read_pictures(name: str, rules: str | None) -> "VisionLoaded":
    """What the file holds; one line on stderr for each record that nothing can score."""
    from infoflow_kv.evaluate.vision_readers import read_vision_items

    read = read_vision_items(name, rules=rules)
    opening.tell_skipped(read.skipped)
    return read


def taken(name: str, read: "VisionLoaded", skip: int, limit: int | None) -> "tuple[Any, ...]":
    """The items of a file that are measured; OptionError where none is left."""
    found = read.items[skip:][:limit]
    if not found:
        raise OptionError(f"--skip {skip} passes over every item of '{name}'; give a smaller number")
    return found


def check_ids(ids: list[str]) -> None:
    """Nothing; OptionError where two files have an item of one id."""
    seen: set[str] = set()
    for identity in ids:
        if identity in seen:
            raise OptionError(f"two files have an item '{identity}'; predict them into folders of their own")
        seen.add(identity)


def wanted_tiles(text: str) -> list[int]:
    """The numbers of `--tiles`; OptionError for what is none, and for none at all."""
    from infoflow_kv.evaluate.arms import check_tiles

    found = [0 if part == "0" else check_tiles(part, "--tiles") for part in split_list(text)]
    if not found:
        raise OptionError(f"--tiles is '{text}'; give a list like {TILES}")
    return found
