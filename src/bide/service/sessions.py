"""Sessions of the console: a cookie in the place of the token that somebody pasted, and what keeps it from others.

A cookie says by which token the session was begun, when it ends, and a random value, and carries an HMAC-SHA256 of that
under a key that the store keeps. So every instance that serves the store can check it and none has to remember it. The
token is looked up at every call, so that a session never outlives it. What this cannot do is to end one session alone:
leaving takes the cookie out of the browser, and a copy of it would be good until it ends, or the token is revoked.

What changes something must carry a second value, derived from the cookie (`csrf`), in a header or a form field: a page
of another site makes a browser send the cookie at most, and cannot read this. See also `origins`.
"""

from __future__ import annotations

import base64
import hmac
import re
import secrets
from typing import NamedTuple

from bide.core.instants import Millis
from bide.engine.client import Client
from bide.engine.kept import Kept
from bide.service.access import Access
from bide.service.callers import ANONYMOUS, AccessRefused, Caller, Unauthorized, anonymous
from bide.service.origins import host_name, is_loopback_name, refuse_foreign_page
from bide.service.tokens import parse

COOKIE = "bide_session"
CSRF_HEADER = "x-csrf-token"
CSRF_FIELD = "csrf"
LASTS: Millis = 12 * 3_600_000
"""How long a session lasts, if its token lasts as long."""
_KEY = "session-key"
_FORM = re.compile(r"1\.([a-z0-9]{8,9})\.([0-9]{1,15})\.([A-Za-z0-9_-]{22})\.([A-Za-z0-9_-]{43})", re.ASCII)
_LONGEST = 128
_LONGEST_HEADER = 16_384


class Forged(AccessRefused):
    """It changes something and does not show that a page of the console sent it."""

    status = 403
    title = "Forbidden"
    code = None

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.detail,)


class Session(NamedTuple):
    """Somebody who has logged in."""

    caller: Caller
    csrf: str
    """What their forms and requests must carry."""
    expires_at: Millis
    cookie: str

    def check_change(self, *, csrf: str | None, host: str | None, origin: str | None, site: str | None) -> None:
        """Raises Forged, Foreign unless a page of this very session sent what changes something.

        `csrf` comes from the header or the form; the others are the headers Host, Origin and Sec-Fetch-Site.
        """
        refuse_foreign_page(host=host, origin=origin, site=site)
        if csrf is None or not hmac.compare_digest(csrf.encode(errors="replace"), self.csrf.encode()):
            raise Forged("this form is not of your session, or the session is another now; load the page again")


class Sessions:
    """Begins and checks them. Belongs to the event loop in which `client` is open."""

    def __init__(self, client: Client, access: Access, *, lasts: Millis = LASTS) -> None:
        self._client = client
        self._access = access
        self._lasts = lasts
        self._key: bytes | None = None

    async def begin(self, token: str) -> Session:
        """A session for whoever has this token. Raises Unauthorized."""
        caller = await self._access.caller_with(token)
        shown = parse(token.strip())
        assert shown is not None
        return await self._made(shown.id, caller)

    async def begin_anonymous(self) -> Session:
        """A session for whoever comes, where that is allowed; for its `csrf`. Raises Unauthorized."""
        return await self._made(ANONYMOUS, await self._access.caller_of(None))

    async def of(self, cookie: str | None) -> Session:
        """The session of this cookie. Raises Unauthorized where there is none, it has ended, or its token has."""
        if cookie is None:
            raise Unauthorized("nobody is logged in", sent=False)
        found = _FORM.fullmatch(cookie) if len(cookie) <= _LONGEST else None
        key = await self._secret()
        signed, _, mac = cookie.rpartition(".")
        if found is None or not hmac.compare_digest(_mac(key, "session", signed), mac):
            raise Unauthorized("this is not a session of this service; log in again")
        id, expires_at = found[1], int(found[2])
        if expires_at <= self._client.clock.now():
            raise Unauthorized("this session has ended; log in again")
        if id == ANONYMOUS:
            if not await self._access.anonymous_now():
                raise Unauthorized("a token is needed now; log in with one")
            caller = anonymous()
        else:
            caller = await self._access.caller_by_id(id)
        return Session(caller, _mac(key, "csrf", cookie), expires_at, cookie)

    async def _made(self, id: str, caller: Caller) -> Session:
        key = await self._secret()
        expires_at = self._client.clock.now() + self._lasts
        signed = f"1.{id}.{expires_at}.{secrets.token_urlsafe(16)}"
        cookie = f"{signed}.{_mac(key, 'session', signed)}"
        return Session(caller, _mac(key, "csrf", cookie), expires_at, cookie)

    async def _secret(self) -> bytes:
        """The key that the instances of this store share; made by the first that needs one."""
        if self._key is None:
            kept = Kept(self._client.store, self._client.clock)
            key = await kept.get(_KEY)
            if key is None:
                await kept.put_if_absent(_KEY, secrets.token_bytes(32))
                key = await kept.get(_KEY)
            assert key is not None
            self._key = key
        return self._key


def cookie_of(header: str | None) -> str | None:
    """The session's cookie among those of a Cookie header; None also where there are several, as somebody added one."""
    if header is None or len(header) > _LONGEST_HEADER:
        return None
    found = {value for name, _, value in (part.strip().partition("=") for part in header.split(";")) if name == COOKIE}
    return found.pop() if len(found) == 1 else None


def set_cookie(session: Session, now: Millis, *, host: str | None) -> str:
    """The value of Set-Cookie for a session that was begun."""
    lasts = max(0, session.expires_at - now) // 1000
    return f"{COOKIE}={session.cookie}; Max-Age={lasts}; {_terms(host)}"


def clear_cookie(*, host: str | None) -> str:
    """The value of Set-Cookie for somebody who leaves."""
    return f"{COOKIE}=; Max-Age=0; {_terms(host)}"


def _terms(host: str | None) -> str:
    """Never over plain HTTP, but on this machine, where nobody listens on the way."""
    plain = host is not None and is_loopback_name(host_name(host))
    return f"Path=/; HttpOnly; SameSite=Strict{'' if plain else '; Secure'}"


def _mac(key: bytes, purpose: str, text: str) -> str:
    made = hmac.digest(key, f"bide {purpose}\0{text}".encode(), "sha256")
    return base64.urlsafe_b64encode(made).decode().rstrip("=")
