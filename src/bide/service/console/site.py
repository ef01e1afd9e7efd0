"""Finds the page for a request, and who asks; whatever goes wrong is a page too, within two seconds.

Whoever opens the console with a browser has a session (see `sessions`); where anybody may come in, one is begun for
them, for the sake of its secret that forms must carry. Pages may be loaded in no frame, run no script but ours, and
load nothing from elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from urllib.parse import quote

from bide.core.errors import BadInput, BideError, StoreError
from bide.engine.acting import acting_as
from bide.engine.client import Client
from bide.service.access import Access
from bide.service.audit import audit
from bide.service.callers import AccessRefused, Unauthorized
from bide.service.console import statics as static_files
from bide.service.console.doors import Door, doors
from bide.service.console.rendering import statics
from bide.service.console.visit import HTML, Visit, page, phrases_of, shown_csrf
from bide.service.replies import Reply
from bide.service.requests import Request, segment
from bide.service.sessions import Session, Sessions, cookie_of, set_cookie

_log = logging.getLogger("bide.console")
PATIENCE = 1.7
"""Seconds that a page may take before it says that the store is slow."""

Answer = Callable[[Visit], Awaitable[Reply]]
Route = tuple[str, str]
"""Method and path; a part of the path in braces stands for any text, percent-encoded."""

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
    """The pages, by method and path. Belongs to the event loop in which `client` is open."""

    def __init__(self, client: Client, access: Access, pages: Mapping[Route, Answer]) -> None:
        self._client = client
        self._access = access
        self.sessions = Sessions(client, access)
        self._doors = doors(client, access, self.sessions)
        self._pages = [(method, tuple(path.split("/")), answer) for (method, path), answer in pages.items()]

    def find(self, request: Request) -> Callable[[Request], Awaitable[Reply]] | None:
        """What answers this request; None: there is no such page."""
        path = request.path.decode("latin-1")
        if path.startswith(static_files.PATH):
            found = statics().reply(path)
            return None if found is None or request.method not in ("GET", "HEAD") else _always(found)
        method = "GET" if request.method == "HEAD" else request.method
        door = self._doors.get((method, path))
        if door is not None:
            return lambda request: self._open(request, door)
        parts = path.split("/")
        for wanted, pattern, answer in self._pages:
            if wanted == method and len(parts) == len(pattern) and all(map(_fits, parts, pattern)):
                open_parts = [part for part, its in zip(parts, pattern, strict=True) if its.startswith("{")]
                return lambda request: self._answer(request, answer, open_parts)
        return None

    async def missing(self, request: Request) -> Reply:
        """For a browser that asked for what is not there."""
        reply = self._trouble(request, None, 404, "There is no such page", "")
        return _with(reply, _SAFE)

    async def _open(self, request: Request, door: Door) -> Reply:
        """A page for everybody."""
        try:
            async with asyncio.timeout(PATIENCE):
                reply = await door(request)
        except TimeoutError:
            reply = self._trouble(request, None, 503, "The store does not answer", "it is slow, or away")
        except Exception as error:  # noqa: BLE001 - as in _answer
            reply = self._wrong(request, None, error)
        return _with(reply, _SAFE)

    async def _answer(self, request: Request, answer: Answer, parts: list[str]) -> Reply:
        session: Session | None = None
        begun = False
        try:
            async with asyncio.timeout(PATIENCE):
                session, begun = await self._session(request)
                request.caller = session.caller
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
        except Unauthorized as error:
            reply = self._to_login(request, error)
        except TimeoutError:
            reply = self._trouble(request, session, 503, "The store does not answer", "it is slow, or away")
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
            self._access.refuse_other_names(host)
        try:
            return await self.sessions.of(cookie_of(request.header(b"cookie"))), False
        except Unauthorized:
            if not await self._access.anonymous_now():
                raise
            return await self.sessions.begin_anonymous(), True

    def _to_login(self, request: Request, error: Unauthorized) -> Reply:
        """To the login; a part of an open page says that it is over."""
        if request.header(b"sec-fetch-site") == "cross-site" and request.method == "GET":
            # a link of another site: the browser keeps the cookie back, until the page itself asks again
            return page("again.html", phrases_of(request, self._client), session=None, path="/")
        query = request.raw_query.decode("latin-1")
        where = request.path.decode("latin-1") + (f"?{query}" if query else "")
        login = f"/login?next={quote(where, safe='')}" if request.method == "GET" else "/login"
        if request.header(b"hx-request") == "true":
            return Reply(401, b"", HTML, {"hx-redirect": "/login"})
        return Reply(303, b"", HTML, {"location": login})

    def _wrong(self, request: Request, session: Session | None, error: Exception) -> Reply:
        say = phrases_of(request, self._client).say
        if isinstance(error, AccessRefused):
            return self._trouble(request, session, error.status, "You may not do this", error.detail)
        if isinstance(error, BadInput):
            return self._trouble(request, session, 422, "A value is not accepted", f"{error.field}: {error.accepted}")
        if isinstance(error, StoreError):
            _log.warning("a page could not be shown: %s", error)
            return self._trouble(request, session, 503, "The store is away", say("nothing was done; try again"))
        if isinstance(error, BideError):
            return self._trouble(request, session, 409, "Not possible now", str(error))
        _log.exception("a defect in the console", exc_info=error)
        return self._trouble(request, session, 500, "A defect of the console", say("its log says where"))

    def _trouble(self, request: Request, session: Session | None, status: int, title: str, detail: str) -> Reply:
        phrases = phrases_of(request, self._client)
        part = request.header(b"hx-request") == "true"
        return page(
            "trouble_part.html" if part else "trouble.html", phrases, session=session,
            path=request.path.decode("latin-1"), status=200 if part and status == 503 else status,
            title=phrases.say(title), detail=detail,
        )  # fmt: skip


def _fits(part: str, wanted: str) -> bool:
    return part == wanted or (wanted.startswith("{") and part != "")


def _with(reply: Reply, headers: Mapping[str, str]) -> Reply:
    return Reply(reply.status, reply.body, reply.content_type, {**headers, **reply.headers})


def _always(reply: Reply) -> Callable[[Request], Awaitable[Reply]]:
    async def answer(request: Request) -> Reply:
        return reply

    return answer
