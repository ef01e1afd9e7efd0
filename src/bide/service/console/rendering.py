"""Templates and what they may call, and the static files that pages refer to. Everything put into a page is escaped."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from hashlib import blake2b
from importlib.resources import files
from typing import Any
from urllib.parse import quote, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from bide.core.instants import Millis
from bide.core.records import Record
from bide.core.texts import error_parts
from bide.service.console.i18n import Phrases
from bide.service.console.sanitize import inert, inert_line
from bide.service.replies import Reply

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


def render(template: str, phrases: Phrases, values: Mapping[str, Any]) -> str:
    """The page, or part of one. Templates find the viewer's words as `t`, `number`, `length`, `when` and so on."""

    def when(at: Millis | None, *, millis: bool = False) -> Markup:
        """A moment as an element: in the viewer's zone, from now, and in UTC when it is pointed at."""
        if at is None:
            return Markup("")
        return Markup('<time datetime="{0}" title="{0}">{1}</time> <span class="dim">{2}</span>').format(
            phrases.utc(at), phrases.moment(at, millis=millis), phrases.relative(at)
        )

    return _environment().get_template(template).render(
        t=phrases.say, number=phrases.number, size=phrases.size, length=phrases.length, clock=phrases.clock,
        relative=phrases.relative, moment=phrases.moment, utc=phrases.utc, field=phrases.field, when=when,
        language=phrases.language, zone=phrases.zone_name, now=phrases.now, escape=escape, **values,
    )  # fmt: skip
