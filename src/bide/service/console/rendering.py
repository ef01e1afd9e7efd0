"""Templates, the functions that they call, the static files, and payloads. Text from outside is made harmless: `i18n`.

A payload is shown formatted if it is JSON, and byte by byte if it is not text. It is never decoded and written again:
its own characters are shown, so that 1.10 stays 1.10, and a key that comes twice is seen twice. The size of what is
shown is limited, whatever was sent.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from hashlib import blake2b
from importlib.resources import files
from typing import Any
from urllib.parse import quote, urlencode

import msgspec
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from msgspec import Struct

from bide.core.instants import LAST_INSTANT, Millis, instant_text
from bide.core.names import error_parts
from bide.core.records import Record
from bide.service.console.i18n import Locale, inert, inert_line
from bide.service.requests import Reply

MOST_SHOWN = 65_536
"""Most characters of a payload that a page shows; all of it can be downloaded."""
_MOST_BYTES = 8_192
"""Most bytes of a payload that is not text: each takes nearly five characters."""
_DEEPEST = 40
"""Levels that are indented; deeper ones are indented as the last."""
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{},:]|[^\s\[\]{},:"]+')
_WIDE = 4
"""How many times as long as the text the visible form of it may get."""


class PayloadView(Struct, frozen=True, kw_only=True):
    """A payload as a page shows it. All texts are inert."""

    size: int
    """Bytes."""
    pretty: str | None
    """The formatted JSON; None: it is not JSON."""
    raw: str | None
    """The text as received; None: it is not UTF-8."""
    dump: str | None
    """The bytes in hexadecimal, if it is not text."""
    cut: bool
    """True if not all of it is shown."""


def payload_view(payload: bytes) -> PayloadView:
    """The payload for a page. O(size)."""
    try:
        text = payload.decode()
    except UnicodeDecodeError:
        part = payload[:_MOST_BYTES]
        return PayloadView(size=len(payload), pretty=None, raw=None, dump=dump(part), cut=len(part) < len(payload))
    formatted, cut = None, len(text) > MOST_SHOWN
    with suppress(ValueError, RecursionError):
        msgspec.json.decode(payload)
        laid_out, shortened = pretty(text, MOST_SHOWN)
        formatted, cut = _visible(laid_out), cut or shortened
    return PayloadView(size=len(payload), pretty=formatted, raw=_visible(text[:MOST_SHOWN]), dump=None, cut=cut)


def _visible(text: str) -> str:
    return inert(text.replace("\r\n", "\n"))[: _WIDE * MOST_SHOWN]


def pretty(text: str, limit: int) -> tuple[str, bool]:
    """Format JSON, one value a line, up to about `limit` characters; and tell whether it was cut. O(limit)."""
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
    """A hex dump, sixteen bytes a line: offset, hexadecimal, ASCII."""
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


@cache
def statics() -> dict[str, tuple[str, Reply]]:
    """The files of `static/` by name, each with its path, which contains a hash of the content."""
    found: dict[str, tuple[str, Reply]] = {}
    for file in (files("bide.service.console") / "static").iterdir():
        stem, _, kind = file.name.rpartition(".")
        if kind in _TYPES:
            body = file.read_bytes()
            path = f"/static/{stem}.{blake2b(body, digest_size=6).hexdigest()}.{kind}"
            found[file.name] = path, Reply(200, body, _TYPES[kind], _FOR_EVER)
    return found


_DOTS = frozenset({".", ".."})
"""Names that cannot be a part of a path: browsers resolve them, even percent-encoded."""


def task_address(topic: str, key: str, part: str = "") -> str:
    """The address of a task's page, or of a part of it."""
    if topic in _DOTS or key in _DOTS:
        return address(f"/task/{part}" if part else "/task", topic=topic, key=key)
    where = f"/tasks/{quote(topic, safe='')}/{quote(key, safe='')}"
    return f"{where}/{part}" if part else where


def recurring_address(topic: str, key: str) -> str:
    """The address of a recurring task's page."""
    if topic in _DOTS or key in _DOTS:
        return address("/recurring", topic=topic, key=key)
    return f"/recurring/{quote(topic, safe='')}/{quote(key, safe='')}"


def hidden(fields: Iterable[tuple[str, object]] = (), **more: object) -> Markup:
    """Hidden fields of a form. Those whose value is None are left out."""
    made = Markup('<input type="hidden" name="{}" value="{}">')
    return Markup("").join(made.format(*one) for one in [*fields, *more.items()] if one[1] is not None)


def ref_field(record: Record) -> str:
    """A task in a form: topic/key, percent-encoded, and the token that the viewer saw."""
    return f"{quote(record.topic, safe='')}/{quote(record.key, safe='')}@{record.token}"


def topic_address(topic: str) -> str:
    """The address of a topic's page; of its tasks, if a path cannot name the topic."""
    if topic in _DOTS:
        return address("/tasks", topic=topic)
    return f"/topics/{quote(topic, safe='')}"


def address(path: str, **query: object) -> str:
    """`path`, and any query that it has, with those of the values that are not empty."""
    given = {name: str(value) for name, value in query.items() if value is not None and value != ""}
    return f"{path}{'&' if '?' in path else '?'}{urlencode(given)}" if given else path


@cache
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
        static=lambda name: statics()[name][0],
        hidden=hidden,
        ref_field=ref_field,
        task_address=task_address,
        recurring_address=recurring_address,
        topic_address=topic_address,
        address=address,
    )
    made.globals["table"] = made.get_template("table.html").module.table  # type: ignore[attr-defined]
    return made


def render(template: str, locale: Locale, values: Mapping[str, Any]) -> str:
    """Render a page, or part of one. Templates find the viewer's locale as `t`, `number`, `length`, `when`, ...."""

    def when(at: Millis | None, *, millis: bool = False) -> Markup:
        """An instant as HTML: in the viewer's zone, relative to now, and in UTC as its tooltip."""
        if at is None:
            return Markup("")
        return Markup('<time datetime="{0}" title="{0}">{1}</time> <span class="dim">{2}</span>').format(
            instant_text(at), locale.moment(at, millis=millis), "" if at == LAST_INSTANT else locale.relative(at)
        )

    return _environment().get_template(template).render(
        t=locale.t, number=locale.number, size=locale.size, length=locale.length, clock=locale.clock,
        relative=locale.relative, moment=locale.moment, utc=instant_text, when=when,
        language=locale.language, zone=locale.zone_name, now=locale.now, rule_words=locale.rule_words,
        **values,
    )  # fmt: skip
