"""Routes a request to its page, and finds the viewer's session. Every error is a page too, within two seconds.

A session (see `sessions`) begins at the login. Where anonymous viewers are allowed, one begins by itself, for the
secret that forms must carry. Pages cannot be framed, run no scripts but the console's, and load nothing from elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import quote

from bide.core.errors import BadInput, StoreError
from bide.engine.context import acting_as
from bide.service.access import refuse_foreign_page
from bide.service.audit import TokenBucket, audit, audit_refused
from bide.service.authz import AccessRefused, Forbidden, Unauthorized
from bide.service.console.actions import ActionsPage
from bide.service.console.i18n import LANGUAGES
from bide.service.console.overview import OverviewPage
from bide.service.console.page_request import (
    HTML,
    LANGUAGE_COOKIE,
    Answer,
    ConsoleContext,
    Page,
    PageRequest,
    Route,
    local_path,
)
from bide.service.console.recurring import RecurringPage
from bide.service.console.rendering import inert, isolated, statics
from bide.service.console.sessions import Session, Sessions, clear_cookie, cookie_of, set_cookie
from bide.service.console.tasks import DeadPage, TasksPage
from bide.service.console.timeline import TimelinePage
from bide.service.console.topics import TopicsPage
from bide.service.requests import OPEN_LIMIT, ClientDisconnected, Reply, Request, Routes, problem_of, segment

Handler = Callable[[Iterable[bytes], Request], Awaitable[Reply]]
"""Answers a request; the bytes are the open parts of its path."""
_YEAR = 365 * 86_400

_log = logging.getLogger("bide.console")
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
    """Every page of one instance, by method and path. Make it in the running loop when the app is open, and close it
    before the app."""

    def __init__(self, context: ConsoleContext) -> None:
        self._client = context.app
        self._access = context.access
        self.sessions = Sessions(context.app, context.access)
        self._pages: Sequence[Page] = [
            made(context)
            for made in (OverviewPage, TimelinePage, TasksPage, RecurringPage, ActionsPage, DeadPage, TopicsPage)
        ]
        open_pages: Mapping[Route, Answer] = {
            ("GET", "/login"): self._login_page,
            ("POST", "/login"): self._login,
            ("POST", "/logout"): self._logout,
            ("GET", "/language"): self._language,
        }
        found: list[tuple[Route, Handler]]
        found = [(("GET", path), partial(_static, file)) for path, file in statics().files.items()]
        found += [(route, partial(self._answer, page, True)) for route, page in open_pages.items()]
        pages = [entry for one in self._pages for entry in one.routes.items()]
        found += [(route, partial(self._answer, answer, False)) for route, answer in pages]
        self._routes = Routes([(*route, handler) for route, handler in found])
        self._complaints = TokenBucket(1, 1.0, time.monotonic())
        """At most one log line a second: while the store is unavailable, every open page retries."""

    async def close(self) -> None:
        """End the work in the background."""
        for one in self._pages:
            await one.close()

    def find(self, http: Request) -> Callable[[Request], Awaitable[Reply]] | None:
        """Return the handler of this request; None if there is no such page."""
        found = self._routes.find(http.path)
        if found is None:
            return None
        handlers, parts = found
        handler = handlers.get("GET" if http.method == "HEAD" else http.method)
        return partial(self._method_not_allowed, handlers) if handler is None else partial(handler, parts.values())

    async def _method_not_allowed(self, allowed: Collection[str], http: Request) -> Reply:
        """Answer 405: the page exists, but not for this method."""
        methods = ", ".join(sorted({*allowed, "HEAD"} if "GET" in allowed else allowed))
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
        try:
            session = await self.sessions.begin(request.raw_field("token"))
        except AccessRefused as error:
            audit_refused(error, http.peer)
            return request.render("login.html", status=401, next=where, wrong=request.t(error.detail))
        return request.redirect(where, set_cookie(session, self._client.clock.now(), host=http.header(b"host")))

    async def _logout(self, request: PageRequest) -> Reply:
        http = request.http
        refuse_foreign_page(http.headers)
        await self.sessions.end(cookie_of(http.header(b"cookie")))
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
        request = PageRequest(http, self._client)
        headers = dict(_SAFE)

        async def answered() -> Reply:
            if is_open:
                await http.read(OPEN_LIMIT)
                async with asyncio.timeout(PATIENCE):
                    return await answer(request)
            async with asyncio.timeout(PATIENCE):
                request.session, begun = await self._session(http)
                http.caller = request.caller
            if begun:
                cookie = set_cookie(request.session, self._client.clock.now(), host=http.header(b"host"))
                headers["set-cookie"] = cookie
            await http.read()
            async with asyncio.timeout(PATIENCE):
                request.path_values = tuple(segment(one, "path") for one in parts)
                if not request.is_read:
                    request.session.check_change(http.headers, request.csrf)
                with acting_as(request.caller.name, audit):
                    return await answer(request)

        return _with_headers(await self._or_error_page(request, answered()), headers)

    async def _or_error_page(self, request: PageRequest, answering: Coroutine[Any, Any, Reply]) -> Reply:
        """Answer with the page, or with an error page. Raises ClientDisconnected."""
        try:
            return await answering
        except ClientDisconnected:
            raise
        except Unauthorized:
            return self._to_login(request)
        except TimeoutError:
            return self._store_timeout_page(request)
        except Exception as error:  # noqa: BLE001 - see above
            return self._page_of_error(request, error)

    async def _session(self, http: Request) -> tuple[Session, bool]:
        """Return the session of this request, and True if it begins now. Raises AccessRefused, StoreError."""
        if await self._access.anonymous_now():
            self._access.refuse_remote_anonymous(http.headers)
        try:
            return await self.sessions.of(cookie_of(http.header(b"cookie"))), False
        except Unauthorized:
            # not if the browser may have withheld the cookie: a new session would break its other windows
            if _linked_from_other_site(http) or not await self._access.anonymous_now():
                raise
            return await self.sessions.begin_anonymous(), True

    def _to_login(self, request: PageRequest) -> Reply:
        """Send the viewer to the login, and from there back to this page."""
        if _linked_from_other_site(request.http):
            # the browser withholds the cookie from a link of another site, until this page itself asks again
            return request.render("again.html")
        login = f"/login?next={quote(request.here, safe='')}"
        return Reply(401, b"", HTML, {"hx-redirect": login}) if request.is_htmx else request.redirect(login)

    def _store_timeout_page(self, request: PageRequest) -> Reply:
        """Say that the store did not answer in time."""
        detail = request.t("it is slow or unavailable")
        if not request.is_read:
            detail = request.t("it is slow or unavailable: your request may still be done; check before you try again")
        return self._error_page(request, 503, "The store does not answer", detail)

    def _page_of_error(self, request: PageRequest, error: Exception) -> Reply:
        t = request.t
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
    """The reason for a refusal, in the viewer's language."""
    if not isinstance(error, Forbidden):
        return inert(t(error.detail))
    who, verb = isolated(error.who), error.verb.value
    if error.topic is None:
        return t(
            "{who} may not {verb} over all topics: their token lacks the verb, or the pattern *", who=who, verb=verb
        )
    topic = isolated(error.topic)
    return t("{who} may not {verb} on topic {topic}: their token does not say so", who=who, verb=verb, topic=topic)


def _linked_from_other_site(http: Request) -> bool:
    """Tell whether the browser followed a link of another site."""
    return http.header(b"sec-fetch-site") == "cross-site" and http.method in ("GET", "HEAD")


def _with_headers(reply: Reply, headers: Mapping[str, str]) -> Reply:
    return Reply(reply.status, reply.body, reply.content_type, {**headers, **reply.headers})


async def _static(file: Reply, _parts: Iterable[bytes], _request: Request) -> Reply:
    return file
