"""Tokens of callers: made, kept and revoked; and who calls, by the token that they show.

A token is `bide_<id>_<secret>`: the prefix lets scanners find leaked ones, the id says which it is, the secret is 32
random bytes. Only its SHA-256 is kept. That a fast hash is right here: what makes a password hash slow is there to make
guessing from a short list expensive; among 2^256 equally likely secrets no list is short, and whoever reads the hash
has nothing to try. A slow one would let a caller without a token spend the service's time instead.

The store is asked for all tokens at most once a second, whatever callers send: so guessing costs it nothing, and a
guess costs this process 2 us. Guessing is not throttled: at a million guesses a second, the 2^256 secrets of one token
would last far longer than the world. What is bounded is the log of refusals: see `audit`.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import logging
import math
import re
import secrets
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import msgspec
from msgspec import Struct

from bide.core.errors import BadInput, SetupError
from bide.core.instants import Millis
from bide.core.names import check_name
from bide.engine.client import Client
from bide.engine.kept import Kept
from bide.service.authz import (
    ALL_VERBS,
    ANONYMOUS,
    AccessRefused,
    Caller,
    Forbidden,
    Unauthorized,
    Verb,
    anonymous,
    check_pattern,
)
from bide.service.requests import refuse_foreign_name, refuse_foreign_page, refuse_proxied

PREFIX = "token:"
"""What the names of kept tokens begin with."""
MOST_PATTERNS = 100
LONGEST_TOKEN = 5 + 8 + 1 + 43
"""Characters of every token."""
USUAL = ALL_VERBS - {Verb.ADMIN}
"""What a token may do unless it is said."""

_FORM = re.compile(r"bide_([a-z0-9]{8})_([A-Za-z0-9_-]{43})", re.ASCII)
_ID = re.compile(r"[a-z0-9]{8}", re.ASCII)
_ID_LETTERS = string.ascii_lowercase + string.digits
_TRIES = 8
T = TypeVar("T")


class Token(Struct, frozen=True, kw_only=True):
    """A token as it is kept, in JSON: everything but the secret."""

    id: str
    name: str
    """Who calls with it: what the event log and the audit log call them."""
    hash: str
    """SHA-256 of the whole secret part, in hexadecimal."""
    verbs: tuple[Verb, ...]
    topics: tuple[str, ...]
    created_at: Millis
    expires_at: Millis | None = None
    created_by: str | None = None

    def expired(self, now: Millis) -> bool:
        return self.expires_at is not None and self.expires_at <= now


class Shown(NamedTuple):
    """What a caller sent, in two parts."""

    id: str
    secret: str


def parse(text: str) -> Shown | None:
    """The parts of a token; None when `text` does not have the form of one. O(1)."""
    if len(text) != LONGEST_TOKEN:
        return None
    found = _FORM.fullmatch(text)
    return None if found is None else Shown(found[1], found[2])


def hash_of(secret: str) -> str:
    """What is kept of a secret."""
    return hashlib.sha256(secret.encode()).hexdigest()


def check_id(value: str) -> str:
    """`value`, if it can be a token's id; a whole token is refused without being repeated. Raises BadInput."""
    if _ID.fullmatch(value):
        return value
    shown = "a whole token" if parse(value) is not None else value
    raise BadInput("ID", shown, "the 8 letters and digits that `bide token ls` shows")


def verbs_of(names: Iterable[str]) -> frozenset[Verb]:
    """The verbs of these names; `all` stands for every one, none at all for the usual ones. Raises BadInput."""
    found: set[Verb] = set()
    any_given = False
    for name in names:
        any_given = True
        if name == "all":
            found |= ALL_VERBS
        elif name in ALL_VERBS:
            found.add(Verb(name))
        else:
            raise BadInput("verb", name, f"all, or one of {', '.join(Verb)}")
    return frozenset(found) if any_given else USUAL


class Tokens:
    """The tokens that a store keeps."""

    def __init__(self, kept: Kept) -> None:
        self._kept = kept

    async def add(
        self,
        name: str,
        *,
        verbs: frozenset[Verb],
        topics: tuple[str, ...],
        now: Millis,
        expires_at: Millis | None = None,
        by: str | None = None,
    ) -> tuple[Token, str]:
        """Make a token; it, and the text that its owner is told, once. Raises BadInput, StoreFull."""
        check_name("name", name)
        if name == ANONYMOUS:
            raise BadInput("name", name, "another: so are called those who show no token")
        if not 1 <= len(topics) <= MOST_PATTERNS:
            raise BadInput("topic", f"{len(topics)} patterns", f"1 to {MOST_PATTERNS}")
        patterns = tuple(dict.fromkeys(check_pattern(topic) for topic in topics))
        if not verbs:
            raise BadInput("verb", None, f"at least one of {', '.join(Verb)}")
        if expires_at is not None and expires_at <= now:
            raise BadInput("expires", expires_at, "a time that is still to come")
        secret = secrets.token_urlsafe(32)
        for _ in range(_TRIES):
            token = Token(
                id="".join(secrets.choice(_ID_LETTERS) for _ in range(8)), name=name, hash=hash_of(secret),
                verbs=tuple(sorted(verbs, key=list(Verb).index)), topics=patterns, created_at=now,
                expires_at=expires_at, created_by=by,
            )  # fmt: skip
            if await self._kept.put_if_absent(PREFIX + token.id, msgspec.json.encode(token)):
                return token, f"bide_{token.id}_{secret}"
        raise AssertionError(f"{_TRIES} ids in a row are taken, of {len(_ID_LETTERS)}^8")

    async def all(self, damaged: Callable[[str], None] | None = None) -> list[Token]:
        """Every token, the oldest first, expired ones too. `damaged` is told the id of one that cannot be read."""
        found: list[Token] = []
        for name, value in (await self._kept.all(PREFIX)).items():
            try:
                found.append(msgspec.json.decode(value, type=Token))
            except msgspec.MsgspecError:
                if damaged is not None:
                    damaged(name.removeprefix(PREFIX))
        return sorted(found, key=lambda token: (token.created_at, token.id))

    async def revoke(self, id: str) -> bool:
        """Forget the token; whether there was one. Services refuse it within `access.FRESH` at the latest."""
        return await self._kept.remove(PREFIX + check_id(id))


__all__ = [
    "ALL_VERBS",
    "FRESH",
    "Access",
    "AccessRefused",
    "Caller",
    "Forbidden",
    "Unauthorized",
    "Verb",
    "check_start",
    "is_loopback",
]  # fmt: skip

_log = logging.getLogger("bide.access")
AGE = 2.0
"""Seconds after which the known tokens are read again, while they go on being used."""
SOON = 1.0
"""Seconds after which they are read again for a token that is not known: it may be new. Until then it is refused."""
FRESH = 5.0
"""Seconds that a token may still be good for after it was revoked: no older knowledge is used."""
_NOBODY = hash_of("")
"""What the secret of an unknown id is compared with, so that it takes as long as a wrong one."""


class _Entry(NamedTuple):
    hash: str
    caller: Caller
    expires_at: Millis | None


class Access:
    """Who may call. Belongs to the event loop in which `client` is open.

    `anonymous`: whether callers without a token are let in while the store holds none (what `check_start` returns).
    `any_name`: whether they may call this machine by any name; for a service that others reach, and `--insecure`.
    """

    def __init__(self, client: Client, *, anonymous: bool = False, any_name: bool = False) -> None:
        self._client = client
        self._anonymous = anonymous
        self._any_name = any_name
        self._known: dict[str, _Entry] = {}
        self._any = True
        self._read_at = -math.inf
        """When the reading began that `_known` comes from, by the loop's clock."""
        self._reading: asyncio.Task[None] | None = None
        self._damaged: set[str] = set()
        self._failing = False

    async def caller_of(self, authorization: str | None) -> Caller:
        """Who sent this Authorization header. Raises Unauthorized; StoreUnavailable when it cannot be known.

        No I/O while what is known of the tokens is young enough. Without a header it is anonymous where this was
        allowed and the store holds no token; whoever shows a token must show one that counts.
        """
        await self._refresh()
        if authorization is None:
            if self._anonymous and not self._any:
                return anonymous()
            raise Unauthorized("a token is needed: send the header 'Authorization: Bearer bide_...'", sent=False)
        scheme, _, credentials = authorization.partition(" ")
        if scheme.lower() != "bearer":
            raise Unauthorized("only 'Authorization: Bearer' followed by a token of this service is accepted")
        return await self._caller_with(credentials.strip(" "))

    async def caller_behind(self, headers: Mapping[bytes, bytes]) -> Caller:
        """Who sent the request with these headers. Raises Unauthorized, Foreign, StoreUnavailable.

        Like `caller_of`; but where nothing is shown, whatever a page of another site made a browser send is refused,
        and so is what calls this machine by another's name: a page reaches loopback too.
        """

        def header(name: bytes) -> str | None:
            value = headers.get(name)
            return None if value is None else value.decode("latin-1")

        caller = await self.caller_of(header(b"authorization"))
        if caller.name == ANONYMOUS:
            host = header(b"host")
            refuse_foreign_page(host=host, origin=header(b"origin"), site=header(b"sec-fetch-site"))
            self.refuse_from_beyond(host, headers)
        return caller

    def refuse_from_beyond(self, host: str | None, headers: Iterable[bytes]) -> None:
        """Raises Foreign where an anonymous caller calls this machine by a name that is not its own, or by a proxy."""
        if not self._any_name:
            refuse_foreign_name(host)
            refuse_proxied(headers)

    async def caller_with(self, token: str) -> Caller:
        """The same for a bare token, as somebody pasted it into a form. Raises Unauthorized."""
        await self._refresh()
        return await self._caller_with(token.strip())

    async def caller_by_id(self, id: str) -> Caller:
        """Who has the token of this id, if it still counts; for what was begun with it: a session, a change.

        Anonymous is who they were where that is still allowed. Raises Unauthorized; StoreUnavailable.
        """
        if id == ANONYMOUS:
            if not await self.anonymous_now():
                raise Unauthorized("a token is needed now; log in with one")
            return anonymous()
        await self._refresh()
        entry = self._known.get(id)
        if entry is None:
            raise Unauthorized("its token was revoked")
        return self._still(entry)

    @property
    def lasts(self) -> float:
        """Seconds for which what was last known of the tokens may be relied on; then callers are looked up anew."""
        return self._read_at + FRESH - asyncio.get_running_loop().time()

    async def anonymous_now(self) -> bool:
        """Whether whoever sends no token is let in at present."""
        await self._refresh()
        return self._anonymous and not self._any

    async def _caller_with(self, token: str) -> Caller:
        shown = parse(token)
        if shown is None:
            raise Unauthorized("this is not a token of this service: those are bide_, 8 characters, _ and 43 more")
        hashed = hash_of(shown.secret)
        entry = self._entry(shown.id, hashed)
        if entry is None and asyncio.get_running_loop().time() - self._read_at >= SOON:
            await asyncio.shield(self._begin())
            entry = self._entry(shown.id, hashed)
        if entry is None:
            raise Unauthorized("this token is not known here: it was revoked, mistyped, or made for another store")
        return self._still(entry)

    def _entry(self, id: str, hashed: str) -> _Entry | None:
        """The token of this id with this secret. Takes as long for an unknown id as for a wrong secret."""
        entry = self._known.get(id)
        same = hmac.compare_digest(hashed, _NOBODY if entry is None else entry.hash)
        return entry if same else None

    def _still(self, entry: _Entry) -> Caller:
        if entry.expires_at is not None and entry.expires_at <= self._client.clock.now():
            raise Unauthorized("this token has expired")
        return entry.caller

    async def _refresh(self) -> None:
        """Know the tokens as they were at most `FRESH` seconds ago, or when this was called."""
        asked = asyncio.get_running_loop().time()
        if asked - self._read_at >= AGE:
            self._begin()
        while asked - self._read_at >= FRESH:
            await asyncio.shield(self._begin())

    def _begin(self) -> asyncio.Task[None]:
        """The reading under way, or a new one: one at a time."""
        if self._reading is None:
            self._reading = asyncio.get_running_loop().create_task(self._read(), name="bide tokens")
            self._reading.add_done_callback(self._done)
        return self._reading

    def _done(self, reading: asyncio.Task[None]) -> None:
        self._reading = None
        error = None if reading.cancelled() else reading.exception()
        if error is not None and not self._failing:  # callers may come by the thousand: it is said once
            _log.warning("the tokens cannot be read: %s", error)
        self._failing = error is not None

    async def _read(self) -> None:
        began = asyncio.get_running_loop().time()
        damaged: set[str] = set()
        tokens = await Tokens(Kept(self._client.store, self._client.clock)).all(damaged.add)
        for id in sorted(damaged - self._damaged):
            _log.error("the token %s cannot be read and is refused; revoke it and make another", id)
        self._damaged = damaged
        self._known = {
            token.id: _Entry(
                token.hash,
                Caller(token.name, verbs=frozenset(token.verbs), topics=token.topics, id=token.id),
                token.expires_at,
            )
            for token in tokens
        }
        self._any = bool(tokens or damaged)
        self._read_at = began

    async def close(self) -> None:
        """Let a reading that is under way end."""
        if self._reading is not None:
            await asyncio.wait([self._reading])


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what is bound to `host`; a name other than localhost is not trusted to."""
    if host.startswith("/") or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return False


def check_start(hosts: Sequence[str], *, tokens: bool, insecure: bool = False) -> bool:
    """Whether a service bound to `hosts` may let anonymous callers in while there is no token: `Access(anonymous=)`.

    Raises SetupError when it must not start: bound beyond this machine, without a token, and not told `--insecure`.
    """
    beyond = [host for host in hosts if not is_loopback(host)]
    if not beyond:
        return True
    if insecure:
        return True
    if not tokens:
        raise SetupError(
            f"--host {beyond[0]}: others could reach this, and the store holds no token, so anybody could do anything; "
            "make one first (bide token add NAME), or bind to 127.0.0.1, or say --insecure"
        )
    return False
