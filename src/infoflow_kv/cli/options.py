"""The options that several verbs share: one name, one meaning, one help text each. Imports no torch."""

import inspect
from typing import Annotated

import typer

from infoflow_kv.errors import OptionError

MODEL = "smollm2-135m"
DTYPE = "float32"
DEVICE = "cpu"
METHOD = "infoflow"
BUDGET = 0.15
LAYERS = "auto"
CHUNK_TOKENS = 512
MAX_FILE_BYTES = 20 * 2**20
NAMESPACE = "public"
INSTRUCTION = "Answer the question using the documents."
BUDGET_TEXT = f"{BUDGET:g}"
TILES = 1
GEOMETRY = "GLOBAL"
HEAD_POLICY = "head"
MAX_NEW_TOKENS = 64
STORE_DEFAULT = "kv in the cache folder"
LAYOUT = "auto"
TIMEOUT_SECONDS = 60.0

_DOCUMENTS, _MODEL, _STORE, _METHOD, _ANSWER = "Documents", "Model", "Store", "Method", "Answer"
_RANKS = "Several ranks (under torchrun)"

Paths = Annotated[
    list[str],
    typer.Argument(
        metavar="PATH",
        help="Files, folders (all files below) or - for standard input: text, Markdown, HTML, PDF, JSONL, images.",
        show_default=False,
    ),
]
ChunkTokens = Annotated[int, typer.Option(metavar="N", help="Longest chunk, in tokens.", rich_help_panel=_DOCUMENTS)]
MaxFileBytes = Annotated[
    int, typer.Option(metavar="N", help="Files larger than this are skipped.", rich_help_panel=_DOCUMENTS)
]
PdfPages = Annotated[
    bool,
    typer.Option(
        "--pdf-pages",
        metavar="",
        help="Read each page of a PDF as an image, instead of its text; needs a vision-language model.",
        rich_help_panel=_DOCUMENTS,
    ),
]
Tiles = Annotated[
    int,
    typer.Option(
        metavar="K",
        help="Prefill each image in K × K tiles that do not see each other; 1: whole. It is part of what is stored: "
        "use the same for ingest and ask.",
        rich_help_panel=_DOCUMENTS,
    ),
]
Instruction = Annotated[
    str,
    typer.Option(
        metavar="TEXT",
        help="What stands before the documents. It is part of what is stored: use the same for ingest and ask.",
        rich_help_panel=_DOCUMENTS,
    ),
]
System = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT",
        help="The system message. It is part of what is stored: use the same for ingest and ask.",
        show_default="the model's own",
        rich_help_panel=_DOCUMENTS,
    ),
]
Model = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="A built-in name (see `infoflow-kv models`), a model folder, a hub id, or gguf:FILE.",
        rich_help_panel=_MODEL,
    ),
]
Dtype = Annotated[str, typer.Option(metavar="TYPE", help="float32, bfloat16 or float16.", rich_help_panel=_MODEL)]
Device = Annotated[
    str,
    typer.Option(
        metavar="NAME", help="cpu, cuda or cuda:N; of several ranks, each takes its own.", rich_help_panel=_MODEL
    ),
]
Store = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="DIR",
        help="Folder where chunk KV is kept; made if it is not there.",
        show_default=STORE_DEFAULT,
        rich_help_panel=_STORE,
    ),
]
Namespace = Annotated[
    str,
    typer.Option(metavar="NAME", help="Tenant: chunks of one are never used for another.", rich_help_panel=_STORE),
]
Budget = Annotated[
    float,
    typer.Option(
        metavar="SHARE",
        help="Share (0 to 1) of the reusable tokens that is recomputed; 1 equals full prefill.",
        rich_help_panel=_METHOD,
    ),
]
Method = Annotated[
    str,
    typer.Option(
        metavar="NAME", help="How stored chunks are used; see `infoflow-kv methods`.", rich_help_panel=_METHOD
    ),
]
Layers = Annotated[
    str,
    typer.Option(
        metavar="SET",
        help="Layers whose attention scores the tokens: auto, all, relative, or numbers like 22-25 or 3,7,9-11.",
        rich_help_panel=_METHOD,
    ),
]
Question = Annotated[str, typer.Argument(metavar="QUESTION", help="What to ask.", show_default=False)]
NoStore = Annotated[
    bool, typer.Option("--no-store", metavar="", help="Neither read nor write stored chunks.", rich_help_panel=_STORE)
]
MaxNewTokens = Annotated[int, typer.Option(metavar="N", help="Longest answer, in tokens.", rich_help_panel=_ANSWER)]
BudgetText = Annotated[
    str,
    typer.Option(
        "--budget",
        metavar="SHARE",
        help="Share (0 to 1) of the reusable tokens that is recomputed; 1 equals full prefill. auto or auto:P: as many "
        "as cover the share P of the predicted influence.",
        rich_help_panel=_METHOD,
    ),
]
BudgetMax = Annotated[
    float | None,
    typer.Option(
        metavar="SHARE",
        help="Largest share of the reusable tokens that --budget auto may take.",
        show_default="0.3",
        rich_help_panel=_METHOD,
    ),
]
Geometry = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Positions of chunks and prompt while tokens are scored: GLOBAL, HL-HP, HL-TP or TL-TP.",
        rich_help_panel=_METHOD,
    ),
]
Plan = Annotated[
    bool,
    typer.Option(
        "--plan/--no-plan",
        help="Full prefill where that is predicted to be quicker, from what `ingest` measured of this machine. One "
        "process only.",
        rich_help_panel=_METHOD,
    ),
]
Reorder = Annotated[
    bool,
    typer.Option(
        "--reorder", metavar="", help="Put the chunks that matter most next to the question.", rich_help_panel=_METHOD
    ),
]
ChunkFloor = Annotated[
    float,
    typer.Option(
        metavar="SHARE", help="Share of the budget that is spread over all chunks first.", rich_help_panel=_METHOD
    ),
]
ChunkCap = Annotated[
    float, typer.Option(metavar="SHARE", help="Most of the budget that one chunk gets.", rich_help_panel=_METHOD)
]
HeadPolicy = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="What chunks are prefilled behind: head (the chat header) or none. It is part of what is stored: use the "
        "same for ingest and ask.",
        rich_help_panel=_DOCUMENTS,
    ),
]
Layout = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Where K and V are while tokens are recomputed: Q (each rank keeps its chunks, queries visit them), H "
        "(each rank has its heads of all), HQ (both), or auto, the one that sends least.",
        rich_help_panel=_RANKS,
    ),
]
Timeout = Annotated[
    float,
    typer.Option(metavar="SECONDS", help="How long ranks wait for each other in one exchange.", rich_help_panel=_RANKS),
]
Json = Annotated[bool, typer.Option("--json", metavar="", help="Print JSON, and nothing else, on standard output.")]


def flowing(text: str | None) -> str:
    r"""The help text, each paragraph in one line for the terminal to wrap; what follows a `\b` line stays as it is."""
    paragraphs = inspect.cleandoc(text or "").split("\n\n")
    return "\n\n".join(p[2:] if p.startswith("\b\n") else " ".join(p.split()) for p in paragraphs)


def check_tiles(tiles: int) -> None:
    """Nothing; OptionError for a number of tiles that cannot be, before anything slow is done."""
    if tiles < 1:
        raise OptionError(f"--tiles {tiles} is less than 1; give 1 for whole images, or 2 or more for tiles")


def read_budget(text: str) -> float | str:
    """The number that `--budget` gives, or `auto…` as it is; OptionError for other words."""
    try:
        return float(text)
    except ValueError:
        pass
    if text.partition(":")[0] == "auto":
        return text  # what stands behind it is checked with everything else
    raise OptionError(f"--budget '{text}' is neither a number in 0..1 nor auto or auto:P, for example auto:0.8")
