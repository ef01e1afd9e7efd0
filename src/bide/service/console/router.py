"""Finds the page for a request, and the viewer who asks; whatever goes wrong is a page too, within two seconds.

A viewer who opens the console with a browser has a session (see `sessions`), which begins at the login; where anybody
may come in, one is begun for them, for the sake of its secret that forms must carry. Pages may be loaded in no frame,
run no script but ours, and load nothing from elsewhere.
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
from bide.engine.recorder import acting_as
from bide.service.access import refuse_foreign_page
from bide.service.audit import Bucket, audit, refused
from bide.service.authz import AccessRefused, Forbidden, Unauthorized
from bide.service.console.actions import ActionsPage
from bide.service.console.i18n import LANGUAGES
from bide.service.console.overview import OverviewPage
from bide.service.console.page_request import HTML, LANGUAGE_COOKIE, Answer, Page, Route, Shared, Visit, inside
from bide.service.console.rendering import inert, isolated, statics
from bide.service.console.sessions import Session, Sessions, clear_cookie, cookie_of, set_cookie
from bide.service.console.tasks import DeadPage, TasksPage
from bide.service.console.timeline import TimelinePage
from bide.service.console.topics import TopicsPage
from bide.service.requests import OPEN_LIMIT, Gone, Reply, Request, Routes, of_error, segment

Handler = Callable[[Iterable[bytes], Request], Awaitable[Reply]]
"""Answers a request, of whose path the route has left these parts open."""
_YEAR = 365 * 86_400


_log = logging.getLogger("bide.console")
PATIENCE = 1.7
"""Seconds that a page may take before it says that the store is slow."""


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


class Site:
    """Every page of one instance, by method and path. Make it in the running loop, once the app is open, and close it
    before the app."""

    def __init__(self, shared: Shared) -> None:
        self._client = shared.app
        self._access = shared.access
        self.sessions = Sessions(shared.app, shared.access)
        self._pages: Sequence[Page] = [
            made(shared) for made in (OverviewPage, TimelinePage, TasksPage, ActionsPage, DeadPage, TopicsPage)
        ]
        doors: Mapping[Route, Answer] = {
            ("GET", "/login"): self._login_page,
            ("POST", "/login"): self._login,
            ("POST", "/logout"): self._logout,
            ("GET", "/language"): self._language,
        }
        found: list[tuple[Route, Handler]]
        found = [(("GET", path), partial(_static, file)) for path, file in statics().files.items()]
        found += [(route, partial(self._answer, door, True)) for route, door in doors.items()]
        pages = [entry for one in self._pages for entry in one.routes.items()]
        found += [(route, partial(self._answer, answer, False)) for route, answer in pages]
        self._routes = Routes([(*route, handler) for route, handler in found])
        self._complaints = Bucket(1, 1.0, time.monotonic())
        """One a second: while the store is away every open page asks again and again."""

    async def close(self) -> None:
        """End what runs in the background."""
        for one in self._pages:
            await one.close()

    def find(self, request: Request) -> Callable[[Request], Awaitable[Reply]] | None:
        """Find the page for this request; None where there is no such page."""
        found = self._routes.find(request.path)
        if found is None:
            return None
        handlers, parts = found
        handler = handlers.get("GET" if request.method == "HEAD" else request.method)
        return partial(self._not_with, handlers) if handler is None else partial(handler, parts.values())

    async def _not_with(self, allowed: Collection[str], request: Request) -> Reply:
        """There is something, and it is not asked for like this."""
        methods = ", ".join(sorted({*allowed, "HEAD"} if "GET" in allowed else allowed))
        reply = self._trouble(Visit(request, self._client), 405, "Not with this method", methods)
        return _with(reply, {**_SAFE, "allow": methods})

    async def missing(self, request: Request) -> Reply:
        """For a browser that asked for what is not there."""
        return _with(self._trouble(Visit(request, self._client), 404, "There is no such page", ""), _SAFE)

    # --- pages for everybody

    async def _login_page(self, visit: Visit) -> Reply:
        where = inside(visit.exact("next"))
        if await self._access.anonymous_now():
            return visit.goto(where)
        return visit.page("login.html", next=where, wrong="")

    async def _login(self, visit: Visit) -> Reply:
        request = visit.request
        refuse_foreign_page(request.headers)  # nobody else's page logs somebody in as somebody else, or out
        where = inside(visit.exact("next"))
        try:
            session = await self.sessions.begin(visit.exact("token"))
        except AccessRefused as error:
            refused(error, request.peer)
            return visit.page("login.html", status=401, next=where, wrong=visit.say(error.detail))
        return visit.goto(where, set_cookie(session, self._client.clock.now(), host=request.header(b"host")))

    async def _logout(self, visit: Visit) -> Reply:
        request = visit.request
        refuse_foreign_page(request.headers)
        await self.sessions.end(cookie_of(request.header(b"cookie")))
        return visit.goto("/login", clear_cookie(host=request.header(b"host")))

    async def _language(self, visit: Visit) -> Reply:
        language = visit.given("to")
        if language not in LANGUAGES:
            raise BadInput("language", language, f"one of {', '.join(LANGUAGES)}")
        cookie = f"{LANGUAGE_COOKIE}={language}; Max-Age={_YEAR}; Path=/; SameSite=Lax"
        return visit.goto(inside(visit.exact("next")), cookie)

    # --- the way of a request

    async def _answer(self, answer: Answer, for_all: bool, parts: Iterable[bytes], request: Request) -> Reply:
        """The page; unless it is `for_all`, once it is known who asks for it."""
        visit = Visit(request, self._client)
        headers = dict(_SAFE)

        async def answered() -> Reply:
            if for_all:
                await request.read(OPEN_LIMIT)
                async with asyncio.timeout(PATIENCE):
                    return await answer(visit)
            async with asyncio.timeout(PATIENCE):
                visit.session, begun = await self._session(request)
                request.caller = visit.caller
            if begun:
                cookie = set_cookie(visit.session, self._client.clock.now(), host=request.header(b"host"))
                headers["set-cookie"] = cookie
            await request.read()
            async with asyncio.timeout(PATIENCE):
                visit.part = tuple(segment(one, "path") for one in parts)
                if not visit.looks:
                    visit.session.check_change(request.headers, visit.csrf)
                with acting_as(visit.caller.name, audit):
                    return await answer(visit)

        return _with(await self._in_any_case(visit, answered()), headers)

    async def _in_any_case(self, visit: Visit, answering: Coroutine[Any, Any, Reply]) -> Reply:
        """Answer with a page, whatever goes wrong. Raises Gone."""
        try:
            return await answering
        except Gone:
            raise
        except Unauthorized:
            return self._to_login(visit)
        except TimeoutError:
            return self._silent(visit)
        except Exception as error:  # noqa: BLE001 - see above
            return self._wrong(visit, error)

    async def _session(self, request: Request) -> tuple[Session, bool]:
        """The session of this request, and whether it begins with it. Raises AccessRefused, StoreError."""
        if await self._access.anonymous_now():
            self._access.refuse_from_beyond(request.headers)
        try:
            return await self.sessions.of(cookie_of(request.header(b"cookie"))), False
        except Unauthorized:
            # not where a browser may have kept the cookie back: a new one would end what is open in its other windows
            if _from_elsewhere(request) or not await self._access.anonymous_now():
                raise
            return await self.sessions.begin_anonymous(), True

    def _to_login(self, visit: Visit) -> Reply:
        """To the login, and from there back to the page that is open."""
        if _from_elsewhere(visit.request):
            # a link of another site: the browser keeps the cookie back, until the page itself asks again
            return visit.page("again.html")
        login = f"/login?next={quote(visit.here, safe='')}"
        return Reply(401, b"", HTML, {"hx-redirect": login}) if visit.by_script else visit.goto(login)

    def _silent(self, visit: Visit) -> Reply:
        """No answer in time."""
        detail = visit.say("it is slow, or away")
        if not visit.looks:
            detail = visit.say("it is slow, or away: what you asked for may still be done; look before you try again")
        return self._trouble(visit, 503, "The store does not answer", detail)

    def _wrong(self, visit: Visit, error: Exception) -> Reply:
        say = visit.say
        if isinstance(error, AccessRefused):
            refused(error, visit.request.peer)
            return self._trouble(visit, error.status, "You may not do this", _why(error, say))
        if isinstance(error, BadInput):
            detail = f"{say(error.field)}: {say(error.accepted)}"
            return self._trouble(visit, 422, "A value is not accepted", inert(detail))
        problem = of_error(error)
        if problem.status == 500:
            _log.exception("a defect in the console", exc_info=error)
            return self._trouble(visit, 500, "A defect of the console", say("its log says where"))
        if isinstance(error, StoreError) and self._complaints.take(time.monotonic()):
            _log.warning("a page could not be shown: %s", error)
        return self._trouble(visit, min(problem.status, 503), problem.shape.title, inert(say(problem.shape.detail)))

    def _trouble(self, visit: Visit, status: int, title: str, detail: str) -> Reply:
        """A page that says what is wrong; `detail` is inert."""
        template = "trouble_part.html" if visit.by_script else "trouble.html"
        if visit.by_script and status == 503:
            status = 200  # or the part would not be shown
        return visit.page(template, status=status, title=visit.say(title), detail=detail)


def _why(error: AccessRefused, say: Callable[..., str]) -> str:
    """Why somebody may not, in their language."""
    if not isinstance(error, Forbidden):
        return inert(say(error.detail))
    who, verb = isolated(error.who), error.verb.value
    if error.topic is None:
        return say(
            "{who} may not {verb} over all topics: their token lacks the verb, or the pattern *", who=who, verb=verb
        )
    topic = isolated(error.topic)
    return say("{who} may not {verb} on topic {topic}: their token does not say so", who=who, verb=verb, topic=topic)


def _from_elsewhere(request: Request) -> bool:
    """Tell whether a browser has followed a link of another site."""
    return request.header(b"sec-fetch-site") == "cross-site" and request.method in ("GET", "HEAD")


def _with(reply: Reply, headers: Mapping[str, str]) -> Reply:
    return Reply(reply.status, reply.body, reply.content_type, {**headers, **reply.headers})


async def _static(file: Reply, _parts: Iterable[bytes], _request: Request) -> Reply:
    return file
