"""A request on its way to a page and back: its fields, its viewer, its page, and the answer.

A session (see `access`) begins at the login. Where anonymous viewers are allowed, one begins by itself, for the secret
that forms must carry. Pages cannot be framed, run no scripts but the console's, and load nothing from elsewhere. Every
error is a page too, within two seconds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from enum import StrEnum
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar
from urllib.parse import parse_qs, quote, urlsplit

from bide.app import Bide
from bide.core.errors import BadInput, StoreError
from bide.core.instants import as_datetime, instant_text
from bide.core.records import Filter, State, Topic
from bide.engine.client import Client
from bide.engine.registry import WakeChannel
from bide.engine.session import acting_as
from bide.engine.verbs import STATES, filter_of
from bide.insight.minute_log import LastDay
from bide.insight.overview import Overviews
from bide.ports import Policy
from bide.service.access import (
    Access,
    AccessRefused,
    Caller,
    Forbidden,
    TokenBucket,
    Unauthorized,
    audit,
    audit_refused,
    is_loopback_name,
    refuse_foreign_page,
)
from bide.service.console.i18n import LANGUAGES, Locale, inert, isolated, language_of, zone_of
from bide.service.console.rendering import render, statics
from bide.service.health import Health
from bide.service.requests import (
    BODY_LIMIT,
    OPEN_LIMIT,
    ClientDisconnected,
    Reply,
    Request,
    Routes,
    problem_of,
    segment,
)
from bide.service.sessions import CSRF_FIELD, CSRF_HEADER, Session, Sessions, clear_cookie, cookie_of, set_cookie

_log = logging.getLogger("bide.console")
HTML = "text/html; charset=utf-8"
LANGUAGE_COOKIE = "bide_language"
ZONE_COOKIE = "bide_zone"
_MOST_FIELDS = 5_000
_NO_COOKIE = "over plain HTTP the browser keeps no session: open the console by https, or through a tunnel as localhost"
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
        return self.locale.t(english, **values)

    @property
    def caller(self) -> Caller:
        """The viewer, once they are known."""
        assert self.session is not None
        return self.session.caller

    @property
    def is_read(self) -> bool:
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
    def csrf(self) -> str:
        """The value that proves that a page of this session sent the request."""
        return self.http.header(CSRF_HEADER.encode()) or self.raw_field(CSRF_FIELD)

    def field(self, name: str, default: str = "") -> str:
        """A field without the space around it; the last value, if it came more than once."""
        return self.fields.get(name, [default])[-1].strip()

    def raw_field(self, name: str) -> str:
        """A field exactly as it was sent, for names: a space at either end of a topic is part of it."""
        return self.fields.get(name, [""])[-1]

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
        text = self.field(name) or default or ""
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
            path = query = ""
            with suppress(ValueError):  # the header is no URL
                around = urlsplit(self.http.header(b"hx-current-url") or self.http.header(b"referer") or "")
                path, query = around.path, around.query
        return local_path(path if query in ("", "?") else f"{path}?{query}")  # `?`: an empty query

    def redirect(self, where: str, cookie: str | None = None) -> Reply:
        """Send the browser to `where` by GET, and set the cookie if one is given."""
        return Reply(303, b"", HTML, {"location": where, **({} if cookie is None else {"set-cookie": cookie})})


def local_path(where: str, otherwise: str = "/") -> str:
    """`where`, if it is a path of this site; `otherwise` if it leads elsewhere (`//host`, `/\\host`, a scheme)."""
    ours = where.startswith("/") and where[1:2] not in ("/", "\\") and where.isprintable() and where.isascii()
    return where if ours else otherwise


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


def filter_fields(where: Filter) -> dict[str, str]:
    """A filter as the fields of a form or an address. Its times are instants, so they do not drift while it is open."""
    given = {name: getattr(where, name) for name in ("topic", "state", "group", "wake_from", "wake_before")}
    return {
        name: instant_text(value) if isinstance(value, int) else str(value)
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
    stack: AsyncExitStack
    """Closes what the pages do in the background, before the app is closed."""


Answer = Callable[[PageRequest], Awaitable[Reply]]
Route = tuple[str, str]
"""Method and path; a part of the path in braces stands for any text, percent-encoded."""


class Page:
    """One page with its parts and forms. Belongs to the event loop in which the app is open."""

    routes: Mapping[Route, Answer]


# --- from request to page

Handler = Callable[[Iterable[bytes], Request], Awaitable[Reply]]
"""Answers a request; the bytes are the open parts of its path."""
_YEAR = 365 * 86_400
PATIENCE = 1.7
"""Most seconds for a page, before it says that the store is slow."""

_SAFE = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "font-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
    "vary": "cookie, accept-language",
}


class Router:
    """Every page of one instance, by method and path. Make it in the running loop when the app is open."""

    def __init__(self, context: ConsoleContext, pages: Sequence[Page]) -> None:
        self._client = context.app
        self._access = context.access
        self.sessions = Sessions(context.app, context.access)
        open_pages: Mapping[Route, Answer] = {
            ("GET", "/login"): self._login_page,
            ("POST", "/login"): self._login,
            ("POST", "/logout"): self._logout,
            ("GET", "/language"): self._language,
        }
        routes: dict[Route, Handler] = {("GET", path): partial(_static, file) for path, file in statics().values()}
        routes |= {route: partial(self._answer, answer, True) for route, answer in open_pages.items()}
        for page in pages:
            routes |= {route: partial(self._answer, answer, False) for route, answer in page.routes.items()}
        self._routes = Routes([(*route, handler) for route, handler in routes.items()])
        self._complaints = TokenBucket(1, 1.0, time.monotonic())
        """At most one log line a second: while the store is unavailable, every open page retries."""

    def find(self, http: Request) -> Callable[[Request], Awaitable[Reply]] | None:
        """Return the handler of this request; None if there is no such page."""
        found = self._routes.find(http.path)
        if found is None:
            return None
        handlers, parts = found
        handler = handlers.get(http.method)
        return partial(self._method_not_allowed, handlers) if handler is None else partial(handler, parts.values())

    async def _method_not_allowed(self, allowed: Collection[str], http: Request) -> Reply:
        """Answer 405: the page exists, but not for this method."""
        methods = ", ".join(sorted(allowed))
        reply = self._error_page(PageRequest(http, self._client), 405, "This method is not supported here", methods)
        return _with_headers(reply, {**_SAFE, "allow": methods})

    async def not_found(self, http: Request) -> Reply:
        """Answer a browser that asked for a page that does not exist."""
        return _with_headers(self._error_page(PageRequest(http, self._client), 404, "There is no such page", ""), _SAFE)

    # --- pages without a session

    async def _login_page(self, request: PageRequest) -> Reply:
        where = local_path(request.raw_field("next"))
        if await self._access.anonymous_now():
            return request.redirect(where)
        return request.render("login.html", next=where, wrong="")

    async def _login(self, request: PageRequest) -> Reply:
        http = request.http
        refuse_foreign_page(http.headers)  # a page of another site must not log the viewer in or out
        where = local_path(request.raw_field("next"))
        if (http.header(b"origin") or "").startswith("http:") and not is_loopback_name(http.header(b"host") or ""):
            return request.render("login.html", status=403, next=where, wrong=request.t(_NO_COOKIE))
        try:
            session = await self.sessions.begin(request.raw_field("token"))
        except AccessRefused as error:
            audit_refused(error, http.peer)
            return request.render("login.html", status=401, next=where, wrong=request.t(error.detail))
        return request.redirect(where, set_cookie(session, self._client.clock.now(), host=http.header(b"host")))

    async def _logout(self, request: PageRequest) -> Reply:
        http = request.http
        refuse_foreign_page(http.headers)
        await self.sessions.end(cookie_of(http.header(b"cookie"), host=http.header(b"host")))
        return request.redirect("/login", clear_cookie(host=http.header(b"host")))

    async def _language(self, request: PageRequest) -> Reply:
        language = request.field("to")
        if language not in LANGUAGES:
            raise BadInput("language", language, f"one of {', '.join(LANGUAGES)}")
        cookie = f"{LANGUAGE_COOKIE}={language}; Max-Age={_YEAR}; Path=/; SameSite=Lax"
        return request.redirect(local_path(request.raw_field("next")), cookie)

    # --- from request to page

    async def _answer(self, answer: Answer, is_open: bool, parts: Iterable[bytes], http: Request) -> Reply:
        """Answer with the page; unless it `is_open` to all, only once the viewer is known."""
        request, headers = PageRequest(http, self._client), dict(_SAFE)
        try:
            if not is_open:
                async with asyncio.timeout(PATIENCE):
                    request.session, begun = await self._session(http)
                http.caller = request.caller
                if begun:
                    cookie = set_cookie(request.session, self._client.clock.now(), host=http.header(b"host"))
                    headers["set-cookie"] = cookie
            await http.read(OPEN_LIMIT if is_open else BODY_LIMIT)
            async with asyncio.timeout(PATIENCE):
                request.path_values = tuple(segment(one, "path") for one in parts)
                if request.session is not None and not request.is_read:
                    request.session.check_change(http.headers, request.csrf)
                with acting_as(http.caller.name, audit):
                    reply = await answer(request)
        except ClientDisconnected:
            raise
        except Exception as error:  # noqa: BLE001 - every error is a page
            reply = self._error_page_of(request, error)
        return _with_headers(reply, headers)

    async def _session(self, http: Request) -> tuple[Session, bool]:
        """Return the session of this request, and True if it begins now. Raises AccessRefused, StoreError."""
        if await self._access.anonymous_now():
            self._access.refuse_remote_anonymous(http.headers)
        try:
            return await self.sessions.of(cookie_of(http.header(b"cookie"), host=http.header(b"host"))), False
        except Unauthorized:
            # not if the browser may have withheld the cookie: a new session would break its other windows
            if _linked_from_other_site(http) or not await self._access.anonymous_now():
                raise
            return await self.sessions.begin_anonymous(), True

    def _error_page_of(self, request: PageRequest, error: Exception) -> Reply:
        t = request.t
        if isinstance(error, Unauthorized):
            if _linked_from_other_site(request.http):
                # the browser withholds the cookie from a link of another site, until this page itself asks again
                return request.render("again.html")
            login = f"/login?next={quote(request.here, safe='')}"  # and from there back to this page
            return Reply(401, b"", HTML, {"hx-redirect": login}) if request.is_htmx else request.redirect(login)
        if isinstance(error, TimeoutError):
            detail = "it is slow or unavailable"
            if not request.is_read:
                detail = "it is slow or unavailable: your request may still be done; check before you try again"
            return self._error_page(request, 503, "The store does not answer", t(detail))
        if isinstance(error, AccessRefused):
            audit_refused(error, request.http.peer)
            return self._error_page(request, error.status, "You may not do this", _denial(error, t))
        if isinstance(error, BadInput):
            detail = f"{t(error.field)}: {t(error.accepted)}"
            return self._error_page(request, 422, "A value is not accepted", inert(detail))
        problem = problem_of(error)
        if problem.status == 500:
            _log.exception("a defect in the console", exc_info=error)
            return self._error_page(request, 500, "A defect in the console", t("its log says where"))
        if isinstance(error, StoreError) and self._complaints.take(time.monotonic()):
            _log.warning("a page could not be shown: %s", error)
        return self._error_page(request, min(problem.status, 503), problem.shape.title, inert(t(problem.shape.detail)))

    def _error_page(self, request: PageRequest, status: int, title: str, detail: str) -> Reply:
        """Render an error page; `detail` is inert text."""
        template = "trouble_part.html" if request.is_htmx else "trouble.html"
        if request.is_htmx and status == 503:
            status = 200  # htmx shows no part with an error status
        return request.render(template, status=status, title=request.t(title), detail=detail)


def _denial(error: AccessRefused, t: Callable[..., str]) -> str:
    if not isinstance(error, Forbidden):
        return inert(t(error.detail))
    who, verb = isolated(error.who), error.verb.value
    if error.topic is None:
        return t(
            "{who} may not {verb} over all topics: their token lacks the verb, or the pattern *", who=who, verb=verb
        )
    topic = isolated(error.topic)
    return t("{who} may not {verb} on topic {topic}: their token does not allow it", who=who, verb=verb, topic=topic)


def _linked_from_other_site(http: Request) -> bool:
    return http.header(b"sec-fetch-site") == "cross-site" and http.method in ("GET", "HEAD")


def _with_headers(reply: Reply, headers: Mapping[str, str]) -> Reply:
    return Reply(reply.status, reply.body, reply.content_type, {**headers, **reply.headers})


async def _static(file: Reply, _parts: Iterable[bytes], _request: Request) -> Reply:
    return file
