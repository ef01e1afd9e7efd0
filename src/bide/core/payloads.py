"""The conversion between a handler's data and a task's bytes: JSON, typed by the handler's declaration.

msgspec handles dataclasses, structs, typed dicts and plain values. A pydantic model, alone or within these, is
recognised by its two methods (`model_dump_json`, `model_validate_json`), so that pydantic is not required; pydantic
also reads what msgspec refuses or ignores: a union with a model, a dataclass of pydantic's, a constraint such as
`Field(gt=0)`. Bytes pass through untouched.

At the end, how many tasks travel together: what goes in bulk is cut by bytes of payloads as well as by count.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import isfinite
from types import UnionType
from typing import Any, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from bide.core.errors import BadPayload

PAYLOAD_LIMIT = 262_144
"""The most bytes of a payload by default: 256 KiB."""
TOGETHER = 1 << 20
"""The most bytes of payloads in one statement, request or lease, unless one task alone has more. More at once would be
no faster, take more memory, and make other callers wait longer."""

AT_ONCE = 2_000
"""The most tasks in one statement: a larger one is no faster, and makes other callers wait longer."""

One = TypeVar("One")
Decode: TypeAlias = Callable[[bytes], Any]
_SERIALIZER = "__pydantic_serializer__"  # of a model, and of a dataclass of pydantic's
_FIELDS = ("__dataclass_fields__", "__total__", "_fields")  # of a dataclass, a typed dict, a named tuple


def _dump_model(value: Any) -> msgspec.Raw:
    # in the form that is read by validation
    if hasattr(value, "model_dump_json"):
        return msgspec.Raw(str.encode(value.model_dump_json(by_alias=True, round_trip=True)))
    if hasattr(value, _SERIALIZER):
        return msgspec.Raw(getattr(value, _SERIALIZER).to_json(value, by_alias=True, round_trip=True))
    raise TypeError(f"Encoding objects of type {type(value).__name__} is unsupported")


def _load_model(declared: Any, value: object) -> Any:
    if hasattr(declared, "model_validate_json"):
        return declared.model_validate_json(_json.encode(value))
    return value  # msgspec refuses it, unless it has the declared type


def _needs_pydantic(declared: Any, *around: Any) -> bool:
    """True if a part of a type is pydantic's dataclass or constraint, or a union of a model with more than None."""
    if declared in around or hasattr(declared, "model_validate_json"):
        return False
    kind, parts = get_origin(declared) or declared, get_args(declared)
    if hasattr(kind, _SERIALIZER) or type(declared).__module__.partition(".")[0] in ("pydantic", "annotated_types"):
        return True
    of_many = kind in (Union, UnionType) and sum(part is not type(None) for part in parts) > 1
    if of_many and any(hasattr(part, "model_validate_json") for part in parts):
        return True
    if isinstance(kind, type) and any(hasattr(kind, mark) for mark in _FIELDS):
        parts += tuple(get_type_hints(kind, include_extras=True).values())
    return any(_needs_pydantic(part, declared, *around) for part in parts)


def _read_by(pydantic: Any, declared: Any) -> Decode:
    # bytes as msgspec writes them; in a tuple, since a dataclass alone takes no configuration
    adapter = pydantic.TypeAdapter(tuple[declared], config={"val_json_bytes": "base64"})
    return lambda payload: adapter.validate_json(b"[%b]" % payload)[0]


def _plain_model(value: Any) -> Any:
    """The fields of a model that writes NaN as null; None for other models, and for `msgspec.Raw`."""
    if getattr(value, "model_config", {}).get("ser_json_inf_nan", "null") != "null":
        return None
    return value.model_dump() if hasattr(value, "model_dump") else None


_json = msgspec.json.Encoder(enc_hook=_dump_model)
_msgpack = msgspec.msgpack.Encoder(enc_hook=_plain_model)
_NOT_FINITE = re.compile(rb"\xcb[\x7f\xff][\xf0-\xff]")
"""NaN and infinity in MessagePack, and rarely other bytes."""
_BYTES = (bytes, bytearray, memoryview)  # made once: making a union at each call takes longer than the check


def encode_payload(value: object, limit: int = PAYLOAD_LIMIT) -> bytes:
    """Encode `value` as bytes. O(size). Raises BadPayload if it cannot be encoded or is over `limit`."""
    encoded = value if type(value) is bytes else _encode(value)
    if len(encoded) > limit:
        raise BadPayload(
            "payload", f"{len(encoded)} bytes", f"at most {limit} bytes: store it elsewhere, send its name"
        )
    return encoded


def _encode(value: object) -> bytes:
    if isinstance(value, _BYTES):
        return bytes(value)
    try:
        encoded = _json.encode(_dump_model(value) if hasattr(value, _SERIALIZER) else value)
        wrong = None if b"null" not in encoded else _not_finite(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise BadPayload("payload", value, f"bytes, or what JSON can hold ({error})") from None
    if wrong is not None:
        raise BadPayload(wrong, "NaN or infinity", "what JSON can hold: a finite number")
    return encoded


def _not_finite(value: Any) -> str | None:
    """The path of a float that an encoder turns into null; None: there is none. O(size)."""
    with suppress(OverflowError):  # MessagePack has no integer of more than 64 bits
        if not _NOT_FINITE.search(_msgpack.encode(value)):
            return None
    left = [(msgspec.to_builtins(value, enc_hook=_plain_model), "payload")]
    while left:
        one, path = left.pop()
        if isinstance(one, dict):
            left += [(inner, f"{path}.{name}") for name, inner in one.items()]
        elif isinstance(one, list | tuple):
            left += [(inner, f"{path}[{place}]") for place, inner in enumerate(one)]
        elif isinstance(one, float) and not isfinite(one):
            return path
    return None


def decoder_for(declared: Any) -> Decode:
    """A function that decodes bytes to `declared`, or raises BadPayload. Made once per handler.

    Raises TypeError or RuntimeError for a type that msgspec, or pydantic, cannot read.
    """
    if declared is bytes:
        return bytes
    if hasattr(declared, "model_validate_json"):
        read: Decode = declared.model_validate_json
    elif (pydantic := sys.modules.get("pydantic")) and _needs_pydantic(declared):
        read = _read_by(pydantic, declared)
    else:
        read = msgspec.json.Decoder(declared, dec_hook=_load_model).decode

    def decode(payload: bytes) -> Any:
        try:
            return read(payload)
        except (ValueError, RecursionError) as error:  # msgspec's and pydantic's errors are ValueErrors
            of = "" if declared is Any else f" of {getattr(declared, '__name__', declared)}"
            raise BadPayload("payload", payload[:60], f"JSON{of} ({error})") from None

    return decode


def checker_for(declared: Any) -> Callable[[object], None]:
    """A function that raises BadPayload for a value that is not a `declared`, so a wrong payload fails in the caller.

    It encodes and decodes the payload once, as the handler will. O(size), below a microsecond for a small payload.
    """
    if declared is bytes or declared is Any:
        return lambda value: None
    decode = decoder_for(declared)

    def check(value: object) -> None:
        decode(_encode(value))

    return check


decode_json: Decode = decoder_for(Any)


# --- how much travels together


def payload_sizes(items: Sequence[Any]) -> list[int]:
    """The bytes of each item's payload; 0 for an item without one, such as a move. O(items)."""
    if items and not hasattr(items[0], "payload"):
        return [0] * len(items)
    with suppress(AttributeError, TypeError):
        return [len(item.payload) for item in items]
    return [len(data) if type(data := getattr(item, "payload", None)) is bytes else 0 for item in items]


def fitting(sizes: Sequence[int], room: int = TOGETHER) -> int:
    """How many of the first `sizes` make at most `room` together; at least one, if there is any. O(sizes)."""
    if sum(sizes) > room:
        for place, size in enumerate(sizes):
            room -= size
            if room < 0 and place:
                return place
    return len(sizes)


def slices(
    items: Sequence[One],
    at_once: int = AT_ONCE,
    *,
    sizes_of: Callable[[Sequence[One]], list[int]] = payload_sizes,
    room: int = TOGETHER,
) -> list[Sequence[One]]:
    """Parts for one statement each, with at most `at_once` items and `room` bytes, or a single item. O(items)."""
    if len(items) == 1:
        return [items]
    parts: list[Sequence[One]] = []
    for first in range(0, len(items), at_once):
        part = items[first : first + at_once]
        sizes = sizes_of(part)
        while (count := fitting(sizes, room)) < len(part):
            parts.append(part[:count])
            part, sizes = part[count:], sizes[count:]
        parts.append(part)
    return parts


def next_limit(read: Sequence[object], most: int) -> int:
    """How many more items like those just read make `TOGETHER`: from 1 to `most`, and `most` after none. O(read)."""
    size = sum(payload_sizes(read)) // max(1, len(read))
    return max(1, min(most, TOGETHER // max(1, size)))
