"""Templates and what they may call, and the static files that pages refer to. Everything put into a page is escaped.

Text and payloads from outside as they may be shown: nothing in them can move, hide or turn what stands around them.

Templates escape markup. What escaping leaves alone is made visible here: control characters, what reorders text (the
"Trojan source" marks of CVE-2021-42574), what has no width, and halves of surrogate pairs.

A payload is laid out if it is JSON, and shown byte by byte if it is no text. Nothing is decoded into values and written
again: its own characters are shown, so that 1.10 stays 1.10 and a key that comes twice is seen twice. What is shown is
bounded, whatever was sent.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from functools import lru_cache
from hashlib import blake2b
from importlib.resources import files
from typing import Any
from urllib.parse import quote, urlencode

import msgspec
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from msgspec import Struct

from bide.core.instants import Millis
from bide.core.names import error_parts
from bide.core.records import Record
from bide.service.console.i18n import Locale
from bide.service.requests import Reply

_ODD = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u034f\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u115f\u1160\u17b4\u17b5"
    "\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f\u2800\u3164\ufe00-\ufe0e\ufeff\uffa0\ufff0-\ufffb\ud800-\udfff"
    "\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
"""Every control and format character, every separator of lines, and what else Unicode shows as nothing; but U+FE0F,
which is part of many an emoji."""


def inert(text: str, limit: int | None = None) -> str:
    """`text` with what cannot be seen made visible, and cut at `limit` characters with an ellipsis."""
    if limit is not None and len(text) > limit:
        text = text[: limit - 1] + "…"
    return _ODD.sub(_made_visible, text)


def inert_line(text: str, limit: int | None = None) -> str:
    """The same in one line: line breaks and tabs are shown as well."""
    return inert(text, limit).replace("\r", "␍").replace("\n", "⏎").replace("\t", "⇥")


def isolated(text: str, limit: int = 200) -> str:
    """`text` in one line for a place within a sentence, whose direction it cannot turn. Not to be made inert again."""
    return f"\u2068{inert_line(text, limit)}\u2069"


def _made_visible(match: re.Match[str]) -> str:
    point = ord(match[0])
    if point < 0x20:
        return chr(0x2400 + point)  # the control pictures of Unicode
    if point == 0x7F:
        return "␡"
    return f"[{unicodedata.name(match[0], f'U+{point:04X}')}]"


MOST_SHOWN = 65_536
"""Characters of a payload that a page shows; the whole of it can be downloaded."""
_MOST_BYTES = 8_192
"""Bytes of one that is no text: each takes nearly five characters."""
_DEEPEST = 40
"""Levels that are indented; what lies deeper stands below the last of them."""
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{},:]|[^\s\[\]{},:"]+')
_WIDE = 4
"""So many times as long as what was sent may get what is made visible in it."""


class PayloadView(Struct, frozen=True, kw_only=True):
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
    """True if there is more than is shown."""


def payload_view(payload: bytes) -> PayloadView:
    """O(size)."""
    try:
        text = payload.decode()
    except UnicodeDecodeError:
        part = payload[:_MOST_BYTES]
        return PayloadView(size=len(payload), pretty=None, raw=None, dump=dump(part), cut=len(part) < len(payload))
    laid_out, cut = pretty(text, MOST_SHOWN) if _is_json(payload) else (None, False)
    return PayloadView(
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


_TYPES = {
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
}
_FOR_EVER = {"cache-control": "public, max-age=31536000, immutable"}


class Statics:
    """The files of `static/`."""

    def __init__(self) -> None:
        self.files: dict[str, Reply] = {}
        """By path, which has a hash of what is in it."""
        self.addresses: dict[str, str] = {}
        """Where each is, by its name."""
        for file in (files("bide.service.console") / "static").iterdir():
            stem, _, kind = file.name.rpartition(".")
            if kind in _TYPES:
                body = file.read_bytes()
                path = f"/static/{stem}.{blake2b(body, digest_size=6).hexdigest()}.{kind}"
                self.files[path] = Reply(200, body, _TYPES[kind], _FOR_EVER)
                self.addresses[file.name] = path


_DOTS = frozenset({".", ".."})
"""Names that browsers take for a way up or none, percent-encoded too: they cannot be a part of a path."""


def task_address(topic: str, key: str, part: str = "") -> str:
    """Where the page of a task is, or a part of it."""
    if topic in _DOTS or key in _DOTS:
        return address(f"/task/{part}" if part else "/task", topic=topic, key=key)
    where = f"/tasks/{quote(topic, safe='')}/{quote(key, safe='')}"
    return f"{where}/{part}" if part else where


def ref_field(record: Record) -> str:
    """How a form names a task: topic/key, percent-encoded, and the token that it was seen with."""
    return f"{quote(record.topic, safe='')}/{quote(record.key, safe='')}@{record.token}"


def topic_address(topic: str) -> str:
    """Where the page of a topic is; its tasks, where a path cannot name it."""
    if topic in _DOTS:
        return address("/tasks", topic=topic)
    return f"/topics/{quote(topic, safe='')}"


def address(path: str, **query: object) -> str:
    """`path` with what is given of the query."""
    given = {name: str(value) for name, value in query.items() if value is not None and value != ""}
    return f"{path}?{urlencode(given)}" if given else path


@lru_cache(maxsize=1)
def statics() -> Statics:
    """The files that pages refer to."""
    return Statics()


@lru_cache(maxsize=1)
def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("bide.service.console"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    made.filters.update(inert=inert, line=inert_line, parts=error_parts)
    made.globals.update(
        static=lambda name: statics().addresses[name],
        ref_field=ref_field,
        task_address=task_address,
        topic_address=topic_address,
        address=address,
    )
    return made


def render(template: str, locale: Locale, values: Mapping[str, Any]) -> str:
    """The page, or part of one. Templates find the viewer's words as `t`, `number`, `length`, `when` and so on."""

    def when(at: Millis | None, *, millis: bool = False) -> Markup:
        """A moment as an element: in the viewer's zone, from now, and in UTC when it is pointed at."""
        if at is None:
            return Markup("")
        return Markup('<time datetime="{0}" title="{0}">{1}</time> <span class="dim">{2}</span>').format(
            locale.utc(at), locale.moment(at, millis=millis), locale.relative(at)
        )

    return _environment().get_template(template).render(
        t=locale.t, number=locale.number, size=locale.size, length=locale.length, clock=locale.clock,
        relative=locale.relative, moment=locale.moment, utc=locale.utc, field=locale.field, when=when,
        language=locale.language, zone=locale.zone_name, now=locale.now, escape=escape, **values,
    )  # fmt: skip
