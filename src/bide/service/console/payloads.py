"""A payload as it may be looked at: laid out if it is JSON, as it came, or byte by byte if it is no text.

Nothing is decoded into values and written again: what is shown are the payload's own characters, so that 1.10 stays
1.10 and a key that comes twice is seen twice. What is shown is bounded, whatever was sent.
"""

from __future__ import annotations

import re

import msgspec
from msgspec import Struct

from bide.service.console.inert import inert

MOST_SHOWN = 65_536
"""Characters of a payload that a page shows; the whole of it can be downloaded."""
_MOST_BYTES = 8_192
"""Bytes of one that is no text: each takes nearly five characters."""
_DEEPEST = 40
"""Levels that are indented; what lies deeper stands below the last of them."""
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{},:]|[^\s\[\]{},:"]+')
_WIDE = 4
"""So many times as long as what was sent may get what is made visible in it."""


class Shown(Struct, frozen=True, kw_only=True):
    """A payload for a page. All texts are inert."""

    size: int
    """Bytes."""
    pretty: str | None
    """Laid out; None: it is not JSON."""
    raw: str | None
    """As it came; None: it is not UTF-8."""
    dump: str | None
    """Byte by byte, where it is no text."""
    cut: bool
    """Whether there is more than is shown."""


def shown(payload: bytes) -> Shown:
    """O(size)."""
    try:
        text = payload.decode()
    except UnicodeDecodeError:
        part = payload[:_MOST_BYTES]
        return Shown(size=len(payload), pretty=None, raw=None, dump=dump(part), cut=len(part) < len(payload))
    laid_out, cut = pretty(text, MOST_SHOWN) if _is_json(payload) else (None, False)
    return Shown(
        size=len(payload),
        pretty=None if laid_out is None else _visible(laid_out),
        raw=_visible(text[:MOST_SHOWN]),
        dump=None,
        cut=cut or len(text) > MOST_SHOWN,
    )


def _is_json(payload: bytes) -> bool:
    try:
        msgspec.json.decode(payload)
    except (ValueError, RecursionError):
        return False
    return True


def _visible(text: str) -> str:
    return inert(text.replace("\r\n", "\n"))[: _WIDE * MOST_SHOWN]


def pretty(text: str, limit: int) -> tuple[str, bool]:
    """JSON laid out, a value a line, up to about `limit` characters; and whether that was not all. O(limit)."""
    parts: list[str] = []
    size, depth = 0, 0
    before = ""
    for match in _TOKEN.finditer(text):
        token = match[0]
        if token in "]}":
            depth -= 1
        if before and (before in "[{," or token in "]}") and not (before in "[{" and token in "]}"):
            parts.append("\n" + "  " * min(depth, _DEEPEST))
            size += len(parts[-1])
        if size + len(token) > limit:
            parts.append(token[: max(0, limit - size)])
            return "".join(parts), True
        parts.append(": " if token == ":" else token)
        size += len(parts[-1])
        if token in "[{":
            depth += 1
        before = token
    return "".join(parts), False


def dump(data: bytes) -> str:
    """Sixteen bytes a line: where, in hexadecimal, and what of it is ASCII."""
    lines = []
    for at in range(0, len(data), 16):
        row = data[at : at + 16]
        letters = "".join(chr(byte) if 0x20 <= byte < 0x7F else "·" for byte in row)
        lines.append(f"{at:06x}  {row.hex(' '):<47}  {letters}")
    return "\n".join(lines)
