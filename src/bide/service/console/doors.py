"""The pages for everybody: where one logs in, leaves, and chooses a language."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from urllib.parse import parse_qs

from bide.engine.client import Client
from bide.service.access import Access
from bide.service.audit import refused
from bide.service.callers import AccessRefused
from bide.service.console.visit import HTML, LANGUAGE_COOKIE, chosen_language, inside, page, phrases_of
from bide.service.origins import refuse_foreign_page
from bide.service.replies import Reply
from bide.service.requests import Request
from bide.service.sessions import Sessions, clear_cookie, cookie_of, set_cookie

Door = Callable[[Request], Awaitable[Reply]]
_YEAR = 365 * 86_400


def doors(client: Client, access: Access, sessions: Sessions) -> Mapping[tuple[str, str], Door]:
    """By method and path."""

    async def login_page(request: Request) -> Reply:
        where = inside(_one(request.raw_query, "next"))
        if await access.anonymous_now():
            return Reply(303, b"", HTML, {"location": where})
        return page("login.html", phrases_of(request, client), session=None, request=request, next=where, wrong="")

    async def login(request: Request) -> Reply:
        _same_site(request)
        where = inside(_one(request.body, "next"))
        try:
            session = await sessions.begin(_one(request.body, "token"))
        except AccessRefused as error:
            refused(error, request.peer)
            phrases = phrases_of(request, client)
            return page(
                "login.html", phrases, session=None, request=request, status=401, next=where,
                wrong=phrases.say(error.detail),
            )  # fmt: skip
        cookie = set_cookie(session, client.clock.now(), host=request.header(b"host"))
        return Reply(303, b"", HTML, {"location": where, "set-cookie": cookie})

    async def logout(request: Request) -> Reply:
        _same_site(request)
        await sessions.end(cookie_of(request.header(b"cookie")))
        return Reply(303, b"", HTML, {"location": "/login", "set-cookie": clear_cookie(host=request.header(b"host"))})

    async def language(request: Request) -> Reply:
        chosen = chosen_language(_one(request.raw_query, "to"))
        cookie = f"{LANGUAGE_COOKIE}={chosen}; Max-Age={_YEAR}; Path=/; SameSite=Lax"
        return Reply(303, b"", HTML, {"location": inside(_one(request.raw_query, "next")), "set-cookie": cookie})

    return {
        ("GET", "/login"): login_page,
        ("POST", "/login"): login,
        ("POST", "/logout"): logout,
        ("GET", "/language"): language,
    }


def _same_site(request: Request) -> None:
    """Raises Foreign: nobody else's page logs somebody in as somebody else, or out."""
    refuse_foreign_page(
        host=request.header(b"host"), origin=request.header(b"origin"), site=request.header(b"sec-fetch-site")
    )


def _one(raw: bytes, name: str) -> str:
    values = parse_qs(raw[:16_384].decode("latin-1"), keep_blank_values=True, errors="replace").get(name)
    return values[-1] if values else ""
