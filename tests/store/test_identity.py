"""The key of a chunk: the same everywhere, different for everything that differs."""

import itertools
import json
import os
import struct
import subprocess
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from store_chunks import IDENTITY, IMAGE_IDENTITY, MODEL

import infoflow_kv
from infoflow_kv.errors import OptionError, StoreError
from infoflow_kv.records import ChunkIdentity, ModelIdentity
from infoflow_kv.store import FORMAT_VERSION, key
from infoflow_kv.store.identity import MOVEMENT, check_key, encode, from_json, to_json, version_of

GOLDEN = Path(__file__).parent / "golden_keys.json"
SOURCE = Path(infoflow_kv.__file__).parents[1]

numbers = st.integers(0, 2**63 - 1)
ids = st.lists(numbers | st.integers(0, 3), max_size=5).map(tuple)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
models = st.builds(
    ModelIdentity,
    weights=texts,
    tokenizer=texts,
    num_layers=numbers,
    num_kv_heads=numbers,
    head_dim=numbers,
    dtype=texts,
)
kinds = texts | st.just(MOVEMENT)
text_identities = st.builds(
    ChunkIdentity, model=models, rope=texts, head_ids=ids, token_ids=ids, namespace=texts, quantisation=kinds
)


@st.composite
def with_images(draw: st.DrawFn) -> ChunkIdentity:
    identity = draw(text_identities.filter(lambda identity: identity.token_ids))
    sizes = st.tuples(st.integers(1, len(identity.token_ids)), numbers_from_1, numbers, numbers_from_1)
    layout = () if identity.quantisation == MOVEMENT else draw(sizes)
    return replace(identity, inputs=draw(digests), inputs_layout=layout)


numbers_from_1 = st.integers(1, 3) | st.integers(1, 2**63 - 1)
digests = st.sampled_from(["a" * 64, "0" * 64]) | st.text("0123456789abcdef", min_size=64, max_size=64)
identities = text_identities | with_images()


def decode(data: bytes) -> list[Any]:
    """The parts of an encoding, read back by the rules alone: as it can be undone, no two identities can share one."""
    parts: list[Any] = []

    def sized(place: int) -> tuple[bytes, int]:
        (length,) = struct.unpack_from(">Q", data, place)
        return data[place + 8 : place + 8 + length], place + 8 + length

    domain, place = sized(0)
    parts.append(domain)
    expect_value = True
    while place < len(data):
        if not expect_value:
            tag, place = sized(place)
            parts.append(tag.decode())
        else:
            kind, (raw, place) = data[place : place + 1], sized(place + 1)
            if kind == b"s":
                parts.append(raw.decode())
            elif kind == b"i":
                parts.append(struct.unpack(">Q", raw)[0])
            else:
                assert kind == b"l"
                parts.append(struct.unpack(f">{len(raw) // 8}Q", raw))
        expect_value = not expect_value
    return parts


@given(identities)
def test_an_encoding_can_be_undone(identity: ChunkIdentity) -> None:
    model = identity.model
    images = ("inputs", identity.inputs, "inputs_layout", identity.inputs_layout) if identity.inputs else ()
    assert decode(encode(identity)) == [
        b"infoflow-kv chunk identity",
        2 if images else 1,
        *("model.weights", model.weights, "model.tokenizer", model.tokenizer, "model.num_layers", model.num_layers),
        *("model.num_kv_heads", model.num_kv_heads, "model.head_dim", model.head_dim, "model.dtype", model.dtype),
        *("rope", identity.rope, "head_ids", identity.head_ids, "token_ids", identity.token_ids),
        *("namespace", identity.namespace, "quantisation", identity.quantisation),
        *images,
    ]


@given(identities, identities)
def test_keys_are_equal_exactly_where_identities_are(first: ChunkIdentity, second: ChunkIdentity) -> None:
    assert (key(first) == key(second)) == (first == second)
    assert key(first) == key(replace(first))
    assert check_key(key(first)) == key(first)


@given(identities)
def test_json_is_canonical_and_comes_back(identity: ChunkIdentity) -> None:
    text = to_json(identity)
    assert from_json(text) == identity
    assert text.isascii()
    assert json.dumps(json.loads(text), sort_keys=True, separators=(",", ":")) == text


def test_golden_keys() -> None:
    """A change here makes every stored chunk of every user a miss: raise FORMAT_VERSION and say so in the changelog."""
    golden = json.loads(GOLDEN.read_text())
    assert len(golden) >= 20
    assert len({row["key"] for row in golden}) == len(golden)
    for row in golden:
        assert key(from_json(json.dumps(row["identity"]))) == row["key"]


def test_the_fields_of_an_identity_belong_to_the_format() -> None:
    """A new field must change FORMAT_VERSION or be proven to leave old keys right; then add it here."""
    assert [f.name for f in fields(ModelIdentity)] == [
        *("weights", "tokenizer", "num_layers", "num_kv_heads", "head_dim", "dtype"),
    ]
    assert [f.name for f in fields(ChunkIdentity)] == [
        *("model", "rope", "head_ids", "token_ids", "namespace", "quantisation", "inputs", "inputs_layout"),
    ]
    assert FORMAT_VERSION == 2
    assert (version_of(IDENTITY), version_of(IMAGE_IDENTITY)) == (1, 2)
    assert "inputs" not in to_json(IDENTITY), "text is written as ever"


def test_near_identities_have_different_keys() -> None:
    near = [
        IDENTITY,
        *(replace(IDENTITY, token_ids=i) for i in [(0,), (0, 0), (1, 23), (12, 3), (123,), (3, 4), (3, 4, 5, 0)]),
        *(replace(IDENTITY, head_ids=h, token_ids=t) for h, t in [((), (1, 2)), ((1,), (2,)), ((1, 2), ())]),
        *(
            replace(IDENTITY, namespace=n)
            for n in ["", "none", "0", "public ", "Public", "a\0b", "a\0", "\u00e9", "e\u0301"]
        ),
        *(replace(IDENTITY, quantisation=q) for q in ["", "int8"]),
        *(
            replace(IDENTITY, namespace=n, quantisation=q)
            for n, q in [("a", "bc"), ("ab", "c"), ("abc", ""), ("", "abc")]
        ),
        *(replace(IDENTITY, model=replace(MODEL, dtype=d)) for d in ["float16", "bfloat16", "float64", ""]),
        *(replace(IDENTITY, model=replace(MODEL, num_layers=n)) for n in [0, 1, 20]),
        replace(IDENTITY, model=replace(MODEL, num_kv_heads=2, num_layers=1)),
        replace(IDENTITY, model=replace(MODEL, weights=MODEL.tokenizer, tokenizer=MODEL.weights)),
        *(replace(IDENTITY, token_ids=(n,)) for n in [255, 256, 2**16, 2**31, 2**32, 2**63 - 1]),
        *(replace(IMAGE_IDENTITY, inputs=i * 64) for i in "0a"),
        *(
            replace(IMAGE_IDENTITY, inputs_layout=layout)
            for layout in [(3, 6, 2, 3), (2, 6, 2, 3), (3, 2, 6, 3), (3, 6, 3, 2), (3, 6, 0, 3), (1, 1, 0, 1)]
        ),
        replace(IMAGE_IDENTITY, inputs="", inputs_layout=()),
        replace(IMAGE_IDENTITY, quantisation=MOVEMENT, inputs_layout=()),
        replace(IMAGE_IDENTITY, quantisation=MOVEMENT, inputs="", inputs_layout=()),
    ]
    assert len({key(identity) for identity in near}) == len(near)


def test_no_two_of_20_000_keys_are_equal() -> None:
    """K05: full width; a key cut to 32 bits would collide here."""
    keys = {key(replace(IDENTITY, token_ids=(n,))) for n in range(20_000)}
    assert len(keys) == 20_000
    assert len({k[:4] for k in keys}) < 20_000, "the test can tell short keys from long ones"


@dataclass(frozen=True)
class Lookalike(ModelIdentity):
    pass


@pytest.mark.parametrize(
    "wrong",
    [
        replace(IDENTITY, rope=None),  # type: ignore[arg-type]
        replace(IDENTITY, namespace=b"public"),  # type: ignore[arg-type]
        replace(IDENTITY, token_ids=[3, 4, 5]),  # type: ignore[arg-type]
        replace(IDENTITY, token_ids=(3, 4.0)),  # type: ignore[arg-type]
        replace(IDENTITY, token_ids=(3, True)),
        replace(IDENTITY, token_ids=(3, None)),  # type: ignore[arg-type]
        replace(IDENTITY, token_ids=(3, -1)),
        replace(IDENTITY, token_ids=(3, 2**63)),
        replace(IDENTITY, token_ids=(3, 10**5000)),
        replace(IDENTITY, token_ids=None),  # type: ignore[arg-type]
        replace(IDENTITY, head_ids="12"),  # type: ignore[arg-type]
        replace(IDENTITY, namespace="a\ud800"),
        replace(IDENTITY, model=None),  # type: ignore[arg-type]
        replace(IDENTITY, model=Lookalike("w", "t", 1, 1, 1, "float32")),
        replace(IDENTITY, model=replace(MODEL, num_layers=2.0)),  # type: ignore[arg-type]
        replace(IDENTITY, model=replace(MODEL, num_layers=True)),
        replace(IDENTITY, model=replace(MODEL, head_dim=-1)),
        replace(IDENTITY, model=replace(MODEL, dtype=None)),  # type: ignore[arg-type]
        replace(IMAGE_IDENTITY, inputs=None),  # type: ignore[arg-type]
        *(
            replace(IMAGE_IDENTITY, inputs=i)
            for i in ["x", "", "A" * 64, "a" * 63, "a" * 65, "a" * 64 + "\n", "٣" * 64]
        ),
        replace(IMAGE_IDENTITY, inputs_layout=[3, 6, 2, 3]),  # type: ignore[arg-type]
        replace(IMAGE_IDENTITY, inputs_layout=(3, 6, 2, 3.0)),  # type: ignore[arg-type]
        replace(IMAGE_IDENTITY, inputs_layout=(True, 6, 2, 3)),
        *(
            replace(IMAGE_IDENTITY, inputs_layout=layout)
            for layout in [(), (3,), (3, 6, 2), (3, 6, 2, 3, 1), (0, 6, 2, 3), (3, 0, 2, 3), (3, 6, 2, 0)]
        ),
        *(replace(IMAGE_IDENTITY, inputs_layout=layout) for layout in [(6, 6, 2, 3), (3, 6, -1, 3), (3, 6, 2**63, 3)]),
        replace(IMAGE_IDENTITY, token_ids=()),
        replace(IMAGE_IDENTITY, quantisation=MOVEMENT),
        replace(IDENTITY, inputs_layout=(3, 6, 2, 3)),
        replace(IDENTITY, inputs_layout=(0, 0, 0, 0)),
        replace(IDENTITY, quantisation=MOVEMENT, inputs_layout=(1, 1, 0, 1)),
        MODEL,
        None,
    ],
)
def test_a_broken_identity_has_no_key(wrong: Any) -> None:
    """K14: never a weaker key."""
    for function in (key, to_json):
        with pytest.raises(OptionError, match="identity"):
            function(wrong)


def _without(identity: ChunkIdentity, path: str) -> dict[str, Any]:
    value = json.loads(to_json(identity))
    *parents, name = path.split(".")
    place = value
    for parent in parents:
        place = place[parent]
    del place[name]
    return value  # type: ignore[no-any-return]


FIELD_PATHS = [f.name for f in fields(ChunkIdentity)] + [f"model.{f.name}" for f in fields(ModelIdentity)]
CASES = [(IMAGE_IDENTITY, path) for path in FIELD_PATHS]
CASES += [(IDENTITY, path) for path in FIELD_PATHS if not path.startswith("inputs")]


@pytest.mark.parametrize(("identity", "path"), CASES)
def test_json_without_a_field_is_refused(identity: ChunkIdentity, path: str) -> None:
    """Also `namespace` and `quantisation`, which have defaults in Python: a file states them."""
    with pytest.raises(StoreError, match=f"lacks {path.split('.')[-1]}"):
        from_json(json.dumps(_without(identity, path)))


@pytest.mark.parametrize(("identity", "path"), CASES)
@pytest.mark.parametrize("wrong", [None, 1.5, True, {}, [None], [[1]], -1])
def test_json_with_a_mistyped_field_is_refused(identity: ChunkIdentity, path: str, wrong: Any) -> None:
    value = json.loads(to_json(identity))
    *parents, name = path.split(".")
    place = value
    for parent in parents:
        place = place[parent]
    place[name] = wrong
    with pytest.raises(StoreError, match=r"identity"):
        from_json(json.dumps(value))


@pytest.mark.parametrize(
    "text",
    [
        *("", "null", "[]", '"x"', "{", "{}", "NaN", to_json(IDENTITY) + "x", to_json(IDENTITY)[:-1]),
        to_json(IDENTITY).replace('"rope":', '"rope":"x","rope":'),
        to_json(IDENTITY).replace('"rope":', '"adapter":"x","rope":'),
        to_json(IDENTITY).replace('"weights":', '"revision":"x","weights":'),
        to_json(IDENTITY).replace("[3,4,5]", "[3,4,Infinity]"),
        to_json(IDENTITY).replace("[3,4,5]", "[" + "9" * 5000 + "]"),
        to_json(IDENTITY).replace('"model":', '"inputs":"","inputs_layout":[],"model":'),
        to_json(IDENTITY).replace('"model":', '"inputs":"","model":'),
        to_json(IDENTITY).replace('"model":', '"inputs_layout":[],"model":'),
        to_json(IMAGE_IDENTITY).replace("ab" * 32, "AB" * 32),
        to_json(IMAGE_IDENTITY).replace("ab" * 32, ""),
        to_json(IMAGE_IDENTITY).replace("[3,6,2,3]", "[]"),
        to_json(IMAGE_IDENTITY).replace("[3,6,2,3]", "[6,6,2,3]"),
        "[" * 100_000,
        '{"model":' * 50_000,
    ],
)
def test_other_json_is_refused(text: str) -> None:
    with pytest.raises(StoreError):
        from_json(text)


@pytest.mark.parametrize(
    "wrong",
    [
        *("", "a", "A" * 64, "g" * 64, "a" * 63, "a" * 65, "a" * 64 + "\n", "\n" + "a" * 64, "a" * 63 + "\0"),
        *("../" + "a" * 61, "/etc/passwd", "%2e%2e/" + "a" * 57, "a" * 4096, "٣" * 64, "a" * 62 + "/."),
        *(None, 1, b"a" * 64, Path("a" * 64)),
    ],
)
def test_only_64_hex_digits_are_a_key(wrong: Any) -> None:
    with pytest.raises(OptionError, match="is not a chunk key"):
        check_key(wrong)


def test_keys_are_equal_in_every_process(tmp_path: Path) -> None:
    """K09, K10: other hash seeds, folders, languages, time zones, optimisation."""
    script = (
        "import json, sys; from infoflow_kv.store.identity import key, from_json\n"
        "print([key(from_json(json.dumps(r['identity']))) for r in json.load(open(sys.argv[1], encoding='utf-8'))])"
    )
    settings: list[tuple[list[str], dict[str, str], str | Path]] = [
        ([], {"PYTHONHASHSEED": "0", "LANG": "C", "TZ": "UTC"}, "/"),
        (["-O"], {"PYTHONHASHSEED": "1", "LANG": "tr_TR.UTF-8", "LC_ALL": "tr_TR.UTF-8", "TZ": "Asia/Tokyo"}, tmp_path),
        (["-OO", "-X", "utf8=0"], {"PYTHONHASHSEED": "4294967295", "LC_ALL": "C", "TZ": "America/Lima"}, tmp_path),
        (["-X", "utf8"], {"PYTHONHASHSEED": "random", "PYTHONINTMAXSTRDIGITS": "0"}, "/"),
        (["-X", "dev", "-W", "ignore"], {"PYTHONHASHSEED": "7", "LANG": "de_DE.UTF-8"}, tmp_path),
    ]
    outputs = set()
    for options, environment, cwd in settings:
        outputs.add(
            subprocess.run(
                [sys.executable, *options, "-c", script, str(GOLDEN)],
                env={"PATH": os.environ["PATH"], "PYTHONPATH": str(SOURCE), **environment},
                cwd=cwd,
                check=True,
                capture_output=True,
                text=True,
            ).stdout
        )
    assert outputs == {str([row["key"] for row in json.loads(GOLDEN.read_text())]) + "\n"}


@given(identities, st.sampled_from(FIELD_PATHS), identities)
def test_any_single_other_field_gives_another_key(first: ChunkIdentity, path: str, second: ChunkIdentity) -> None:
    *parents, name = path.split(".")
    if parents:
        value = getattr(second.model, name)
        assume(value != getattr(first.model, name))
        other = replace(first, model=replace(first.model, **{name: value}))
    else:
        assume(getattr(first, name) != getattr(second, name))
        other = replace(first, **{name: getattr(second, name)})
    try:
        to_json(other)
    except OptionError:
        assume(False)  # the inputs of one and the tokens or the kind of another
    assert key(first) != key(other)


def test_every_pair_of_neighbouring_texts_is_told_apart() -> None:
    """The same letters, divided differently among the text fields."""
    letters = "abcdef"
    cuts = itertools.combinations_with_replacement(range(len(letters) + 1), 3)
    texts = [(letters[:a], letters[a:b], letters[b:c], letters[c:]) for a, b, c in cuts]
    keys = {
        key(replace(IDENTITY, model=replace(MODEL, weights=w, tokenizer=t), rope=r, namespace=n))
        for w, t, r, n in texts
    }
    assert len(keys) == len(texts)
