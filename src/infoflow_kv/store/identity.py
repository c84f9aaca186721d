"""The name of a chunk: everything that decides its bytes, hashed at full width.

The encoding is our own and not JSON's or pickle's, so that it is the same in every process, on every machine and in
every Python version, and so that no two identities can share an encoding: each field carries its tag, its type and its
length, and every field is always present. The one exception: a text chunk is encoded without the two fields of a chunk
with images, as format version 1; with them it is version 2, so that keys and files of text are what they always were.
"""

import hashlib
import json
import re
import struct
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from infoflow_kv.errors import InfoFlowError, OptionError, StoreError
from infoflow_kv.records import ChunkIdentity

FORMAT_VERSION = 2  # the latest; `version_of` says which one a chunk has
# A record of this quantisation holds no KV and so none of a chunk's inputs either, whatever they were.
MOVEMENT = "movement-2"

_DOMAIN = b"infoflow-kv chunk identity"
_INTS = tuple[int, ...]
_MAX_INT = 2**63 - 1
_KEY_PATTERN = re.compile(r"[0-9a-f]{64}")
_INPUT_FIELDS = frozenset({"inputs", "inputs_layout"})


def key(identity: ChunkIdentity) -> str:
    """The 64 lowercase hex digits that name the chunk: SHA-256 of `encode(identity)`."""
    return hashlib.sha256(encode(identity)).hexdigest()


def encode(identity: ChunkIdentity) -> bytes:
    """The canonical bytes of an identity: domain, format version, then every field as tag, type, length and value.

    Raises OptionError for a missing, misspelt or mistyped field, or inputs that cannot be: never a weaker key.
    """
    parts = [_sized(tag.encode()) + _value(value) for tag, value in _flatten(identity)]
    return b"".join([_sized(_DOMAIN), _value(version_of(identity)), *parts])


def version_of(identity: ChunkIdentity) -> int:
    """The format version of the chunk's key and file: 1 for text, 2 for a chunk with images."""
    return 2 if identity.inputs else 1


def to_json(identity: ChunkIdentity) -> str:
    """The identity as canonical JSON: sorted names, no spaces, ASCII only."""
    return dump_json(to_fields(identity))


def from_json(text: str) -> ChunkIdentity:
    """The identity that `to_json` wrote. Raises StoreError if any field is missing, unknown or of another type."""
    return from_fields(parse_json(text))


def to_fields(identity: ChunkIdentity) -> dict[str, Any]:
    """The identity as a plain object for JSON, checked as strictly as for a key."""
    result: dict[str, Any] = {}
    for tag, value in _flatten(identity):
        *parents, name = tag.split(".")
        place = result
        for parent in parents:
            place = place.setdefault(parent, {})
        place[name] = list(value) if type(value) is tuple else value
    return result


def from_fields(given: object) -> ChunkIdentity:
    """The identity held by a parsed JSON object. Raises StoreError if any field is missing, unknown or mistyped."""
    try:
        identity: ChunkIdentity = _build(ChunkIdentity, given, "identity")
        _flatten(identity)
    except OptionError as error:
        raise StoreError(str(error)) from None
    if not identity.inputs and isinstance(given, dict) and _INPUT_FIELDS & given.keys():
        raise StoreError("identity.inputs is empty; the identity of a text chunk is written without it")
    return identity


def check_key(given: str) -> str:
    """`given` itself if it is a chunk's key. Raises OptionError otherwise: no path is built from anything else."""
    if not isinstance(given, str) or not _KEY_PATTERN.fullmatch(given):
        shown = given if isinstance(given, str) else type(given).__name__
        raise OptionError(
            f"{shown[:80]!r} is not a chunk key; expected 64 lowercase hex digits as `store ls` prints them"
        )
    return given


def dump_json(value: Mapping[str, Any]) -> str:
    """Canonical JSON: sorted names, no spaces, ASCII only, so that equal objects are equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def parse_json(text: str | bytes) -> Any:
    """The parsed value. Raises StoreError for anything but one JSON value in which no name comes twice."""
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"not valid JSON ({type(error).__name__})") from None
    except InfoFlowError as error:
        raise StoreError(f"not valid JSON ({error})") from None


def _flatten(identity: ChunkIdentity) -> list[tuple[str, Any]]:
    """(tag, value) of every field that is encoded, in the records' own order, with each type checked exactly."""
    found = _walk(ChunkIdentity, identity, "")
    _check_inputs(identity)
    return found if identity.inputs else [(tag, value) for tag, value in found if tag not in _INPUT_FIELDS]


def _check_inputs(identity: ChunkIdentity) -> None:
    """Nothing. Raises OptionError unless digest and sizes of the inputs, typed right, can be those of one chunk."""
    sizes = identity.inputs_layout
    if identity.inputs and not _KEY_PATTERN.fullmatch(identity.inputs):
        raise OptionError("identity.inputs must be 64 lowercase hex digits, or empty for text")
    if not identity.inputs or identity.quantisation == MOVEMENT:
        if sizes:
            kind = "of a record of movement" if identity.inputs else "of text, which has no inputs"
            raise OptionError(f"identity.inputs_layout {kind} must be empty, given {len(sizes)} numbers")
        return
    if len(sizes) != 4:
        raise OptionError(
            "identity.inputs_layout must be visual tokens, hidden, early-layer rows and axes, "
            f"given {len(sizes)} numbers"
        )
    visual, hidden, _, axes = sizes
    if not 1 <= visual <= len(identity.token_ids) or hidden < 1 or axes < 1:
        raise OptionError(
            "identity.inputs_layout needs one visual token or more, no more than the chunk has tokens, and a hidden "
            "size and a number of axes of 1 or more"
        )


def _walk(record: Any, given: object, prefix: str) -> list[tuple[str, Any]]:
    # The fields come from the record, not from a second list here, so a field added there can never be forgotten.
    expected_fields = fields(record)
    if type(given) is not record:
        raise OptionError(
            f"identity{'.' + prefix[:-1] if prefix else ''} must be a {record.__name__}, given {type(given).__name__}"
        )
    found: list[tuple[str, Any]] = []
    for field in expected_fields:
        value, tag = getattr(given, field.name), prefix + field.name
        if isinstance(field.type, type) and is_dataclass(field.type):
            found += _walk(field.type, value, tag + ".")
        else:
            _check_type(tag, field.type, value)
            found.append((tag, value))
    return found


def _check_type(tag: str, expected: object, value: object) -> None:
    """Exact types only: True is no 1, a numpy integer no int, and a list no tuple."""
    if expected is str and type(value) is str:
        if not value.isascii():
            _check_utf8(tag, value)
    elif expected is int and type(value) is int:
        _check_range(tag, value)
    elif expected == _INTS and type(value) is tuple and set(map(type, value)) <= {int}:
        _check_range(tag, min(value, default=0))
        _check_range(tag, max(value, default=0))
    else:
        name = expected.__name__ if isinstance(expected, type) and expected != _INTS else "tuple of int"
        raise OptionError(f"identity.{tag} must be a {name}, given {type(value).__name__}")


def _check_utf8(tag: str, value: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise OptionError(f"identity.{tag} holds a lone surrogate; expected text that UTF-8 can encode") from None


def _check_range(tag: str, value: int) -> None:
    if not 0 <= value <= _MAX_INT:
        raise OptionError(f"identity.{tag} must lie in 0..2**63-1, given a number {'below' if value < 0 else 'above'}")


def _value(value: str | int | tuple[int, ...]) -> bytes:
    if isinstance(value, str):
        return b"s" + _sized(value.encode())
    if isinstance(value, int):
        return b"i" + _sized(struct.pack(">Q", value))
    return b"l" + _sized(struct.pack(f">{len(value)}Q", *value))


def _sized(data: bytes) -> bytes:
    return struct.pack(">Q", len(data)) + data


def _build(record: Any, given: object, path: str) -> Any:
    """The record from a JSON object with exactly its fields; values are checked by `_walk` afterwards."""
    if not isinstance(given, dict):
        raise StoreError(f"{path} must be an object, given {type(given).__name__}")
    names = {field.name for field in fields(record)}
    if record is ChunkIdentity and not _INPUT_FIELDS & given.keys():
        names -= _INPUT_FIELDS
    if missing := sorted(names - given.keys()):
        raise StoreError(f"{path} lacks {', '.join(missing)}")
    if unknown := given.keys() - names:
        raise StoreError(f"{path} has {len(unknown)} unknown fields; expected only {', '.join(sorted(names))}")
    values = {}
    for field in fields(record):
        if field.name not in names:
            continue
        value = given[field.name]
        if isinstance(field.type, type) and is_dataclass(field.type):
            value = _build(field.type, value, f"{path}.{field.name}")
        elif field.type == _INTS and isinstance(value, list):
            value = tuple(value)
        values[field.name] = value
    return record(**values)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise StoreError("a name comes twice")
    return result


def _refuse_constant(name: str) -> Any:
    raise StoreError("NaN or Infinity")
