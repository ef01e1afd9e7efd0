"""One request as the console's pages see it: the viewer, their language and zone, the fields, and the tasks that a form
means; and what all pages of one instance share.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeVar
from urllib.parse import parse_qs, unquote, urlsplit

from bide.app import Bide
from bide.core.errors import BadInput
from bide.core.instants import as_datetime
from bide.core.names import check_name, check_topic
from bide.core.records import Filter, Ref, State, Topic
from bide.engine.arguments import STATES, filter_of
from bide.engine.client import Client
from bide.engine.registry import WakeChannel
from bide.insight.bulk import Version
from bide.insight.minute_log import LastDay
from bide.insight.overview import Overviews
from bide.ports import Policy
from bide.service.access import Access
from bide.service.authz import Caller
from bide.service.console.i18n import Phrases, language_of, zone_of
from bide.service.console.rendering import render
from bide.service.console.sessions import CSRF_FIELD, CSRF_HEADER, Session
from bide.service.health import Health
from bide.service.requests import Reply, Request

HTML = "text/html; charset=utf-8"
LANGUAGE_COOKIE = "bide_language"
ZONE_COOKIE = "bide_zone"
_MOST_FIELDS = 5_000
Choice = TypeVar("Choice", bound=StrEnum)


class Visit:
    """A request to the console. `session`: of the viewer, once they are known. `part`: the parts of the path that the
    route leaves open."""

    def __init__(self, request: Request, client: Client) -> None:
        self.request = request
        self.client = client
        self.session: Session | None = None
        self.part: tuple[str, ...] = ()

    @cached_property
    def phrases(self) -> Phrases:
        """How they are spoken to."""
        header = self.request.header(b"cookie") or ""
        pairs = (part.strip().partition("=") for part in header[:8_192].split(";"))
        cookies = {name: value for name, _, value in pairs if name in (LANGUAGE_COOKIE, ZONE_COOKIE)}
        language = language_of(self.request.header(b"accept-language"), cookies.get(LANGUAGE_COOKIE))
        return Phrases(language, *zone_of(cookies.get(ZONE_COOKIE)), self.client.clock.now())

    @property
    def caller(self) -> Caller:
        """The viewer, once they are known."""
        assert self.session is not None
        return self.session.caller

    @property
    def looks(self) -> bool:
        """True if it changes nothing."""
        return self.request.method in ("GET", "HEAD")

    @property
    def by_script(self) -> bool:
        """True if a page that is open asks for a part of itself."""
        return self.request.header(b"hx-request") == "true"

    # --- what they sent, in the query or in a form

    @cached_property
    def fields(self) -> dict[str, list[str]]:
        """Raises BadInput where it is no form."""
        raw = self.request.raw_query if self.looks else self.request.body
        try:
            return parse_qs(raw.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=_MOST_FIELDS)
        except ValueError as error:
            shown, accepted = raw[:80].decode("latin-1"), "name=value&..., percent-encoded UTF-8"
            raise BadInput("form", shown, f"{accepted} ({error})") from None

    @property
    def csrf(self) -> str | None:
        """The value that shows that a page of ours sent it."""
        return self.request.header(CSRF_HEADER.encode()) or self.exact(CSRF_FIELD) or None

    def given(self, name: str, default: str = "") -> str:
        """One field, without space around it; the last where it came more than once."""
        values = self.fields.get(name)
        return values[-1].strip() if values else default

    def exact(self, name: str) -> str:
        """One field as it was sent, for names: a topic may begin or end with a space, and is another without it."""
        values = self.fields.get(name)
        return values[-1] if values else ""

    def all_given(self, name: str) -> list[str]:
        """Every value of a field that may come many times."""
        return self.fields.get(name, [])

    def whole(self, name: str, default: int, *, least: int, most: int) -> int:
        """A field that is a whole number. Raises BadInput."""
        text = self.given(name)
        if not text:
            return default
        if not text.isascii() or not text.isdigit() or len(text) > 19 or not least <= int(text) <= most:
            raise BadInput(name, text, f"a whole number from {least:,} to {most:,}")
        return int(text)

    def choice(self, name: str, of: type[Choice], default: Choice | None = None) -> Choice:
        """A field that is one of several words. Raises BadInput."""
        text = self.given(name)
        if not text and default is not None:
            return default
        try:
            return of(text)
        except ValueError:
            raise BadInput(name, text, f"one of {', '.join(of)}") from None

    # --- what they get

    def page(self, template: str, *, status: int = 200, **values: Any) -> Reply:
        """A page, or a part of one for a page that is open. `here` in a template: where one gets this page again."""
        session = self.session
        known = {"csrf": "" if session is None else session.csrf, "who": None if session is None else self.caller.name}
        path = self.request.path.decode("latin-1")
        html = render(template, self.phrases, {**known, "path": path, "here": self.here, **values})
        return Reply(status, html.encode(errors="replace"), HTML)

    @property
    def here(self) -> str:
        """The address of the page that somebody looks at: of a form that was sent, and of a part, the one around it."""
        request = self.request
        path, query = request.path.decode("latin-1"), request.raw_query.decode("latin-1")
        if not self.looks or self.by_script:
            shown = urlsplit(request.header(b"hx-current-url") or request.header(b"referer") or "")
            path, query = shown.path, shown.query
        return inside(f"{path}?{query}" if query else path)

    def goto(self, where: str, cookie: str | None = None) -> Reply:
        """Go on there, with GET, and with this cookie where one is given."""
        return Reply(303, b"", HTML, {"location": where, **({} if cookie is None else {"set-cookie": cookie})})

    def say(self, english: str, **values: object) -> str:
        return self.phrases.say(english, **values)


def inside(where: str, otherwise: str = "/") -> str:
    """A path of this site to go on to; `otherwise` where it leads elsewhere (`//host`, `/\\host`, a scheme)."""
    ours = where.startswith("/") and where[1:2] not in ("/", "\\") and where.isprintable() and where.isascii()
    return where if ours else otherwise


MOST_CHOSEN = 1_000
"""Tasks that one form may name."""


def read_ref(text: str) -> Version:
    """Raises BadInput."""
    name, at, token = text.rpartition("@")
    topic, slash, key = name.partition("/")
    if not at or not slash or not token.isascii() or not token.isdigit() or len(token) > 19:
        raise BadInput("ref", text, "topic/key@token, percent-encoded, as the console's own forms have it")
    return Version(Ref(check_topic(unquote(topic)), check_name("key", unquote(key))), int(token))


def chosen(visit: Visit) -> list[Version]:
    """The tasks that a form names. Raises BadInput."""
    texts = visit.all_given("ref")
    if len(texts) > MOST_CHOSEN:
        raise BadInput("ref", f"{len(texts)} tasks", f"at most {MOST_CHOSEN:,} at once; or all that match")
    return [read_ref(text) for text in dict.fromkeys(texts)]


DUE = "due"
"""The state in a form that means: it waits, and its time has come."""


def filter_given(visit: Visit) -> Filter:
    """The filter of a form or an address: topic, state (the five, or `due`), group, wake_from and wake_before.

    Names are taken exactly as they were sent; times are as `Phrases.read_time` takes them. Raises BadInput.
    """
    times = [
        as_datetime(visit.phrases.read_time(text, name)) if (text := visit.given(name)) else None
        for name in ("wake_from", "wake_before")
    ]
    state = visit.given("state")
    if state == DUE:
        by_now = as_datetime(visit.phrases.now + 1)
        state, times[1] = State.WAITING.value, min(times[1] or by_now, by_now)
    elif state and state not in STATES:
        raise BadInput("state", state, f"one of {', '.join(STATES)}, or {DUE}")
    return filter_of(visit.exact("topic") or None, state or None, visit.exact("group") or None, *times)


def filter_fields(visit: Visit, where: Filter) -> dict[str, str]:
    """The fields of a filter, as a form or an address has them. Its times are instants, and do not pass while a form is
    open."""
    given = {name: getattr(where, name) for name in ("topic", "state", "group", "wake_from", "wake_before")}
    return {
        name: visit.phrases.utc(value) if isinstance(value, int) else str(value)
        for name, value in given.items()
        if value is not None
    }


class Shared(NamedTuple):
    """Belongs to the event loop in which `app` is open."""

    app: Bide
    health: Health
    policy_of: Callable[[Topic], Policy]
    """The policy by which this instance decides what happens to the tasks of a topic."""
    instance: str
    """This instance's name among all that serve the store."""
    channel: WakeChannel
    """How its worker and its long poll are notified of earlier wakes."""
    access: Access
    overviews: Overviews
    day: LastDay
    """Both are shown by several pages, and asked once for all of them; not theirs to close."""


Answer = Callable[[Visit], Awaitable[Reply]]
Route = tuple[str, str]
"""Method and path; a part of the path in braces stands for any text, percent-encoded."""


class Closes(Protocol):
    """Works in the background."""

    async def close(self) -> None: ...


class Page:
    """One page with its parts and forms. Belongs to the event loop in which the app is open."""

    def __init__(self, routes: Mapping[Route, Answer], *background: Closes) -> None:
        self.routes = routes
        self._background = background

    async def close(self) -> None:
        """End what works in the background."""
        for one in self._background:
            await one.close()
