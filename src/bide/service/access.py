"""Authentication: a token or the session of a console identifies a caller; pages of other sites are refused (CSRF).

All tokens are read from the store at most once a second, whatever callers send. So a guess costs the store nothing and
this process 2 us. Guesses are not throttled: at a million a second, the 2^256 secrets of one token outlast the
universe. Only the log of refusals is limited, see `audit`.

Cross-site requests are detected by headers that browsers set and pages cannot change, in the order of Go's
`http.CrossOriginProtection`, which follows F. Valsorda's research ("Cross-Site Request Forgery", 2025): Sec-Fetch-Site
if present, else Origin against Host; a request with neither is not from a browser. These headers do not reveal DNS
rebinding, where the attacker's name resolves to this address, so that the browser sees one site. The name in Host does.

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
import ipaddress
import logging
import math
import re
import secrets
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, TypeAlias

import msgspec

from bide.core.errors import BadInput, SetupError, StoreFull
from bide.core.instants import Millis
from bide.core.names import SHOWN_TOPIC
from bide.engine.client import Client
from bide.engine.settings_store import SettingsStore
from bide.service.authz import (
    ANONYMOUS,
    ANONYMOUS_CALLER,
    AccessRefused,
    Caller,
    Token,
    TokenBucket,
    Tokens,
    Unauthorized,
    hash_of,
    parse,
)

_log = logging.getLogger("bide.access")
AGE = 2.0
"""Seconds after which the known tokens are read again in the background."""
SOON = 1.0
"""Seconds after which the tokens are read again for an unknown one, which may be new. Until then it is refused."""
FRESH = 5.0
"""The most seconds for which a revoked token is still valid: no older reading of the tokens is used."""
_NO_HASH = hash_of("")
"""Compared with the secret of an unknown id, so that the check takes as long as for a wrong secret."""
Headers: TypeAlias = Mapping[bytes, bytes]
Networks: TypeAlias = Sequence[ipaddress.IPv4Network | ipaddress.IPv6Network]
_OWN = frozenset({"same-origin", "none"})
"""`none` is the user: a typed address, a bookmark. `same-site`, another port or subdomain, is not trusted."""
_PROXIED = frozenset({b"forwarded", b"via", b"x-real-ip"})
_PORTS = {"http": "80", "https": "443"}


class Access:
    """Identifies the caller of a request, or refuses it. Belongs to the event loop in which `client` is open.

    `anonymous`: accept callers without a token while the store has no token (the result of `check_start`).
    `any_name`: accept them under any host name, for a service that other machines reach with `--insecure`.
    """

    def __init__(self, client: Client, *, anonymous: bool = False, any_name: bool = False) -> None:
        self._client = client
        self._anonymous = anonymous
        self._any_name = any_name
        self._known: dict[str, tuple[Token, Caller]] = {}
        """The known tokens, by id."""
        self._any = True
        self._read_at = -math.inf
        """The start of the reading that filled `_known`, by the loop's clock."""
        self._reading: asyncio.Task[None] | None = None
        self._damaged: set[str] = set()
        self._failing = False

    async def caller_of(self, authorization: str | None) -> Caller:
        """Return the caller who sent this Authorization header. Raises Unauthorized, StoreUnavailable.

        No I/O while the known tokens are fresh. Without a header the caller is anonymous, if that is allowed and the
        store has no token. A token that is sent must be valid.
        """
        if authorization is None:
            if await self.anonymous_now():
                return ANONYMOUS_CALLER
            raise Unauthorized("a token is needed: send the header 'Authorization: Bearer bide_...'", sent=False)
        scheme, _, credentials = authorization.partition(" ")
        if scheme.lower() != "bearer":
            raise Unauthorized("only 'Authorization: Bearer' followed by a token of this service is accepted")
        return await self.caller_of_token(credentials)

    async def caller_of_request(self, headers: Headers) -> Caller:
        """Return the caller who sent these headers. Raises Unauthorized, ForeignOrigin, StoreUnavailable.

        Like `caller_of`, but refuses an anonymous request if a page of another site made a browser send it, or if it
        names another host, since a page can reach loopback too.
        """
        caller = await self.caller_of(header(headers, b"authorization"))
        if caller.name == ANONYMOUS:
            refuse_foreign_page(headers)
            self.refuse_remote_anonymous(headers)
        return caller

    def refuse_remote_anonymous(self, headers: Headers) -> None:
        """Raise ForeignOrigin for an anonymous caller who uses a name that is not this machine's, or a proxy."""
        if self._any_name:
            return
        refuse_foreign_name(header(headers, b"host"))
        if any(name in _PROXIED or name.startswith(b"x-forwarded-") for name in headers):
            # any machine may be calling the proxy, whatever Host says
            raise ForeignOrigin("without a token this service is called directly, not through a proxy (bide token add)")

    async def caller_of_token(self, token: str) -> Caller:
        """Return the owner of a bare token, as pasted into the login form. Raises Unauthorized, StoreUnavailable."""
        await self._refresh()
        shown = parse(token.strip())
        if shown is None:
            raise Unauthorized("this is not a token of this service: those are bide_, 8 characters, _ and 43 more")
        id, hashed = shown[0], hash_of(shown[1])
        known = self._same(id, hashed)
        if known is None and asyncio.get_running_loop().time() - self._read_at >= SOON:
            await asyncio.shield(self._begin())
            known = self._same(id, hashed)
        if known is None:
            raise Unauthorized("this token is not known here: it was revoked, mistyped, or made for another store")
        return self._still(*known)

    async def caller_by_id(self, id: str) -> Caller:
        """Return the owner of the token with this id, if it is still valid: for a session or a change begun with it.

        The anonymous caller keeps access while that is allowed. Raises Unauthorized; StoreUnavailable.
        """
        if id == ANONYMOUS:
            if not await self.anonymous_now():
                raise Unauthorized("a token is needed now; log in with one")
            return ANONYMOUS_CALLER
        await self._refresh()
        known = self._known.get(id)
        if known is None:
            raise Unauthorized("its token was revoked")
        return self._still(*known)

    @property
    def lasts(self) -> float:
        """Seconds for which the last reading of the tokens is still valid; then callers are checked again."""
        return self._read_at + FRESH - asyncio.get_running_loop().time()

    async def anonymous_now(self) -> bool:
        """Return True if callers without a token are accepted now."""
        await self._refresh()
        return self._anonymous and not self._any

    def _same(self, id: str, hashed: str) -> tuple[Token, Caller] | None:
        """Return the token with this id and secret. Takes as long for an unknown id as for a wrong secret."""
        known = self._known.get(id)
        same = hmac.compare_digest(hashed, _NO_HASH if known is None else known[0].hash)
        return known if same else None

    def _still(self, token: Token, caller: Caller) -> Caller:
        if token.expired(self._client.clock.now()):
            raise Unauthorized("this token has expired")
        return caller

    async def _refresh(self) -> None:
        """Make sure that the known tokens are at most `FRESH` seconds old."""
        asked = asyncio.get_running_loop().time()
        if asked - self._read_at >= AGE:
            self._begin()
        while asked - self._read_at >= FRESH:
            await asyncio.shield(self._begin())

    def _begin(self) -> asyncio.Task[None]:
        """Return the reading in progress, or start one. Only one runs at a time."""
        if self._reading is None:
            self._reading = asyncio.get_running_loop().create_task(self._read(), name="bide tokens")
            self._reading.add_done_callback(self._done)
        return self._reading

    def _done(self, reading: asyncio.Task[None]) -> None:
        self._reading = None
        error = None if reading.cancelled() else reading.exception()
        if error is not None and not self._failing:  # logged once, however many callers wait for it
            _log.warning("the tokens cannot be read: %s", error)
        self._failing = error is not None

    async def _read(self) -> None:
        began = asyncio.get_running_loop().time()
        damaged: set[str] = set()
        tokens = await Tokens(SettingsStore(self._client.store, self._client.clock)).all(damaged.add)
        for id in sorted(damaged - self._damaged):
            _log.error("the token %s cannot be read and is refused; revoke it and make another", id)
        self._damaged = damaged
        self._known = {
            token.id: (token, Caller(token.name, verbs=frozenset(token.verbs), topics=token.topics, id=token.id))
            for token in tokens
        }
        self._any = bool(tokens or damaged)
        self._read_at = began

    async def close(self) -> None:
        """Wait for the reading in progress."""
        if self._reading is not None:
            await asyncio.wait([self._reading])


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach a socket bound to `host`. The only accepted name is localhost."""
    if host.startswith("/") or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return False


def check_start(host: str, *, tokens: bool, insecure: bool = False) -> bool:
    """Return True if a service bound to `host` may accept anonymous callers: `Access(anonymous=)`.

    Raises SetupError if it must not start: reachable from other machines, without a token, and without `--insecure`.
    """
    if is_loopback(host) or insecure:
        return True
    if not tokens:
        raise SetupError(
            f"--host {host}: other machines could reach it, and without a token anybody could do anything; "
            "make one first (bide token add NAME), or bind to 127.0.0.1, or give --insecure"
        )
    return False


class ForeignOrigin(AccessRefused):
    """A page of another site sent this request, or it names a host that is not this service."""


def header(headers: Headers, name: bytes) -> str | None:
    """The value of a header, as text."""
    value = headers.get(name)
    return None if value is None else value.decode("latin-1")


def refuse_foreign_page(headers: Headers) -> None:
    """Raise ForeignOrigin if Host, Origin and Sec-Fetch-Site show that a page of another origin sent this.

    Call it for every change that is authenticated by a cookie or not at all. A bearer token needs no such check, since
    a page of another site does not have it.
    """
    host, origin = header(headers, b"host"), header(headers, b"origin")
    site = header(headers, b"sec-fetch-site")
    if site is not None:
        if site not in _OWN:
            raise ForeignOrigin("a page of another site sent this; open the console itself, or send a token")
        return
    if origin is not None:
        place = _place(origin)
        if place is None or host is None or place != _place(f"//{host}", origin):
            raise ForeignOrigin("a page of another origin sent this; open the console itself, or send a token")


def refuse_foreign_name(host: str | None) -> None:
    """Raise ForeignOrigin unless Host is a loopback address or localhost.

    For anonymous callers of a service on loopback. A request without Host does not come from a browser.
    """
    if host is not None and not is_loopback_name(host_name(host)):
        raise ForeignOrigin(
            "without a token this service is called by 127.0.0.1, [::1] or localhost only, not by that name"
        )


def is_loopback_name(name: str) -> bool:
    """Return True if `name`, as a browser sends it, can only be this machine; `*.localhost` is, by RFC 6761."""
    if name == "127.0.0.1":  # the common case: parsing an address is slow
        return True
    name = name.lower().removesuffix(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False


def host_name(host: str) -> str:
    """A Host header without its port."""
    name, colon, port = host.rpartition(":")
    return name if colon and port.isascii() and port.isdigit() and (":" not in name or name.endswith("]")) else host


def _place(url: str, like: str = "") -> str | None:
    """The host and port of an origin, without the default port; None for what is not a URL, such as `null`."""
    scheme, found, rest = url.partition("//")
    if not found or not rest or any(letter in rest for letter in "/?#@\\ "):
        return None
    scheme = (scheme or like.partition("//")[0]).removesuffix(":").lower()
    rest = rest.lower()
    usual = _PORTS.get(scheme)
    return rest.removesuffix(f":{usual}") if usual else rest


def networks_of(proxies: Iterable[str]) -> Networks:
    """Parse addresses and networks. Raises BadInput."""
    found = []
    for text in proxies:
        try:
            found.append(ipaddress.ip_network(text))
        except ValueError as error:
            raise BadInput("proxies", text, f"an address, or a network such as 10.1.0.0/16 ({error})") from None
    return found


def peer_of(client: str, forwarded: str | None, proxies: Networks) -> str:
    """Return the address of the caller: the client's or, behind `proxies`, the last one in X-Forwarded-For that is not
    a proxy's. A trusted proxy wrote that one. Text that is not an address is ignored."""
    named = [] if forwarded is None else forwarded.split(",")
    with suppress(ValueError):
        while named and proxies and any(ipaddress.ip_address(client) in network for network in proxies):
            client = str(ipaddress.ip_address(named.pop().strip()))
    return client


# --- sessions of the console

COOKIE = "bide_session"
CSRF_HEADER = "x-csrf-token"
CSRF_FIELD = "csrf"
LASTS: Millis = 12 * 3_600_000
"""How long a session lasts, if its token lasts as long."""
_COOKIE_FORM = re.compile(r"2\.([a-z0-9]{8,9})\.([A-Za-z0-9_-]{43})", re.ASCII)
_LONGEST_HEADER = 16_384
_MOST_KNOWN = 1_000
_OFTEN = (100, 0.1)
"""Sessions that one token may begin in a burst, and how many a second after it."""


class CsrfMismatch(AccessRefused):
    """A change that does not prove that a page of this session sent it."""


class Session(NamedTuple):
    """A logged-in viewer."""

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


def cookie_of(header: str | None) -> str | None:
    """The session cookie in a Cookie header; None also if there are several, since one of them was planted."""
    if header is None or len(header) > _LONGEST_HEADER:
        return None
    found = {value for name, _, value in (part.strip().partition("=") for part in header.split(";")) if name == COOKIE}
    return found.pop() if len(found) == 1 else None


def set_cookie(session: Session, now: Millis, *, host: str | None) -> str:
    """The value of Set-Cookie for a new session."""
    lasts = max(0, session.expires_at - now) // 1000
    return f"{COOKIE}={session.cookie}; Max-Age={lasts}; {_terms(host)}"


def clear_cookie(*, host: str | None) -> str:
    """The value of Set-Cookie for a logout."""
    return f"{COOKIE}=; Max-Age=0; {_terms(host)}"


def _terms(host: str | None) -> str:
    """The attributes of the cookie: never over plain HTTP, except on this machine, where nobody listens in between."""
    plain = host is not None and is_loopback_name(host_name(host))
    return f"Path=/; HttpOnly; SameSite=Strict{'' if plain else '; Secure'}"
