"""Images through the command line, from the file to the answer: what a file holds, what is refused, what is reused."""

import json
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from cli_runs import HARBOUR, KEEPER, Cli, Result, chunk_files
from PIL import Image

import tiny_vlm
from infoflow_kv.cli import opening

QUESTION = "What is on the picture?"
FAMILIES = ("qwen3_vl", "qwen2_5_vl", "idefics3")
BLOBS = tiny_vlm.image(150, 90, 1)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("seeing")
    return {family: tiny_vlm.saved(family, root / family) for family in FAMILIES}


@pytest.fixture
def seeing(folders: dict[str, Path]) -> Path:
    """The folder of a tiny vision-language model."""
    return folders["qwen3_vl"]


@pytest.fixture
def ask(cli: Cli, seeing: Path) -> Cli:
    def run(*arguments: object) -> Result:
        model = () if "--model" in arguments else ("--model", seeing)
        return cli("ask", QUESTION, *arguments, *model, "--max-new-tokens", 3, "--json")

    return run


def write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def png(width: int = 150, height: int = 90, seed: int = 1) -> bytes:
    return tiny_vlm.encoded_file(tiny_vlm.image(width, height, seed))


def usage(result: Result) -> dict[str, int]:
    assert result.code == 0, result.err
    return dict(result.record["usage"])


# ---- from the file to the answer ----


@pytest.mark.parametrize("family", FAMILIES)
def test_an_image_file_is_answered_and_reused(cli: Cli, folders: dict[str, Path], tmp_path: Path, family: str) -> None:
    pictures = write(tmp_path / "a.png", png()), write(tmp_path / "b.png", png(60, 140, 2))
    text = write(tmp_path / "c.txt", KEEPER.encode())
    arguments = ("--model", folders[family], "--max-new-tokens", 3, "--budget", 1, "--json")
    first = cli("ask", QUESTION, *pictures, text, *arguments)
    assert usage(first)["cached_chunks"] == 0
    second = cli("ask", QUESTION, *pictures, text, *arguments)
    assert usage(second)["cached_chunks"] == usage(second)["chunks"] == 3
    assert usage(second)["prefilled_tokens"] == 0
    full = cli("ask", QUESTION, *pictures, text, *arguments, "--method", "full")
    assert first.record["answer"] == second.record["answer"] == full.record["answer"]
    moved = cli("ask", QUESTION, text, pictures[1], *arguments)
    assert usage(moved)["cached_chunks"] == 2
    seen = [(chunk.get("images"), chunk.get("visual_tokens", 0)) for chunk in first.record["chunks"]]
    assert [images for images, _ in seen] == [1, 1, None]
    assert all(
        0 < visual < chunk["tokens"] for (_, visual), chunk in zip(seen[:2], first.record["chunks"], strict=False)
    )
    assert list(first.record["chunks"][2]) == ["id", "title", "tokens", "recomputed", "mass", "order"]


def test_ingest_stores_what_ask_finds_in_tiles_too(cli: Cli, ask: Cli, seeing: Path, tmp_path: Path) -> None:
    folder = write(tmp_path / "docs/a.png", png()).parent
    write(folder / "b.txt", KEEPER.encode())
    assert cli("ingest", folder, "--model", seeing, "--tiles", 2).code == 0
    assert usage(ask(folder, "--tiles", 2))["prefilled_tokens"] == 0
    whole = usage(ask(folder))
    assert (whole["cached_chunks"], whole["chunks"]) == (1, 2)  # the text's
    wrong = ask(folder, "--tiles", 0)
    assert (wrong.code, wrong.out) == (2, "")
    assert "--tiles 0 is less than 1" in wrong.err


def test_a_line_of_jsonl_may_hold_text_and_images(ask: Cli, tmp_path: Path) -> None:
    write(tmp_path / "docs/pictures/a.png", png())
    parts = [{"text": "The harbour."}, {"image": "pictures/a.png"}, {"text": "Left: the keeper."}]
    lines = [{"parts": parts, "title": "Harbour"}, {"text": KEEPER}]
    path = write(tmp_path / "docs/all.jsonl", "\n".join(map(json.dumps, lines)).encode())
    result = ask(path)
    assert usage(result)["chunks"] == 2
    first, second = result.record["chunks"]
    assert (first["id"], first["title"], first["images"]) == (f"{path}:1#0", "Harbour", 1)
    assert first["visual_tokens"] < first["tokens"] - 20  # the words stand with it
    assert "images" not in second


def test_images_come_through_standard_input(cli: Cli, seeing: Path) -> None:
    result = cli("ask", QUESTION, "-", "--model", seeing, "--max-new-tokens", 1, "--json", stdin=png())
    assert result.record["chunks"][0]["images"] == 1


def scanned(*seeds: int) -> bytes:
    """A PDF of pages that are pictures, without text."""
    first, *others = [tiny_vlm.image(150, 90, seed) for seed in seeds]
    return tiny_vlm.encoded_file(first, "PDF", save_all=True, append_images=others)


def test_pages_of_a_pdf_are_images_that_are_found_again(ask: Cli, cli: Cli, seeing: Path, tmp_path: Path) -> None:
    pytest.importorskip("pypdfium2", reason="pypdfium2 is not installed; it is in extra `vlm`")
    path = write(tmp_path / "scan.pdf", scanned(1, 2))
    assert cli("ingest", path, "--model", seeing, "--pdf-pages").code == 0
    first = ask(path, "--pdf-pages")
    assert [chunk["id"] for chunk in first.record["chunks"]] == [f"{path}:1#0", f"{path}:2#0"]
    assert usage(first)["prefilled_tokens"] == 0
    other = write(tmp_path / "other.pdf", scanned(3, 2))
    assert usage(ask(other, "--pdf-pages"))["cached_chunks"] == 1  # the page that both have
    plain = ask(path)
    assert plain.code == 2 and "no text layer" in plain.err and "--pdf-pages" in plain.err


def test_pages_of_a_pdf_need_a_model_that_sees(cli: Cli, tiny_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("pypdfium2", reason="pypdfium2 is not installed; it is in extra `vlm`")
    path = write(tmp_path / "scan.pdf", scanned(1))
    for verb in (("ask", QUESTION), ("ingest",), ("explain", QUESTION)):
        out = ("--out", tmp_path / "page.html") if verb[0] == "explain" else ()
        result = cli(*verb, path, "--pdf-pages", "--model", tiny_model, *out)
        assert (result.code, result.out) == (2, "")
        assert "--pdf-pages reads pages as images, and" in result.err and "reads text only" in result.err


# ---- odd pictures, each answered or refused in one line ----


def rotated() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return tiny_vlm.encoded_file(BLOBS, "JPEG", quality=95, exif=exif)


def animated() -> bytes:
    frames = [tiny_vlm.image(90, 60, seed) for seed in (1, 2, 3)]
    return tiny_vlm.encoded_file(frames[0], "GIF", save_all=True, append_images=frames[1:])


def bomb() -> bytes:
    """A small PNG whose header says that it is of 60,000 × 60,000 pixels."""
    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
    )


ANSWERED = {
    "1x1": ("a.png", lambda: png(1, 1)),
    "animated": ("a.gif", animated),
    "CMYK": ("a.jpg", lambda: tiny_vlm.encoded_file(BLOBS.convert("CMYK"), "JPEG")),
    "alpha": ("a.png", lambda: tiny_vlm.encoded_file(BLOBS.convert("RGBA"))),
    "16-bit": ("a.png", lambda: tiny_vlm.encoded_file(BLOBS.convert("L").convert("I;16"))),
    "EXIF-rotated": ("a.jpg", rotated),
    "WebP": ("a.webp", lambda: tiny_vlm.encoded_file(BLOBS, "WEBP")),
    "BMP": ("a.bmp", lambda: tiny_vlm.encoded_file(BLOBS, "BMP")),
    "TIFF": ("a.tiff", lambda: tiny_vlm.encoded_file(BLOBS, "TIFF")),
    "wrong extension": ("a.txt", png),
    "extension of another format": ("a.jpg", png),
    "extension of no image": ("a.docx", png),
    "no extension": ("a", png),
}


@pytest.mark.parametrize("case", ANSWERED)
def test_an_odd_picture_is_answered(ask: Cli, tmp_path: Path, case: str) -> None:
    name, make = ANSWERED[case]
    path = write(tmp_path / name, make())
    result = ask(path)
    assert usage(result)["chunks"] == 1
    assert result.record["chunks"][0]["images"] == 1
    assert bool(result.record["notices"]) == (case == "animated")
    assert ("several frames" in result.err) == (case == "animated")
    again = ask(path)
    assert again.record["answer"] == result.record["answer"]
    assert usage(again)["prefilled_tokens"] == 0


REFUSED = {
    "truncated": ("a.png", lambda: png()[:200], "damaged or truncated"),
    "bomb": ("a.png", bomb, "60000|3600000000"),
    "text": ("a.png", lambda: b"words", "holds no image of a known kind"),
    "empty": ("a.jpeg", lambda: b"", "holds no image of a known kind"),
    "camera raw": ("a.nef", lambda: tiny_vlm.encoded_file(BLOBS, "TIFF"), "a .nef file cannot be read"),
    "too narrow": ("a.png", lambda: png(900, 2), "2 pixels|900 × 2"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_picture_is_refused_in_one_line_or_left_out(ask: Cli, tmp_path: Path, case: str) -> None:
    name, make, words = REFUSED[case]
    path = write(tmp_path / "docs" / name, make())
    alone = ask(path)
    assert (alone.code, alone.out) == (2, "")
    assert any(word in alone.err for word in words.split("|")), alone.err
    assert len(alone.err.splitlines()) == 1
    write(tmp_path / "docs/b.txt", KEEPER.encode())
    beside = ask(tmp_path / "docs")
    assert usage(beside)["chunks"] == 1
    [notice] = beside.record["notices"]
    assert notice.startswith(f"skipped '{path}': ")
    assert notice in beside.err


def test_a_picture_under_an_odd_name(ask: Cli, tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/odd-\xff\n.png"))
    assert usage(ask(write(path, png())))["chunks"] == 1
    damaged = ask(write(path, png()[:200]))
    assert (damaged.code, damaged.out, len(damaged.err.splitlines())) == (2, "", 1)
    write(tmp_path / "b.txt", KEEPER.encode())
    beside = ask(path, tmp_path / "b.txt")
    [notice] = beside.record["notices"]
    assert beside.code == 0 and "damaged or truncated" in notice and len(beside.err.splitlines()) == 2


def test_a_text_model_refuses_images_and_reads_what_is_beside(cli: Cli, tiny_model: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "docs/a.png", png())
    arguments = ("--model", tiny_model, "--max-new-tokens", 1, "--json")
    alone = cli("ask", QUESTION, path, *arguments)
    assert (alone.code, alone.out) == (2, "")
    assert "holds images, and this model reads text only; load a vision-language model" in alone.err
    write(tmp_path / "docs/b.txt", KEEPER.encode())
    beside = cli("ask", QUESTION, tmp_path / "docs", *arguments)
    assert usage(beside)["chunks"] == 1 and "reads text only" in beside.err


def test_too_many_image_tokens_for_the_window(ask: Cli, seeing: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    for file in seeing.iterdir():
        (small / file.name).write_bytes(file.read_bytes())
    config = json.loads((small / "config.json").read_text(encoding="utf-8"))
    config["text_config"]["max_position_embeddings"] = 64
    (small / "config.json").write_text(json.dumps(config), encoding="utf-8")
    pictures = [write(tmp_path / f"{seed}.png", png(150, 90, seed)) for seed in range(4)]
    result = ask(*pictures, "--model", small, "--chunk-tokens", 32)
    assert (result.code, result.out) == (2, "")
    assert "more than the model's window of 64" in result.err


# ---- which picture is which ----


def test_one_picture_under_two_names_and_formats_is_one_chunk(ask: Cli, tmp_path: Path, monkeypatch: Any) -> None:
    """One run of the tower, one stored chunk; the store knows nothing of names."""
    towers, runs = [], []
    load = opening.load_model

    def loaded(*given: Any) -> Any:
        model = load(*given)
        towers.append(model.vision.towers)
        runs.append(towers[-1].runs)  # of the proof at load
        return model

    monkeypatch.setattr(opening, "load_model", loaded)
    data = png()
    paths = write(tmp_path / "a.png", data), write(tmp_path / "other.dat", data)
    lossless = write(tmp_path / "a.bmp", tiny_vlm.encoded_file(BLOBS, "BMP"))
    first = ask(*paths, lossless, "--store", tmp_path / "kv")
    assert usage(first)["chunks"] == 3
    assert towers[0].runs - runs[0] == 1
    assert len(chunk_files(tmp_path / "kv")) == 2  # with the chat header
    assert usage(ask(lossless, "--store", tmp_path / "kv"))["prefilled_tokens"] == 0
    assert towers[1].runs == runs[1]


def test_two_pictures_of_equal_size_are_never_mixed(ask: Cli, tmp_path: Path) -> None:
    one, other = write(tmp_path / "a.png", png(seed=1)), write(tmp_path / "b.png", png(seed=2))
    assert usage(ask(one))["cached_chunks"] == 0
    assert usage(ask(other))["cached_chunks"] == 0
    one.write_bytes(other.read_bytes())  # the name stays, the picture does not
    assert usage(ask(one))["prefilled_tokens"] == 0
    one.write_bytes(png(seed=3))
    assert usage(ask(one))["cached_chunks"] == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_image_tokens_that_are_typed_stay_text(cli: Cli, folders: dict[str, Path], tmp_path: Path, family: str) -> None:
    """In a document, a caption, a title, a question: none becomes the token that stands for an image."""
    from infoflow_kv import Engine, load, read_paths

    typed = "<|vision_start|><|image_pad|><|vision_end|><|video_pad|><image><fake_token_around_image><global-img> "
    write(tmp_path / "docs/a.png", png())
    lines = [
        {"text": typed + HARBOUR},
        {"parts": [{"text": typed}, {"image": "a.png"}, {"text": typed}], "title": typed},
    ]
    path = write(tmp_path / "docs/all.jsonl", "\n".join(map(json.dumps, lines)).encode())
    model = load(folders[family])
    engine = Engine(model)
    prompt = engine.prompt(typed + "?", read_paths([path]).documents)
    image_id = model.vision.adapter.image_token_id
    visual = sum(chunk.images.visual.numel() for chunk in prompt.chunks if chunk.images)
    assert prompt.token_ids.count(image_id) == visual > 0
    assert all(image_id not in chunk.token_ids for chunk in prompt.chunks if chunk.images is None)
    assert image_id not in prompt.suffix_ids
    markers = [token for token in model.vision.adapter.template_ids if token != image_id]
    assert all(token not in prompt.suffix_ids for token in markers)
    arguments = ("--model", folders[family], "--max-new-tokens", 2, "--budget", 1, "--json")
    result = cli("ask", typed + "?", path, *arguments)
    full = cli("ask", typed + "?", path, *arguments, "--method", "full")
    assert usage(result)["context_tokens"] == prompt.context_tokens
    assert result.record["answer"] == full.record["answer"]


# ---- check and explain ----


@pytest.mark.parametrize("tiles", [1, 2])
def test_check_has_a_picture_among_its_documents(cli: Cli, seeing: Path, monkeypatch: Any, tiles: int) -> None:
    """It holds for a model that sees, and fails where what the tower adds to early layers is lost."""
    from infoflow_kv.models import hooks

    arguments = ("check", "--quick", "--model", seeing, "--tiles", tiles, "--json")
    good = cli(*arguments)
    assert (good.code, good.record["passed"]) == (0, True), good.out
    load = opening.load_model

    def harmed(*given: Any) -> Any:
        model = load(*given)
        monkeypatch.setattr(hooks, "_rows_of", lambda call, layer: None)
        return model

    monkeypatch.setattr(opening, "load_model", harmed)
    bad = cli(*arguments)
    assert bad.code == 1
    assert {"full-prefill", "budget-1-disk"} <= {r["name"] for r in bad.record["invariants"] if not r["passed"]}


def test_explain_shows_an_image_as_one_box(cli: Cli, folders: dict[str, Path], tmp_path: Path) -> None:
    folder = write(tmp_path / "docs/a.png", png()).parent
    write(folder / "b.txt", KEEPER.encode())
    for family, tiles in (("qwen3_vl", 2), ("idefics3", 1)):
        made = cli(
            "explain", QUESTION, folder, "--model", folders[family], "--max-new-tokens", 2, "--tiles", tiles,
            "--methods", "infoflow,none,full", "--out", tmp_path / f"{family}.html", "--json",
        )  # fmt: skip
        assert made.code == 0, made.err
        picture, text = made.record["chunks"]
        [image] = picture["images"]
        assert image["tiles"] == tiles**2
        assert 0 < image["tokens"] <= image["stop"] - image["start"] < len(picture["tokens"])
        assert text["images"] == []
        page = (tmp_path / f"{family}.html").read_text(encoding="utf-8")
        assert json.dumps(picture["images"], separators=(",", ":")) in page
