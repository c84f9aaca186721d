"""One look for all figures: a colour and a marker per method, text sized for 800 pixels, files that repeat exactly.

matplotlib comes with the extra `eval` and is imported inside functions only.
"""

import hashlib
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infoflow_kv.errors import OptionError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 8.0  # inches; 800 pixels at 100 dots per inch, so that 9 pt letters are 12 pixels high there
DOTS = 200
INK = "#262626"
MUTED = "#6b6b6b"
RULE = "#dedede"
_FONT = "DejaVu Sans"
# What no XML may hold, what has no UTF-8, and what would break a label's line.
_NO_TEXT = re.compile("[\x00-\x1f\x7f\u2028\u2029\ud800-\udfff\ufffe\uffff]")

# Okabe and Ito's colours for the methods that stand beside each other most, darker or lighter relatives for the rest.
COLOURS: dict[str, str] = {
    "full": "#000000",
    "none": "#8a8a8a",
    "random": "#b59f7b",
    "first-k": "#6fbf9f",
    "epic": "#009e73",
    "cacheblend": "#d55e00",
    "cacheblend-gradual": "#e69f00",
    "infoflow": "#0072b2",
    "infoflow-l2": "#56b4e9",
    "influence": "#b0458c",
    "a3": "#5b4ea0",
    "prophetkv": "#9a8fd0",
    "seam": "#8c6d1f",
    "oracle": "#a61c1c",
}
_SPARE = ("#3f6f8f", "#7a4f2f", "#4f7f3f", "#8f5f7f", "#5f5f9f", "#7f7f2f")
_MARKERS: dict[str, str] = {
    "full": "*",
    "none": "x",
    "random": ".",
    "first-k": "<",
    "epic": "^",
    "cacheblend": "s",
    "cacheblend-gradual": "D",
    "infoflow": "o",
    "infoflow-l2": "p",
    "influence": "v",
    "a3": "h",
    "prophetkv": "H",
    "seam": ">",
    "oracle": "P",
}


def colour(method: str) -> str:
    """The colour of a method, the same in every figure; a name outside the table gets a spare one by its letters."""
    return COLOURS.get(method) or _SPARE[hashlib.sha256(words(method).encode()).digest()[0] % len(_SPARE)]


def marker(method: str) -> str:
    """The marker of a method, so that lines are told apart without colour too."""
    return _MARKERS.get(method, "d")


def words(text: Any) -> str:
    """Foreign text (a title, an arm, a data set) as a label may hold it: one line that every SVG reader takes.

    Dollar signs and backslashes stay as they are, for figures read no formulas (`drawing`).
    """
    return _NO_TEXT.sub("\N{REPLACEMENT CHARACTER}", re.sub(r"[\t\n\r]+", " ", str(text)))


@contextmanager
def drawing(name: str) -> Iterator[None]:
    """A context in which figures have our look; `name` salts the SVG's ids, so that figures can share one page.

    OptionError where matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise OptionError("figures need matplotlib, which is not installed: pip install 'infoflow-kv[eval]'") from None
    look: dict[Any, Any] = {
        "font.family": [_FONT],  # comes with matplotlib
        "font.size": 10,
        "axes.titlesize": 10.5,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.labelsize": 10,
        "axes.labelcolor": INK,
        "axes.edgecolor": MUTED,
        "axes.linewidth": 0.8,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "grid.color": RULE,
        "grid.linewidth": 0.8,
        "text.color": INK,
        "text.parse_math": False,  # titles are foreign text: "From $5 to $6" is no formula
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "xtick.labelcolor": INK,
        "ytick.labelcolor": INK,
        "xtick.labelsize": 9,
        "ytick.labelsize": 9,
        "legend.frameon": False,
        "legend.fontsize": 9,
        "lines.linewidth": 1.8,
        "lines.markersize": 5.5,
        "figure.facecolor": "white",
        "savefig.facecolor": "white",
        "svg.fonttype": "none",
        "svg.hashsalt": f"infoflow-kv {name}",
    }
    with matplotlib.rc_context(), warnings.catch_warnings():
        # The PNG shows a box for a letter that our font lacks; the SVG keeps it as text.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        matplotlib.rcdefaults()  # a user's matplotlibrc must not change the files
        matplotlib.rcParams.update(look)
        yield


def new_figure(height: float, width: float = WIDTH) -> "Figure":
    """An empty figure of this size in inches, laid out without overlaps, bound to no window system."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: "Figure", folder: Path | str, name: str) -> list[Path]:
    """The PNG and the SVG written into `folder`; both carry no date and no version, so equal data give equal files."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    png, svg = folder / f"{name}.png", folder / f"{name}.svg"
    figure.savefig(png, dpi=DOTS, metadata={"Software": None})
    figure.savefig(svg, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    # The SVG keeps text as text; Verdana has the same widths, for viewers without our font.
    text = svg.read_text(encoding="utf-8").replace(f"'{_FONT}'", f"'{_FONT}', Verdana, sans-serif")
    svg.write_text(text, encoding="utf-8")
    return [png, svg]


def label_ends(axes: "Axes", ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Writes each (x, y, text, colour) right of the axes at its height, pushed apart so that no two touch.

    A thin line leads from the text to its point where it had to move. Call it when the axes' limits are final.
    """
    figure = axes.get_figure(root=True)
    if not ends or figure is None:
        return
    figure.draw_without_rendering()  # settles the layout, so that heights are known
    box = axes.get_window_extent()
    gap = 13.5 / 72 * figure.dpi / box.height
    order = sorted(range(len(ends)), key=lambda i: ends[i][1])
    inverse = axes.transAxes.inverted()
    points = [inverse.transform(axes.transData.transform(end[:2])) for end in ends]
    heights = _spread([float(points[i][1]) for i in order], gap)
    for i, height in zip(order, heights, strict=True):
        _, _, text, ink = ends[i]
        x, y = (float(value) for value in points[i])
        axes.annotate(
            words(text),
            xy=(x, y),
            xytext=(1.03, height),
            xycoords="axes fraction",
            textcoords="axes fraction",
            va="center",
            fontsize=9,
            color=ink,
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": ink, "linewidth": 0.6, "alpha": 0.5, "shrinkA": 1, "shrinkB": 4},
        )


def _spread(heights: list[float], gap: float) -> list[float]:
    """Ascending heights moved as little as a block needs so that neighbours are at least `gap` apart."""
    blocks: list[tuple[float, int]] = []  # (centre, members)
    for height in heights:
        blocks.append((height, 1))
        while len(blocks) > 1:
            (low, few), (high, many) = blocks[-2], blocks[-1]
            if high - low >= gap * (few + many) / 2:
                break
            blocks[-2:] = [((low * few + high * many) / (few + many), few + many)]
    return [centre + gap * (i - (count - 1) / 2) for centre, count in blocks for i in range(count)]


def require(data: Sequence[Any], what: str, fields: Sequence[str]) -> None:
    """Nothing; OptionError where a figure has no data or a record lacks one of its fields."""
    if not data:
        raise OptionError(f"{what} got no data; give at least one record with {', '.join(fields)}")
    for place, record in enumerate(data):
        missing = [field for field in fields if field not in record]
        if missing:
            raise OptionError(f"{what}: record {place} has no {', '.join(missing)}; it has {', '.join(record)}")
