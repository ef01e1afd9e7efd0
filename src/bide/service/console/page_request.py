"""The parts that all pages of the console share: the request, the forms, and the services of the instance."""

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
from bide.engine.client import Client
from bide.engine.registry import WakeChannel
from bide.engine.verbs import STATES, filter_of
from bide.insight.bulk import Version
from bide.insight.minute_log import LastDay
from bide.insight.overview import Overviews
from bide.ports import Policy
from bide.service.access import Access
from bide.service.authz import Caller
from bide.service.console.i18n import Locale, language_of, zone_of
from bide.service.console.rendering import render
from bide.service.console.sessions import CSRF_FIELD, CSRF_HEADER, Session
from bide.service.health import Health
from bide.service.requests import Reply, Request

HTML = "text/html; charset=utf-8"
LANGUAGE_COOKIE = "bide_language"
ZONE_COOKIE = "bide_zone"
_MOST_FIELDS = 5_000
Choice = TypeVar("Choice", bound=StrEnum)


class PageRequest:
    """An HTTP request for a page, with its viewer. `session` is set once the viewer is known; `path_values` are the
    parts of the path that the route leaves open."""

    def __init__(self, http: Request, client: Client) -> None:
        self.http = http
        self.client = client
        self.session: Session | None = None
        self.path_values: tuple[str, ...] = ()

    @cached_property
    def locale(self) -> Locale:
        """The viewer's language and time zone: their choice in a cookie, else what the browser asks for."""
        header = self.http.header(b"cookie") or ""
        pairs = (part.strip().partition("=") for part in header[:8_192].split(";"))
        cookies = {name: value for name, _, value in pairs if name in (LANGUAGE_COOKIE, ZONE_COOKIE)}
        language = language_of(self.http.header(b"accept-language"), cookies.get(LANGUAGE_COOKIE))
        return Locale(language, *zone_of(cookies.get(ZONE_COOKIE)), self.client.clock.now())

    def t(self, english: str, **values: object) -> str:
        """The sentence in the viewer's language."""
        return self.locale.t(english, **values)

    @property
    def caller(self) -> Caller:
        """The viewer, once they are known."""
        assert self.session is not None
        return self.session.caller

    @property
    def is_read(self) -> bool:
        """True if the request changes nothing."""
        return self.http.method in ("GET", "HEAD")

    @property
    def is_htmx(self) -> bool:
        """True if an open page asks for a part of itself."""
        return self.http.header(b"hx-request") == "true"

    # --- the fields of the query or of a form

    @cached_property
    def fields(self) -> dict[str, list[str]]:
        """Every field with its values. Raises BadInput for what is not a form."""
        raw = self.http.raw_query if self.is_read else self.http.body
        try:
            return parse_qs(raw.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=_MOST_FIELDS)
        except ValueError as error:
            shown, accepted = raw[:80].decode("latin-1"), "name=value&..., percent-encoded UTF-8"
            raise BadInput("form", shown, f"{accepted} ({error})") from None

    @property
    def csrf(self) -> str | None:
        """The value that proves that a page of this session sent the request."""
        return self.http.header(CSRF_HEADER.encode()) or self.raw_field(CSRF_FIELD) or None

    def field(self, name: str, default: str = "") -> str:
        """A field without the space around it; the last value, if it came more than once."""
        values = self.fields.get(name)
        return values[-1].strip() if values else default

    def raw_field(self, name: str) -> str:
        """A field exactly as it was sent, for names: a space at either end of a topic is part of it."""
        values = self.fields.get(name)
        return values[-1] if values else ""

    def field_values(self, name: str) -> list[str]:
        """Every value of a field that may come many times."""
        return self.fields.get(name, [])

    def number_field(self, name: str, default: int, *, least: int, most: int) -> int:
        """A field that is a whole number. Raises BadInput."""
        text = self.field(name)
        if not text:
            return default
        if not text.isascii() or not text.isdigit() or len(text) > 19 or not least <= int(text) <= most:
            raise BadInput(name, text, f"a whole number from {least:,} to {most:,}")
        return int(text)

    def choice_field(self, name: str, of: type[Choice], default: Choice | None = None) -> Choice:
        """A field that is one of several words. Raises BadInput."""
        text = self.field(name)
        if not text and default is not None:
            return default
        try:
            return of(text)
        except ValueError:
            raise BadInput(name, text, f"one of {', '.join(of)}") from None

    # --- answers

    def render(self, template: str, *, status: int = 200, **values: Any) -> Reply:
        """Answer with a page, or with a part of one for a page that is open. Templates find the way back as `here`."""
        session = self.session
        known = {"csrf": "" if session is None else session.csrf, "who": None if session is None else self.caller.name}
        path = self.http.path.decode("latin-1")
        html = render(template, self.locale, {**known, "path": path, "here": self.here, **values})
        return Reply(status, html.encode(errors="replace"), HTML)

    @property
    def here(self) -> str:
        """The address of the page that the viewer sees: for a form or a part of a page, the page around it."""
        path, query = self.http.path.decode("latin-1"), self.http.raw_query.decode("latin-1")
        if not self.is_read or self.is_htmx:
            around = urlsplit(self.http.header(b"hx-current-url") or self.http.header(b"referer") or "")
            path, query = around.path, around.query
        return local_path(f"{path}?{query}" if query else path)

    def redirect(self, where: str, cookie: str | None = None) -> Reply:
        """Send the browser to `where` by GET, and set the cookie if one is given."""
        return Reply(303, b"", HTML, {"location": where, **({} if cookie is None else {"set-cookie": cookie})})


def local_path(where: str, otherwise: str = "/") -> str:
    """`where`, if it is a path of this site; `otherwise` if it leads elsewhere (`//host`, `/\\host`, a scheme)."""
    ours = where.startswith("/") and where[1:2] not in ("/", "\\") and where.isprintable() and where.isascii()
    return where if ours else otherwise


MOST_CHOSEN = 1_000
"""Tasks that one form may name."""


def read_ref(text: str) -> Version:
    """The task that a form names, and the token that the viewer saw. Raises BadInput."""
    name, at, token = text.rpartition("@")
    topic, slash, key = name.partition("/")
    if not at or not slash or not token.isascii() or not token.isdigit() or len(token) > 19:
        raise BadInput("ref", text, "topic/key@token, percent-encoded, as the console's own forms have it")
    return Version(Ref(check_topic(unquote(topic)), check_name("key", unquote(key))), int(token))


def chosen_refs(request: PageRequest) -> list[Version]:
    """The tasks that a form names. Raises BadInput."""
    texts = request.field_values("ref")
    if len(texts) > MOST_CHOSEN:
        raise BadInput("ref", f"{len(texts)} tasks", f"at most {MOST_CHOSEN:,} at once; or all that match")
    return [read_ref(text) for text in dict.fromkeys(texts)]


DUE = "due"
"""The value of the field `state` for tasks that wait and are due."""


def read_filter(request: PageRequest) -> Filter:
    """The filter of a form or an address: topic, state (the five, or `due`), group, wake_from and wake_before.

    Names are taken exactly as they were sent; times are as `Locale.read_time` takes them. Raises BadInput.
    """
    times = [
        as_datetime(request.locale.read_time(text, name)) if (text := request.field(name)) else None
        for name in ("wake_from", "wake_before")
    ]
    state = request.field("state")
    if state == DUE:
        by_now = as_datetime(request.locale.now + 1)
        state, times[1] = State.WAITING.value, min(times[1] or by_now, by_now)
    elif state and state not in STATES:
        raise BadInput("state", state, f"one of {', '.join(STATES)}, or {DUE}")
    return filter_of(request.raw_field("topic") or None, state or None, request.raw_field("group") or None, *times)


def filter_fields(request: PageRequest, where: Filter) -> dict[str, str]:
    """A filter as the fields of a form or an address. Its times are instants, so they do not drift while it is open."""
    given = {name: getattr(where, name) for name in ("topic", "state", "group", "wake_from", "wake_before")}
    return {
        name: request.locale.utc(value) if isinstance(value, int) else str(value)
        for name, value in given.items()
        if value is not None
    }


class ConsoleContext(NamedTuple):
    """The services of one instance that its pages use. Belongs to the event loop in which `app` is open."""

    app: Bide
    health: Health
    policy_of: Callable[[Topic], Policy]
    """The policy by which this instance settles the tasks of a topic."""
    instance: str
    """This instance's name among all that serve the store."""
    channel: WakeChannel
    """How its worker and its long poll are notified of earlier wakes."""
    access: Access
    overviews: Overviews
    """Shared by several pages, as `day` is: one query answers all of them. Their owner closes both."""
    day: LastDay


Answer = Callable[[PageRequest], Awaitable[Reply]]
Route = tuple[str, str]
"""Method and path; a part of the path in braces stands for any text, percent-encoded."""


class Closeable(Protocol):
    """Work in the background that ends when it is closed."""

    async def close(self) -> None: ...


class Page:
    """One page with its parts and forms. Belongs to the event loop in which the app is open."""

    def __init__(self, routes: Mapping[Route, Answer], *background: Closeable) -> None:
        self.routes = routes
        self._background = background

    async def close(self) -> None:
        """End the work in the background."""
        for one in self._background:
            await one.close()
