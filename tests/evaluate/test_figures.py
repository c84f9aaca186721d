"""Every figure as files: pictures that show something, SVGs that hold their labels, the same bytes twice."""

import re
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from matplotlib.image import imread

from infoflow_kv.errors import OptionError
from infoflow_kv.evaluate.figures import (
    draw_budgets,
    draw_calibration,
    draw_hops,
    draw_layers,
    draw_needle,
    draw_pareto,
    draw_selection,
    style,
)

METHODS = ("none", "epic", "infoflow")
NEEDLE = [
    {
        "arm": arm,
        "length": length,
        "depth": depth,
        "accuracy": (place + depth / 50) % 2 >= 1,
        "log_probability": -1.0 - place,
    }
    for place, arm in enumerate(METHODS)
    for length in (1000, 7500)
    for depth in (0, 50, 100)
]
HOPS = [
    {
        "arm": arm,
        "method": arm,
        "hops": hops,
        "accuracy": 1 / (hops + place),
        "log_probability": -0.3 * hops,
        "low": 0.1,
        "high": 0.9 if place else None,
        "order": order,
    }
    for place, arm in enumerate(METHODS)
    for hops in (1, 2, 3, 4)
    for order in ("forward", "shuffled")
]
NO_HITS = [{**record, "accuracy": None, "low": None, "high": None} for record in HOPS]
LAYERS = [
    *({"layer": i, "kl_cont": 0.2 + 0.001 * (i - 9) ** 2, "low": 0.1, "high": 0.4} for i in range(12)),
    {"layers": "all", "kl_cont": 0.19, "low": None, "high": None},
    {"layers": [7, 8, 9], "kl_cont": 0.21, "low": None, "high": None},
    {"layers": [2, 9], "kl_cont": 0.25, "low": None, "high": None},
]
PARETO = [
    {"arm": "full", "method": "full", "budget": None, "x": 1.0, "y": 0.0},
    {"arm": "none", "method": "none", "budget": None, "x": 0.02, "y": 0.4},
    {"arm": "infoflow", "method": "infoflow", "budget": 0.05, "x": 0.07, "y": 0.3},
    {"arm": "infoflow", "method": "infoflow", "budget": 0.15, "x": 0.17, "y": 0.2},
    {"arm": "infoflow[geometry=HL-TP]", "method": "infoflow", "budget": 0.3, "x": 0.32, "y": 0.25},
    {"arm": "infoflow@auto:0.7", "method": "infoflow", "budget": "auto:0.7", "x": 0.2, "y": 0.18},
]
BUDGETS = [
    {"arm": "none", "method": "none", "share": 0.0, "value": 0.4, "low": 0.35, "high": 0.45},
    {"arm": "infoflow", "method": "infoflow", "share": 0.05, "value": 0.3, "low": 0.25, "high": 0.35},
    {"arm": "infoflow", "method": "infoflow", "share": 0.15, "value": 0.2, "low": None, "high": None},
    {"arm": "infoflow[reorder]", "method": "infoflow", "share": 0.15, "value": 0.21, "low": 0.2, "high": 0.22},
]


def explained(tokens: int = 40, **changes: Any) -> dict[str, Any]:
    def chunk(title: str, chosen: int, scored: bool) -> dict[str, Any]:
        scores = [i % 7 / 7 for i in range(tokens)] if scored else []
        return {
            "title": title,
            "tokens": tokens,
            "scores": scores,
            "recomputed": [int(i < chosen) for i in range(tokens)],
        }

    titles = ("Saltmere", "The lighthouse keeper's winter diary")
    return {
        "methods": [
            {"name": "infoflow", "chunks": [{**chunk(t, 13, True), **changes} for t in titles]},
            {"name": "epic", "chunks": [chunk(t, 6, False) for t in titles]},
        ]
    }


CASES: list[tuple[Callable[..., list[Path]], Any, list[str]]] = [
    (draw_needle, NEEDLE, ["none", "epic", "infoflow", "1K", "7.5K", "100", "found, %", "depth of the needle, %"]),
    (draw_hops, HOPS, ["none", "epic", "infoflow", "hops in shuffled order", "variables found, %", "4"]),
    (draw_layers, LAYERS, ["one layer", "layers: all", "layers 7–9", "layers 2, 9", "KL to full prefill, nats"]),
    (draw_pareto, PARETO, ["none", "infoflow", "infoflow[geometry=HL-TP]@30%", "infoflow@auto:0.7", "5%", "15%"]),
    (draw_budgets, BUDGETS, ["none (nothing recomputed)", "infoflow", "infoflow[reorder]"]),
    (
        draw_selection,
        explained(),
        ["1  Saltmere", "2  The lighthouse keeper's w…", "infoflow (26 tokens)", "epic (12 tokens)", "13", "6"],
    ),
]
NAMES = [draw.__name__ for draw, _, _ in CASES]


def texts(svg: Path) -> list[str]:
    """The words of an SVG, read as XML."""
    root = ET.parse(svg).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    return ["".join(node.itertext()).strip() for node in root.iter("{http://www.w3.org/2000/svg}text")]


@pytest.mark.parametrize(("draw", "data", "labels"), CASES, ids=NAMES)
def test_files_show_something(tmp_path: Path, draw: Callable[..., list[Path]], data: Any, labels: list[str]) -> None:
    png, svg = draw(data, tmp_path / "new" / "folder")
    pixels = imread(png)
    assert pixels.shape[1] == 1600 and pixels.shape[0] >= 300
    assert pixels[..., :3].std() > 0.03
    found = texts(svg)
    assert [label for label in labels if label not in found] == []


@pytest.mark.parametrize(("draw", "data", "labels"), CASES, ids=NAMES)
def test_equal_data_give_equal_files(
    tmp_path: Path, draw: Callable[..., list[Path]], data: Any, labels: list[str]
) -> None:
    first, second = draw(data, tmp_path / "a"), draw(data, tmp_path / "b")
    assert [file.name for file in first] == [file.name for file in second]
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()
    assert "<dc:date>" not in first[1].read_text(encoding="utf-8")


@pytest.mark.parametrize("draw", [draw_needle, draw_hops, draw_layers, draw_pareto, draw_budgets, draw_selection])
def test_no_data_is_refused(tmp_path: Path, draw: Callable[..., list[Path]]) -> None:
    with pytest.raises(OptionError, match="got no data; give at least one record with"):
        draw({} if draw is draw_selection else [], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_record_without_a_field_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="the budget figure: record 1 has no value; it has arm, method, share"):
        draw_budgets([BUDGETS[0], {k: v for k, v in BUDGETS[1].items() if k != "value"}], tmp_path)
    with pytest.raises(OptionError, match="the layer figure: record 0 has no layers"):
        draw_layers([{"kl_cont": 0.1}], tmp_path)


def test_needles_at_the_floor_show_the_log_probability(tmp_path: Path) -> None:
    _, svg = draw_needle([{**record, "accuracy": 0.0} for record in NEEDLE], tmp_path)
    found = texts(svg)
    assert "log-probability of the answer, nats a token" in found
    assert "−3.0" in found and "found, %" not in found


@pytest.mark.parametrize(("draw", "data"), [(draw_needle, NEEDLE), (draw_hops, HOPS)])
def test_a_record_without_an_answer_is_no_miss(tmp_path: Path, draw: Callable[..., list[Path]], data: Any) -> None:
    found = texts(draw([{**data[0], "accuracy": None}, *data[1:]], tmp_path)[1])
    assert any("log-probability" in text for text in found) and not any("found, %" in text for text in found)


def test_a_needle_cell_is_the_mean_of_its_needles_and_may_be_empty(tmp_path: Path) -> None:
    cell = {"arm": "x", "length": 1000, "depth": 50, "log_probability": -1.0}
    data = [{**cell, "accuracy": hit} for hit in (1.0, 0.0, 0.0, 0.0)] + [
        {**cell, "length": 2000, "depth": 0, "accuracy": 1.0}
    ]
    found = texts(draw_needle(data, tmp_path)[1])
    assert "25" in found and "100" in found


def test_four_needle_panels_keep_their_axes(tmp_path: Path) -> None:
    data = [{**record, "arm": f"arm {i}"} for i in range(4) for record in NEEDLE if record["arm"] == "epic"]
    found = texts(draw_needle(data, tmp_path)[1])
    assert found.count("7.5K") == 3  # under the lowest panel of each of three columns


def test_full_prefill_is_named_where_it_would_stand_far_away(tmp_path: Path) -> None:
    found = texts(draw_pareto(PARETO, tmp_path)[1])
    assert any(text.endswith("full prefill: 1 and 0") for text in found)
    assert "full" not in found
    near = [{**record, "x": 0.9} if record["method"] == "none" else record for record in PARETO]
    assert "full" in texts(draw_pareto(near, tmp_path)[1])


def test_a_budget_stands_over_a_line_and_in_the_name_of_a_single_point(tmp_path: Path) -> None:
    found = texts(draw_pareto([PARETO[1], *PARETO[3:]], tmp_path)[1])
    assert not {"5%", "15%", "30%"} & set(found)
    assert {"infoflow@15%", "infoflow[geometry=HL-TP]@30%", "infoflow@auto:0.7"} <= set(found)


def test_one_number_of_hops_stands_in_the_middle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    axes = []
    monkeypatch.setattr(style, "save", lambda figure, folder, name: axes.extend(figure.axes) or [])
    draw_hops([r for r in HOPS if r["hops"] == 2], tmp_path)
    for panel in axes:
        low, high = panel.get_xlim()
        places = [x for line in panel.lines for x in line.get_xdata()]
        assert max(abs(x - 2) for x in places) < 0.1 * (high - low)
    draw_hops([{**r, "log_probability": r["log_probability"] * (9 if r["order"] == "forward" else 1)} for r in NO_HITS],
              tmp_path)  # fmt: skip
    assert len({panel.get_ylim() for panel in axes[2:]}) == 1
    assert all(label.get_visible() for panel in axes for label in panel.get_xticklabels())


def test_a_set_with_a_gap_is_no_line_over_the_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    axes = []
    monkeypatch.setattr(style, "save", lambda figure, folder, name: axes.extend(figure.axes) or [])
    draw_layers([{"layers": [3, 7], "kl_cont": 0.2}], tmp_path, num_layers=30)
    [panel] = axes
    thick = sorted(tuple(line.get_xdata()) for line in panel.lines if line.get_linewidth() > 1)
    assert thick == [(2.6, 3.4), (6.6, 7.4)]
    assert panel.get_xlim() == (-0.5, 29.5)


def test_the_calibration_figure_shows_the_chosen_set(tmp_path: Path) -> None:
    sets = [
        {"method": method, "set": name, "layers": layers, "kl_cont": 0.2, "js_cont": js}
        for method, best in (("infoflow", 0.01), ("influence", 0.3))
        for name, layers, js in (("all", "0-5", 0.1), ("best 2", "1,4", best))
    ]
    curve = [{"layer": i, "layers": str(i), "kl_cont": 0.1, "low": None, "high": None} for i in range(6)]
    found = texts(draw_calibration({"budget": 0.15, "items": 3, "curve": curve, "sets": sets}, tmp_path)[1])
    assert "layers: best 2 (chosen)" in found and "layers: all" in found
    assert any(text.startswith("method infoflow, budget 0.15, 3 items") for text in found)


def test_direct_labels_do_not_touch(tmp_path: Path) -> None:
    data = [
        {"arm": f"arm{i}", "method": f"arm{i}", "share": s, "value": 0.3, "low": None, "high": None}
        for i in range(5)
        for s in (0.1, 0.2)
    ]
    root = ET.parse(draw_budgets(data, tmp_path)[1]).getroot()
    heights = []
    for node in root.iter("{http://www.w3.org/2000/svg}text"):
        if "".join(node.itertext()).startswith("arm"):
            turned = re.search(r"([\d.]+)\)$", node.get("transform", ""))  # rotate(angle x y) or translate(x y)
            assert turned
            heights.append(float(turned[1]))
    heights.sort()
    assert len(heights) == 5
    assert min(b - a for a, b in pairwise(heights)) > 11  # points; letters are 9 high


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (explained(recomputed=[1, 0]), "chunk 'Saltmere' of method 'infoflow' has 40 tokens and 2 recomputed"),
        (explained(scores=[0.5]), "has 40 tokens and 1 scores; expected one a token"),
        (explained(title="Other"), "method 'epic' has other chunks than 'infoflow'"),
        ({"methods": [{"name": "x", "chunks": []}]}, "got no chunks"),
        ({"methods": [{"name": "x"}]}, "record 0 has no chunks"),
    ],
)
def test_a_bad_explanation_is_refused(tmp_path: Path, bad: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        draw_selection(bad, tmp_path)


def test_methods_that_recompute_nothing_take_no_place(tmp_path: Path) -> None:
    given = explained()
    none = [chunk | {"recomputed": [0] * 40} for chunk in given["methods"][1]["chunks"]]
    given["methods"][1]["chunks"] = none
    found = texts(draw_selection(given, tmp_path)[1])
    assert "infoflow (26 tokens)" in found and not [text for text in found if text.startswith("epic")]
    alone = {"methods": [{"name": "none", "chunks": none}]}
    assert "none (0 tokens)" in texts(draw_selection(alone, tmp_path)[1])


def test_a_long_chunk(tmp_path: Path) -> None:
    found = texts(draw_selection(explained(3000), tmp_path)[1])
    assert "infoflow (26 tokens)" in found


def test_the_map_counts_reusable_tokens_and_marks_exact_chunks(tmp_path: Path) -> None:
    given = explained()
    for method in given["methods"]:
        method["reusable"] = 40
        method["chunks"][0] |= {"exact": True, "recomputed": [0] * 40}
        method["chunks"][1] |= {"exact": False}
    found = texts(draw_selection(given, tmp_path)[1])
    assert "infoflow (13 of 40 reusable tokens)" in found and found.count("exact") == 2


def test_chunks_without_tokens_take_no_room(tmp_path: Path) -> None:
    given = explained()
    for method in given["methods"]:
        method["chunks"][0] |= {"tokens": 0, "scores": [], "recomputed": []}
    assert "1  Saltmere" in texts(draw_selection(given, tmp_path)[1])
    with pytest.raises(OptionError, match="got 2 chunks without a token"):
        draw_selection(explained(0), tmp_path / "none")


# What matplotlib would read as a formula, what no XML may hold, and what a legend leaves out.
FOREIGN = (r"From $5 to \frac{$6", "a\x00b\nc\ud800 漢", r"_x$^{$")


@pytest.mark.parametrize("foreign", FOREIGN)
@pytest.mark.parametrize(("draw", "data", "labels"), CASES, ids=NAMES)
def test_foreign_text_is_drawn_as_it_is(
    tmp_path: Path, draw: Callable[..., list[Path]], data: Any, labels: list[str], foreign: str
) -> None:
    if draw is draw_selection:
        data = explained(title=foreign)
        data["methods"] = [{**data["methods"][0], "name": foreign}]
    else:
        names = ("arm", "method", "order", "name")
        data = [{k: foreign if k in names else v for k, v in record.items()} | {"name": foreign} for record in data]
    shown = style.words(foreign)
    found = texts(draw(data, tmp_path)[1])
    assert "\n" not in shown and any(shown in text for text in found)


def test_without_matplotlib_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(OptionError, match=r"pip install 'infoflow-kv\[eval\]'"):
        draw_budgets(BUDGETS, tmp_path)


def test_the_look_is_ours_and_leaves_no_trace(tmp_path: Path) -> None:
    with matplotlib.rc_context({"font.size": 31, "axes.facecolor": "red"}):
        before = dict(matplotlib.rcParams)
        inside = draw_budgets(BUDGETS, tmp_path / "a")[0].read_bytes()
        assert dict(matplotlib.rcParams) == before
    assert inside == draw_budgets(BUDGETS, tmp_path / "b")[0].read_bytes()


def test_every_method_has_its_own_colour_and_marker() -> None:
    assert len(set(style.COLOURS.values())) == len(style.COLOURS)
    assert len({style.marker(method) for method in style.COLOURS}) == len(style.COLOURS)
    assert style.colour("my-selector") == style.colour("my-selector")
