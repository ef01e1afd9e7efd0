"""Finds the page for a request, and the viewer who asks; whatever goes wrong is a page too, within two seconds.

A viewer who opens the console with a browser has a session (see `sessions`), which begins at the login; where anybody
may come in, one is begun for them, for the sake of its secret that forms must carry. Pages may be loaded in no frame,
run no script but ours, and load nothing from elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol
from urllib.parse import parse_qs, quote

from bide.core.errors import BadInput, BideError, OutcomeUnknown, StoreError, StoreFull
from bide.engine.acting import acting_as
from bide.service.audit import audit, refused
from bide.service.authz import AccessRefused, Forbidden, Unauthorized
from bide.service.console.actions import ActionsPage
from bide.service.console.dead import DeadPage
from bide.service.console.overview import OverviewPage
from bide.service.console.page_request import (
    HTML,
    LANGUAGE_COOKIE,
    Answer,
    Route,
    Shared,
    Visit,
    chosen_language,
    here_of,
    inside,
    page,
    phrases_of,
    shown_csrf,
)
from bide.service.console.rendering import STATIC_PATH, statics
from bide.service.console.sanitize import inert, isolated
from bide.service.console.tasks import TasksPage
from bide.service.console.timeline import TimelinePage
from bide.service.console.topics import TopicsPage
from bide.service.replies import Problem, Reply
from bide.service.requests import OPEN_LIMIT, Gone, Request, refuse_foreign_page, segment
from bide.service.sessions import Session, Sessions, clear_cookie, cookie_of, set_cookie

Door = Callable[[Request], Awaitable[Reply]]
_YEAR = 365 * 86_400


def _same_site(request: Request) -> None:
    """Raises Foreign: nobody else's page logs somebody in as somebody else, or out."""
    refuse_foreign_page(
        host=request.header(b"host"), origin=request.header(b"origin"), site=request.header(b"sec-fetch-site")
    )


def _one(raw: bytes, name: str) -> str:
    values = parse_qs(raw[:16_384].decode("latin-1"), keep_blank_values=True, errors="replace").get(name)
    return values[-1] if values else ""


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


class Page(Protocol):
    """One page with its parts and forms."""

    def routes(self) -> Mapping[Route, Answer]:
        """By method and path; a part of a path in braces stands for any text."""
        ...

    async def close(self) -> None:
        """End what runs in the background."""
        ...


class Site:
    """Every page of one instance, by method and path. Make it in the running loop, once the app is open, and close it
    before the app."""

    def __init__(self, shared: Shared) -> None:
        self._client = shared.app
        self._access = shared.access
        self.sessions = Sessions(shared.app, shared.access)
        self._doors: Mapping[Route, Door] = {
            ("GET", "/login"): self._login_page,
            ("POST", "/login"): self._login,
            ("POST", "/logout"): self._logout,
            ("GET", "/language"): self._language,
        }
        self._pages: Sequence[Page] = [
            made(shared) for made in (OverviewPage, TimelinePage, TasksPage, ActionsPage, DeadPage, TopicsPage)
        ]
        self._routes = [
            (method, tuple(path.split("/")), answer)
            for one in self._pages
            for (method, path), answer in one.routes().items()
        ]
        self._complains_again = 0.0

    async def close(self) -> None:
        """End what runs in the background."""
        for one in self._pages:
            await one.close()

    def find(self, request: Request) -> Callable[[Request], Awaitable[Reply]] | None:
        """What answers this request; None: there is no such page."""
        path = request.path.decode("latin-1")
        if path.startswith(STATIC_PATH):
            found = statics().reply(path)
            if found is None:
                return None
            return _always(found) if request.method in ("GET", "HEAD") else self._not_with(["GET"])
        method = "GET" if request.method == "HEAD" else request.method
        door = self._doors.get((method, path))
        if door is not None:
            return lambda request: self._open(request, door)
        allowed = [wanted for wanted, its in self._doors if its == path]
        parts = path.split("/")
        for wanted, pattern, answer in self._routes:
            if len(parts) == len(pattern) and all(map(_fits, parts, pattern)):
                if wanted == method:
                    open_parts = [part for part, its in zip(parts, pattern, strict=True) if its.startswith("{")]
                    return lambda request: self._answer(request, answer, open_parts)
                allowed.append(wanted)
        return self._not_with(allowed) if allowed else None

    def _not_with(self, allowed: Sequence[str]) -> Callable[[Request], Awaitable[Reply]]:
        """There is something, and it is not asked for like this."""
        methods = sorted({*allowed, "HEAD"} if "GET" in allowed else set(allowed))

        async def answer(request: Request) -> Reply:
            reply = self._trouble(request, None, 405, "Not with this method", ", ".join(methods))
            return _with(reply, {**_SAFE, "allow": ", ".join(methods)})

        return answer

    async def missing(self, request: Request) -> Reply:
        """For a browser that asked for what is not there."""
        reply = self._trouble(request, None, 404, "There is no such page", "")
        return _with(reply, _SAFE)

    async def _open(self, request: Request, door: Door) -> Reply:
        """A page for everybody."""
        try:
            await request.read(OPEN_LIMIT)
            async with asyncio.timeout(PATIENCE):
                reply = await door(request)
        except Gone:
            raise
        except TimeoutError:
            reply = self._silent(request, None)
        except Exception as error:  # noqa: BLE001 - as in _answer
            reply = self._wrong(request, None, error)
        return _with(reply, _SAFE)

    # --- pages for everybody

    async def _login_page(self, request: Request) -> Reply:
        where = inside(_one(request.raw_query, "next"))
        if await self._access.anonymous_now():
            return Reply(303, b"", HTML, {"location": where})
        return self._login_form(request, where)

    async def _login(self, request: Request) -> Reply:
        _same_site(request)
        where = inside(_one(request.body, "next"))
        try:
            session = await self.sessions.begin(_one(request.body, "token"))
        except AccessRefused as error:
            refused(error, request.peer)
            return self._login_form(request, where, status=401, wrong=error.detail)
        cookie = set_cookie(session, self._client.clock.now(), host=request.header(b"host"))
        return Reply(303, b"", HTML, {"location": where, "set-cookie": cookie})

    def _login_form(self, request: Request, where: str, *, status: int = 200, wrong: str = "") -> Reply:
        phrases = phrases_of(request, self._client)
        return page(
            "login.html", phrases, session=None, request=request, status=status, next=where,
            wrong=phrases.say(wrong) if wrong else "",
        )  # fmt: skip

    async def _logout(self, request: Request) -> Reply:
        _same_site(request)
        await self.sessions.end(cookie_of(request.header(b"cookie")))
        return Reply(303, b"", HTML, {"location": "/login", "set-cookie": clear_cookie(host=request.header(b"host"))})

    async def _language(self, request: Request) -> Reply:
        chosen = chosen_language(_one(request.raw_query, "to"))
        cookie = f"{LANGUAGE_COOKIE}={chosen}; Max-Age={_YEAR}; Path=/; SameSite=Lax"
        return Reply(303, b"", HTML, {"location": inside(_one(request.raw_query, "next")), "set-cookie": cookie})

    # --- pages of somebody who is known

    async def _answer(self, request: Request, answer: Answer, parts: list[str]) -> Reply:
        session: Session | None = None
        begun = False
        try:
            async with asyncio.timeout(PATIENCE):
                session, begun = await self._session(request)
                request.caller = session.caller
            await request.read()
            async with asyncio.timeout(PATIENCE):
                visit = Visit(
                    request, self._client, session, tuple(segment(one.encode("latin-1"), "path") for one in parts)
                )
                if request.method not in ("GET", "HEAD"):
                    session.check_change(
                        csrf=shown_csrf(request, visit.fields), host=request.header(b"host"),
                        origin=request.header(b"origin"), site=request.header(b"sec-fetch-site"),
                    )  # fmt: skip
                with acting_as(session.caller.name, audit):
                    reply = await answer(visit)
        except Gone:
            raise
        except Unauthorized as error:
            reply = self._to_login(request, error)
        except TimeoutError:
            reply = self._silent(request, session)
        except Exception as error:  # noqa: BLE001 - a viewer gets a page, whatever is wrong
            reply = self._wrong(request, session, error)
        headers = dict(_SAFE)
        if begun and session is not None:
            host = request.header(b"host")
            headers["set-cookie"] = set_cookie(session, self._client.clock.now(), host=host)
        return _with(reply, headers)

    async def _session(self, request: Request) -> tuple[Session, bool]:
        """Whose request this is, and whether that began with it. Raises AccessRefused, StoreError."""
        host = request.header(b"host")
        if await self._access.anonymous_now():
            self._access.refuse_from_beyond(host, request.headers)
        try:
            return await self.sessions.of(cookie_of(request.header(b"cookie"))), False
        except Unauthorized:
            # not where a browser may have kept the cookie back: a new one would end what is open in its other windows
            if _from_elsewhere(request) or not await self._access.anonymous_now():
                raise
            return await self.sessions.begin_anonymous(), True

    def _to_login(self, request: Request, error: Unauthorized) -> Reply:
        """To the login, and from there back to the page that is open."""
        if _from_elsewhere(request):
            # a link of another site: the browser keeps the cookie back, until the page itself asks again
            return page("again.html", phrases_of(request, self._client), session=None, request=request)
        login = f"/login?next={quote(here_of(request), safe='')}"
        if request.header(b"hx-request") == "true":
            return Reply(401, b"", HTML, {"hx-redirect": login})
        return Reply(303, b"", HTML, {"location": login})

    def _silent(self, request: Request, session: Session | None) -> Reply:
        """No answer in time."""
        say = phrases_of(request, self._client).say
        detail = "it is slow, or away"
        if request.method not in ("GET", "HEAD"):
            detail = "it is slow, or away: what you asked for may still be done; look before you try again"
        return self._trouble(request, session, 503, "The store does not answer", say(detail))

    def _wrong(self, request: Request, session: Session | None, error: Exception) -> Reply:
        say = phrases_of(request, self._client).say
        if isinstance(error, AccessRefused):
            refused(error, request.peer)
            return self._trouble(request, session, error.status, "You may not do this", _why(error, say))
        if isinstance(error, Problem):
            shape = error.shape
            return self._trouble(request, session, error.status, shape.title, inert(say(shape.detail)))
        if isinstance(error, BadInput):
            detail = f"{say(error.field)}: {say(error.accepted)}"
            return self._trouble(request, session, 422, "A value is not accepted", inert(detail))
        if isinstance(error, OutcomeUnknown):
            what = say("it was done once or not at all; look before you try again")
            return self._trouble(request, session, 503, "The answer was lost", what)
        if isinstance(error, StoreFull):
            what = say("nothing was done; what is there still drains")
            return self._trouble(request, session, 503, "The store is full", what)
        if isinstance(error, StoreError):
            self._complain(error)
            return self._trouble(request, session, 503, "The store is away", say("nothing was done; try again"))
        if isinstance(error, BideError):
            return self._trouble(request, session, 409, "Not possible now", inert(str(error)))
        _log.exception("a defect in the console", exc_info=error)
        return self._trouble(request, session, 500, "A defect of the console", say("its log says where"))

    def _complain(self, error: StoreError) -> None:
        """Once a second at most: while the store is away every open page asks again and again."""
        now = time.monotonic()
        if now >= self._complains_again:
            self._complains_again = now + 1.0
            _log.warning("a page could not be shown: %s", error)

    def _trouble(self, request: Request, session: Session | None, status: int, title: str, detail: str) -> Reply:
        """A page that says what is wrong; `detail` is inert."""
        phrases = phrases_of(request, self._client)
        part = request.header(b"hx-request") == "true"
        return page(
            "trouble_part.html" if part else "trouble.html", phrases, session=session, request=request,
            status=200 if part and status == 503 else status, title=phrases.say(title), detail=detail,
        )  # fmt: skip


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
    """Whether it is a link of another site that a browser has followed."""
    return request.header(b"sec-fetch-site") == "cross-site" and request.method in ("GET", "HEAD")


def _fits(part: str, wanted: str) -> bool:
    return part == wanted or (wanted.startswith("{") and part != "")


def _with(reply: Reply, headers: Mapping[str, str]) -> Reply:
    return Reply(reply.status, reply.body, reply.content_type, {**headers, **reply.headers})


def _always(reply: Reply) -> Callable[[Request], Awaitable[Reply]]:
    async def answer(request: Request) -> Reply:
        return reply

    return answer
