"""Sessions of the console: the cookie that stands for a token, and the CSRF value of its changes.

A session stands for the token that the viewer pasted at the login. Its cookie holds the id of the token, and 32 random
bytes of which the store keeps only a SHA-256: so every instance that serves the store can check it, and reading the
store gives nobody a session. The token is checked at every call, so a session never outlives it. A logout ends the
session at every instance within `FRESH` seconds. An anonymous session gives no access that an anonymous caller lacks,
so nothing of it is stored. Every change must carry a second value, `csrf`, derived from the cookie, in a header or a
form field: a page of another site can make a browser send the cookie, but cannot read this value.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import re
import secrets
from collections import OrderedDict
from contextlib import suppress
from typing import NamedTuple

import msgspec

from bide.core.errors import StoreFull
from bide.core.instants import Millis
from bide.core.names import SHOWN_TOPIC
from bide.engine.client import Client
from bide.engine.settings_store import SettingsStore
from bide.service.access import (
    ANONYMOUS,
    FRESH,
    Access,
    AccessRefused,
    Caller,
    Headers,
    TokenBucket,
    Unauthorized,
    hash_of,
    is_loopback_name,
    refuse_foreign_page,
)

COOKIE = "bide_session"
CSRF_HEADER = "x-csrf-token"
CSRF_FIELD = "csrf"
LASTS: Millis = 12 * 3_600_000
"""How long a session lasts, if its token lasts as long."""
_COOKIE_FORM = re.compile(r"2\.([a-z0-9]{8,9})\.([A-Za-z0-9_-]{43})", re.ASCII)
_PORT = re.compile(r":(\d{1,5})$", re.ASCII)
_LONGEST_HEADER = 16_384
_MOST_KNOWN = 1_000
_OFTEN = (100, 0.1)
"""Sessions that one token may begin in a burst, and how many a second after it."""


class CsrfMismatch(AccessRefused):
    """A change that does not prove that a page of this session sent it."""


class Session(NamedTuple):
    caller: Caller
    csrf: str
    """The value that their forms and requests must carry."""
    expires_at: Millis
    cookie: str

    def check_change(self, headers: Headers, csrf: str | None) -> None:
        """Raises CsrfMismatch, ForeignOrigin unless a page of this very session sent the change.

        `csrf` comes from the header or the form.
        """
        refuse_foreign_page(headers)
        if csrf is None or not hmac.compare_digest(csrf.encode(errors="replace"), self.csrf.encode()):
            raise CsrfMismatch("this form belongs to another session; load the page again")


class _Kept(msgspec.Struct, frozen=True, array_like=True):
    """A session as the store keeps it, by the hash of its secret."""

    token: str
    """The id of the token that it was begun with."""
    expires_at: Millis


class Sessions:
    """Begins, checks and ends sessions. Belongs to the event loop in which `client` is open."""

    def __init__(self, client: Client, access: Access) -> None:
        self._client = client
        self._access = access
        self._known: OrderedDict[str, tuple[float, _Kept]] = OrderedDict()
        """By name, with the loop's time until which the store need not be asked."""
        self._begun: dict[str, TokenBucket] = {}
        """How many each token may still begin: each is kept in the store."""

    async def begin(self, token: str) -> Session:
        """Begin a session for the owner of this token. Raises Unauthorized, StoreError."""
        caller = await self._access.caller_of_token(token)
        now = self._client.clock.now() / 1000
        if not self._begun.setdefault(caller.id, TokenBucket(*_OFTEN, now)).take(now):
            raise Unauthorized("too many sessions were begun with this token; wait a minute")
        secret = secrets.token_urlsafe(32)
        kept = _Kept(caller.id, self._client.clock.now() + LASTS)
        fresh_until = asyncio.get_running_loop().time() + FRESH
        try:
            await self._store.put(_name(secret), msgspec.msgpack.encode(kept), until=kept.expires_at)
        except StoreFull:  # a full store still drains: this instance alone knows of the session
            fresh_until += LASTS / 1000
        self._remember(_name(secret), fresh_until, kept)
        return _session(caller, f"2.{caller.id}.{secret}", kept.expires_at)

    async def begin_anonymous(self) -> Session:
        """Begin an anonymous session, where that is allowed, for its `csrf`. Raises Unauthorized."""
        caller = await self._access.caller_of(None)
        return _session(caller, f"2.{ANONYMOUS}.{secrets.token_urlsafe(32)}", self._client.clock.now() + LASTS)

    async def of(self, cookie: str | None) -> Session:
        """The session of this cookie. Raises Unauthorized if there is none, or if it or its token has ended."""
        if cookie is None:
            raise Unauthorized("nobody is logged in", sent=False)
        id, secret = _read(cookie)
        caller = await self._access.caller_by_id(id)  # before the store is asked, so that guesses cost it nothing
        now = self._client.clock.now()
        if id == ANONYMOUS:
            return _session(caller, cookie, now + LASTS)
        kept = await self._look_up(_name(secret))
        if kept is None or kept.token != id:
            raise Unauthorized(_UNKNOWN)
        if kept.expires_at <= now:
            raise Unauthorized("this session has ended; log in again")
        return _session(caller, cookie, kept.expires_at)

    async def end(self, cookie: str | None) -> None:
        """End the session of this cookie. Raises StoreError."""
        with suppress(Unauthorized):
            id, secret = _read((await self.of(cookie)).cookie)
            if id != ANONYMOUS:
                await self._store.remove(_name(secret))
                self._known.pop(_name(secret), None)

    @property
    def _store(self) -> SettingsStore:
        return SettingsStore(self._client.store, self._client.clock, SHOWN_TOPIC)

    async def _look_up(self, name: str) -> _Kept | None:
        now = asyncio.get_running_loop().time()
        known = self._known.get(name)
        if known is not None and now < known[0]:
            return known[1]
        value = await self._store.get(name)
        if value is None:
            self._known.pop(name, None)
            return None
        kept = msgspec.msgpack.decode(value, type=_Kept)
        self._remember(name, now + FRESH, kept)
        return kept

    def _remember(self, name: str, until: float, kept: _Kept) -> None:
        self._known[name] = (until, kept)
        self._known.move_to_end(name)
        if len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)


_UNKNOWN = "this is not a session of this service; log in again"


def _read(cookie: str) -> tuple[str, str]:
    """The id and the secret in a cookie. Raises Unauthorized."""
    found = _COOKIE_FORM.fullmatch(cookie)
    if found is None:
        raise Unauthorized(_UNKNOWN)
    return found[1], found[2]


def _name(secret: str) -> str:
    """The name under which a session is stored: a hash, so that reading the store reveals no cookie."""
    return f"session:{hash_of(secret)}"


def _session(caller: Caller, cookie: str, expires_at: Millis) -> Session:
    derived = hmac.digest(cookie.encode(), b"bide csrf", "sha256")
    return Session(caller, base64.urlsafe_b64encode(derived).decode().rstrip("="), expires_at, cookie)


def cookie_name(host: str | None) -> str:
    """The name of the cookie. It ends with the port, since services on one host share their cookies."""
    port = _PORT.search(host or "")
    return f"{COOKIE}_{port[1]}" if port else COOKIE


def cookie_of(header: str | None, *, host: str | None) -> str | None:
    """The session cookie in a Cookie header; None also if there are several, since one of them was planted."""
    if header is None or len(header) > _LONGEST_HEADER:
        return None
    parts, name = (part.strip().partition("=") for part in header.split(";")), cookie_name(host)
    found = {value for found, _, value in parts if found == name}
    return found.pop() if len(found) == 1 else None


def set_cookie(session: Session, now: Millis, *, host: str | None) -> str:
    lasts = max(0, session.expires_at - now) // 1000
    return f"{cookie_name(host)}={session.cookie}; Max-Age={lasts}; {_terms(host, session.caller.id)}"


def clear_cookie(*, host: str | None) -> str:
    return f"{cookie_name(host)}=; Max-Age=0; {_terms(host)}"


def _terms(host: str | None, id: str = "") -> str:
    """The attributes of the cookie: over plain HTTP only on this machine, or if it gives nothing to who reads it."""
    plain = is_loopback_name(host or "") or id == ANONYMOUS
    return f"Path=/; HttpOnly; SameSite=Strict{'' if plain else '; Secure'}"
