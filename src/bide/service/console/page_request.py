"""One request as the console's pages see it: the viewer, their language and zone, the fields, and the tasks that a form
means; and what all pages of one instance share.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

from bide.app import Bide
from bide.core.errors import BadInput
from bide.core.instants import as_datetime
from bide.core.names import check_name, check_topic
from bide.core.records import Filter, Ref, State, Topic
from bide.engine.arguments import STATES, filter_of
from bide.engine.client import Client
from bide.engine.presence import WakeChannel
from bide.engine.verdicts import Policy
from bide.insight.bulk import Seen
from bide.insight.minute_log import LastDay
from bide.insight.overview import Overviews
from bide.service.access import Access
from bide.service.authz import Caller, Verb
from bide.service.config import ServeConfig
from bide.service.console.i18n import LANGUAGES, Phrases, language_of, zone_of
from bide.service.console.rendering import render
from bide.service.health import Health
from bide.service.replies import Reply
from bide.service.requests import Request
from bide.service.sessions import CSRF_FIELD, CSRF_HEADER, Session

HTML = "text/html; charset=utf-8"
LANGUAGE_COOKIE = "bide_language"
ZONE_COOKIE = "bide_zone"
_MOST_FIELDS = 5_000


class Visit:
    """A request of somebody who is known. `part`: what of the path the route left open."""

    def __init__(self, request: Request, client: Client, session: Session, part: tuple[str, ...] = ()) -> None:
        self.request = request
        self.client = client
        self.session = session
        self.part = part
        self.phrases = phrases_of(request, client)
        self.fields = _fields(request)

    @property
    def caller(self) -> Caller:
        return self.session.caller

    def check(self, verb: Verb, topic: str | None) -> None:
        """Raises Forbidden unless they may."""
        self.session.caller.check(verb, topic)

    def may(self, verb: Verb, topic: str | None) -> bool:
        return self.session.caller.may(verb, topic)

    # --- what they sent, in the query or in a form

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
        if not text.isascii() or not text.isdigit() or len(text) > 12 or not least <= int(text) <= most:
            raise BadInput(name, text, f"a whole number from {least:,} to {most:,}")
        return int(text)

    # --- what they get

    def page(self, template: str, *, status: int = 200, **values: Any) -> Reply:
        """A page, or a part of one for a page that is open."""
        return page(template, self.phrases, session=self.session, request=self.request, status=status, **values)

    def goto(self, where: str) -> Reply:
        """Go on there, with GET."""
        return Reply(303, b"", HTML, {"location": where})

    def say(self, english: str, **values: object) -> str:
        return self.phrases.say(english, **values)


def page(
    template: str, phrases: Phrases, *, session: Session | None, request: Request, status: int = 200, **values: Any
) -> Reply:
    """A page for somebody who may not be known. `here` in a template: where one gets this page again."""
    csrf = "" if session is None else session.csrf
    named = None if session is None else session.caller.name
    path = request.path.decode("latin-1")
    html = render(template, phrases, {"csrf": csrf, "who": named, "path": path, "here": here_of(request), **values})
    return Reply(status, html.encode(errors="replace"), HTML)


def here_of(request: Request) -> str:
    """The address of the page that somebody looks at: of a form that was sent, and of a part, the one around it."""
    path, query = request.path.decode("latin-1"), request.raw_query.decode("latin-1")
    if request.method in ("GET", "HEAD") and request.header(b"hx-request") != "true":
        return inside(f"{path}?{query}" if query else path)
    shown = urlsplit(request.header(b"hx-current-url") or request.header(b"referer") or "")
    return inside(f"{shown.path}?{shown.query}" if shown.query else shown.path)


def inside(where: str, otherwise: str = "/") -> str:
    """A path of this site to go on to; `otherwise` where it leads elsewhere (`//host`, `/\\host`, a scheme)."""
    ours = where.startswith("/") and where[1:2] not in ("/", "\\") and where.isprintable() and where.isascii()
    return where if ours else otherwise


def phrases_of(request: Request, client: Client) -> Phrases:
    """How whoever sent this is spoken to."""
    cookies = cookies_of(request)
    language = language_of(request.header(b"accept-language"), cookies.get(LANGUAGE_COOKIE))
    return Phrases(language, *zone_of(cookies.get(ZONE_COOKIE)), client.clock.now())


def cookies_of(request: Request) -> dict[str, str]:
    """The cookies that are no secret, by name."""
    header = request.header(b"cookie") or ""
    pairs = (part.strip().partition("=") for part in header[:8_192].split(";"))
    return {name: value for name, _, value in pairs if name in (LANGUAGE_COOKIE, ZONE_COOKIE)}


def chosen_language(text: str) -> str:
    """Raises BadInput."""
    if text not in LANGUAGES:
        raise BadInput("language", text, f"one of {', '.join(LANGUAGES)}")
    return text


def shown_csrf(request: Request, fields: dict[str, list[str]]) -> str | None:
    """What the request carries to show that a page of ours sent it."""
    sent = fields.get(CSRF_FIELD)
    return request.header(CSRF_HEADER.encode()) or (sent[-1] if sent else None)


def _fields(request: Request) -> dict[str, list[str]]:
    """Raises BadInput where it is no form."""
    raw = request.raw_query if request.method in ("GET", "HEAD") else request.body
    try:
        return parse_qs(raw.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=_MOST_FIELDS)
    except ValueError as error:
        raise BadInput("form", raw[:80].decode("latin-1"), f"name=value&..., percent-encoded UTF-8 ({error})") from None


MOST_CHOSEN = 1_000
"""Tasks that one form may name."""


def read_ref(text: str) -> Seen:
    """Raises BadInput."""
    name, at, token = text.rpartition("@")
    topic, slash, key = name.partition("/")
    if not at or not slash or not token.isascii() or not token.isdigit() or len(token) > 19:
        raise BadInput("ref", text, "topic/key@token, percent-encoded, as the console's own forms have it")
    return Seen(Ref(check_topic(unquote(topic)), check_name("key", unquote(key))), int(token))


def chosen(visit: Visit) -> list[Seen]:
    """The tasks that a form names. Raises BadInput."""
    texts = visit.all_given("ref")
    if len(texts) > MOST_CHOSEN:
        raise BadInput("ref", f"{len(texts)} tasks", f"at most {MOST_CHOSEN:,} at once; or all that match")
    return [read_ref(text) for text in dict.fromkeys(texts)]


DUE = "due"
"""What stands in a form's state for: it waits, and its time has come."""


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


class Shared(NamedTuple):
    """Belongs to the event loop in which `app` is open."""

    app: Bide
    health: Health
    config: ServeConfig
    """Of this instance: which topics go to which webhook, and by which policy."""
    policies: Mapping[Topic, Policy]
    instance: str
    """This instance's name among all that serve the store."""
    channel: WakeChannel
    """How its worker and its desk hear of earlier wakes."""
    access: Access
    overviews: Overviews
    day: LastDay
    """Both are shown by several pages, and asked once for all of them; not theirs to close."""


Answer = Callable[[Visit], Awaitable[Reply]]
Route = tuple[str, str]
"""Method and path; a part of the path in braces stands for any text, percent-encoded."""
