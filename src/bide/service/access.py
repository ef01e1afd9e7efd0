"""Access: who calls, what a caller may do, foreign pages, refusals, and the audit log of changes.

A pattern is a topic in which `*` stands for any characters, or none. Every other character stands for itself: `?` and
`[` are not wildcards, case matters, and nothing is decoded or normalised, since stores compare topics byte by byte too.
Matching never backtracks, so it costs at most (parts of the pattern) x (length of the topic).

A token is `bide_<id>_<secret>`: the prefix lets scanners find leaked tokens, the id names it, and the secret is 32
random bytes, of which only the SHA-256 is kept (docs/security.md says why a fast hash is right). All tokens are read
from the store at most once a second, whatever callers send. So a guess costs the store nothing and this process 2 us,
and guesses are not throttled; only their log is.

Cross-site requests are detected by headers that browsers set and pages cannot change, in the order of Go's
`http.CrossOriginProtection`, which follows F. Valsorda's research ("Cross-Site Request Forgery", 2025): Sec-Fetch-Site
if present, else Origin against Host; a request with neither is not from a browser. These headers do not reveal DNS
rebinding, where the attacker's name resolves to this address, so that the browser sees one site. The name in Host does.

The audit log has one structured line for every change by a caller, and a limited number for refusals. Lines go to the
logger `bide.audit`: changes at INFO, refusals at WARNING. A line has its parts as extra fields (`who`, `verb`, `topic`,
`key`, `id`, `was`, `wake_at`, `answer`) for a formatter that writes JSON. Names cannot hold control characters, so no
caller can forge a line.
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
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import TypeAlias

import msgspec
from msgspec import Struct
from msgspec.structs import force_setattr, replace

from bide.core.answers import Answer
from bide.core.errors import BadInput, BideError, SetupError
from bide.core.instants import Millis, instant_text
from bide.core.names import LONGEST_NAME, RESERVED_TOPICS, check_name
from bide.core.records import Record, Result, Topic
from bide.engine.client import Client
from bide.engine.settings_store import SettingsStore

_log = logging.getLogger("bide.access")
_audit_log = logging.getLogger("bide.audit")

# --- callers, and what they may do


class Verb(StrEnum):
    """A kind of call that a token may allow."""

    SCHEDULE = "schedule"
    RESCHEDULE = "reschedule"
    FIRE = "fire"
    CANCEL = "cancel"
    REDRIVE = "redrive"
    SHIFT = "shift"
    READ = "read"
    WORK = "work"
    """Lease, settle, extend."""
    EVENTS = "events"
    METRICS = "metrics"
    ADMIN = "admin"


ALL_VERBS = frozenset(Verb)
_MADE = frozenset({Result.CREATED, Result.REPLACED})


class AccessRefused(BideError):
    """The call is refused because of its caller, with the fields that RFC 9457 and RFC 6750 require.

    Nothing in it comes from the sent credentials.
    """

    status = 403
    title = "Forbidden"
    code: str | None = None
    """The error of RFC 6750 section 3.1; None if no credentials were sent, as that section requires."""

    def __init__(self, detail: str) -> None:
        self.detail = detail
        super().__init__(detail)

    @property
    def challenge(self) -> str:
        parts = ['realm="bide"']
        if self.code is not None:
            parts += [f'error="{self.code}"', f'error_description="{_quotable(self.detail)}"']
        return f"Bearer {', '.join(parts)}"


class Unauthorized(AccessRefused):
    """The caller is not authenticated: no token, or not a valid one."""

    status = 401
    title = "Unauthorized"

    def __init__(self, detail: str, *, sent: bool = True) -> None:
        self.code = "invalid_token" if sent else None
        super().__init__(detail)


class Forbidden(AccessRefused):
    """The caller is authenticated, but has no access to this."""

    code = "insufficient_scope"

    def __init__(self, verb: Verb, topic: str | None, who: str) -> None:
        self.verb = verb
        self.topic = topic = None if topic is None else topic[:LONGEST_NAME]  # unchecked, so of any length
        self.who = who
        everywhere = "over all topics: the token lacks the verb, or the pattern '*'"
        where = everywhere if topic is None else f"on topic {topic!r}"
        super().__init__(f"{who!r} may not {verb.value} {where}")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.verb, self.topic, self.who)


def _quotable(text: str) -> str:
    """Keep only what RFC 6750 allows in an error_description: printable ASCII without quotes and backslashes."""
    return "".join(letter if " " <= letter <= "~" and letter not in '"\\' else "'" for letter in text)


def _expression(pattern: str) -> str:
    """The regular expression of a topic pattern. Each part between two `*` takes its earliest match for good."""
    first, *between = map(re.escape, pattern.split("*"))
    last = f".*{between.pop()}" if between else ""
    return first + "".join(f"(?>.*?{part})" for part in between) + last


def check_pattern(value: object) -> str:
    """Return `value` if it can be a topic pattern. Raises BadInput."""
    accepted = f'a topic, in which * stands for any characters, such as "order.*": 1 to {LONGEST_NAME} bytes of text'
    try:
        text = check_name("topic", value)
    except BadInput:
        raise BadInput("topic", value, accepted) from None
    if text in RESERVED_TOPICS:
        raise BadInput("topic", value, "another topic: this one is reserved for bide")
    return text


class Caller(Struct, frozen=True):
    """A caller and their access. Made once per token, used at every call."""

    name: str
    verbs: frozenset[Verb] = ALL_VERBS
    topics: tuple[str, ...] = ("*",)
    id: str = ""
    """The id of their token, which identifies them. Several callers may have one name."""
    _admits: Callable[[str], object] = re.compile("").fullmatch
    _everywhere: bool = False

    def __post_init__(self) -> None:
        expression = "|".join(map(_expression, self.topics)) if self.topics else "(?!)"
        force_setattr(self, "_admits", re.compile(expression, re.DOTALL).fullmatch)
        force_setattr(self, "_everywhere", any(text.strip("*") == "" and text for text in self.topics))

    def may(self, verb: Verb, topic: str | None) -> bool:
        """Return True if the caller may use `verb` on tasks of `topic`; None: of all, which needs the pattern `*`.

        O(patterns x topic). No caller has access to the topics reserved for bide.
        """
        if verb not in self.verbs or topic in RESERVED_TOPICS:
            return False
        if self._everywhere:
            return True
        return topic is not None and self._admits(topic) is not None

    def visible(self, records: Iterable[Record], verb: Verb = Verb.READ) -> list[Record]:
        """The records of topics on which the caller may use `verb`. Every list passes here before it is sent, so that
        no other record that a store found, or to which a forged cursor led, is sent."""
        return [record for record in records if self.may(verb, record.topic)]

    def seen(self, answer: Answer, *, sent: bool = True) -> Answer:
        """The part of an answer that the caller may see. Every answer passes here before it is sent.

        Without `read` on the topic, a task lacks its payload, error and options, unless this answer created this life:
        then they are the ones the caller sent. `sent`: False for a verb that sends none.
        """
        record = answer.record
        if record is None or (sent and answer.result in _MADE) or self.may(Verb.READ, record.topic):
            return answer
        return replace(answer, record=replace(record, payload=b"", options=b"", error=None))

    def check(self, verb: Verb, topic: str | None) -> None:
        """Raise Forbidden unless the caller may use `verb` on `topic`."""
        if not self.may(verb, topic):
            raise Forbidden(verb, topic, self.name)

    def check_somewhere(self, verb: Verb) -> None:
        """Raise Forbidden if the caller may use `verb` on no topic at all. The topics are checked for each task."""
        if verb not in self.verbs or not self.topics:
            raise Forbidden(verb, None, self.name)

    def check_all(self, verb: Verb, topics: Iterable[str | None]) -> None:
        """Raise Forbidden unless the caller may use `verb` on each topic of a batch; check each distinct topic once."""
        if verb in self.verbs and self._everywhere:
            for topic in topics:
                if topic in RESERVED_TOPICS:
                    raise Forbidden(verb, topic, self.name)
            return
        for topic in set(topics):
            self.check(verb, topic)


ANONYMOUS = "anonymous"
ANONYMOUS_CALLER = Caller(ANONYMOUS, id=ANONYMOUS)
"""A caller without a token, if that is allowed. This caller has access to everything."""


# --- tokens

PREFIX = "token:"
MOST_PATTERNS = 100
LONGEST_TOKEN = 5 + 8 + 1 + 43
DEFAULT_VERBS = ALL_VERBS - {Verb.ADMIN}
"""The verbs of a token that is made without any."""

_FORM = re.compile(r"bide_([a-z0-9]{8})_([A-Za-z0-9_-]{43})", re.ASCII)
_ID = re.compile(r"[a-z0-9]{8}", re.ASCII)
_ID_LETTERS = string.ascii_lowercase + string.digits
_TRIES = 8


class Token(Struct, frozen=True, kw_only=True):
    """A token in the form that the store keeps, in JSON: everything but the secret."""

    id: str
    name: str
    """The name of its owner in the event log and the audit log."""
    hash: str
    """SHA-256 of the whole secret part, in hexadecimal."""
    verbs: tuple[Verb, ...]
    topics: tuple[str, ...]
    created_at: Millis
    expires_at: Millis | None = None
    created_by: str | None = None

    def expired(self, now: Millis) -> bool:
        return self.expires_at is not None and self.expires_at <= now


def parse(text: str) -> tuple[str, str] | None:
    """The id and the secret of a token; None if `text` does not have the form of a token. O(1)."""
    if len(text) != LONGEST_TOKEN:
        return None
    found = _FORM.fullmatch(text)
    return None if found is None else (found[1], found[2])


def hash_of(secret: str) -> str:
    """The hash of a secret, which is what the store keeps."""
    return hashlib.sha256(secret.encode()).hexdigest()


def check_id(value: str) -> str:
    """Return `value` if it can be the id of a token. Raises BadInput, which does not repeat a whole token."""
    if _ID.fullmatch(value):
        return value
    shown = "a whole token" if parse(value) is not None else value
    raise BadInput("ID", shown, "the 8 letters and digits that `bide token ls` shows")


def verbs_of(names: Iterable[str]) -> frozenset[Verb]:
    """The verbs of these names; `all` means every verb, no name the default ones. Raises BadInput."""
    given = list(names)
    for name in given:
        if name not in ("all", *Verb):
            raise BadInput("verb", name, f"all, or one of {', '.join(Verb)}")
    if "all" in given:
        return ALL_VERBS
    return frozenset(map(Verb, given)) or DEFAULT_VERBS


class Tokens:
    def __init__(self, kept: SettingsStore) -> None:
        self._kept = kept

    async def add(
        self, name: str, *, verbs: frozenset[Verb], topics: tuple[str, ...], now: Millis,
        expires_at: Millis | None = None, by: str | None = None,
    ) -> tuple[Token, str]:  # fmt: skip
        """Make a token; return it with its text, which is shown this once. Raises BadInput, StoreFull."""
        check_name("name", name)
        if name == ANONYMOUS:
            raise BadInput("name", name, "another name: this one is for callers without a token")
        if not 1 <= len(topics) <= MOST_PATTERNS:
            raise BadInput("topic", f"{len(topics)} patterns", f"1 to {MOST_PATTERNS}")
        patterns = tuple(dict.fromkeys(check_pattern(topic) for topic in topics))
        if not verbs:
            raise BadInput("verb", None, f"at least one of {', '.join(Verb)}")
        if expires_at is not None and expires_at <= now:
            raise BadInput("expires", expires_at, "a time in the future")
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
        """All tokens, oldest first, including expired ones. `damaged` is called with the id of each unreadable one."""
        found: list[Token] = []
        for name, value in (await self._kept.all(PREFIX)).items():
            try:
                found.append(msgspec.json.decode(value, type=Token))
            except msgspec.MsgspecError:
                if damaged is not None:
                    damaged(name.removeprefix(PREFIX))
        return sorted(found, key=lambda token: (token.created_at, token.id))

    async def revoke(self, id: str) -> bool:
        """Remove the token; return True if there was one. Services refuse it within `FRESH` seconds."""
        return await self._kept.remove(PREFIX + check_id(id))


# --- the caller of a request

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
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
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


# --- pages and hosts that are not this service's

_OWN = frozenset({"same-origin", "none"})
"""`none` is the user: a typed address, a bookmark. `same-site`, another port or subdomain, is not trusted."""
_PROXIED = frozenset({b"forwarded", b"via", b"x-real-ip"})
_PORTS = {"http": "80", "https": "443"}


class ForeignOrigin(AccessRefused):
    """A page of another site sent this request, or it names a host that is not this service."""


def header(headers: Headers, name: bytes) -> str | None:
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
    if host is not None and not is_loopback_name(host):
        raise ForeignOrigin(
            "without a token this service is called by 127.0.0.1, [::1] or localhost only, not by that name"
        )


def is_loopback_name(host: str) -> bool:
    """Return True if a Host header can only name this machine; `*.localhost` does, by RFC 6761."""
    name, colon, port = host.rpartition(":")
    if not (colon and port.isascii() and port.isdigit() and (":" not in name or name.endswith("]"))):
        name = host
    if name == "127.0.0.1":  # the common case: parsing an address is slow
        return True
    name = name.lower().removesuffix(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False


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


# --- the audit log

_CHANGED = frozenset({Result.REPLACED, Result.MOVED, Result.CANCELLED, Result.CANCELLED_WHILE_LEASED, Result.REDRIVEN})


def audit(verb: str, answers: Sequence[Answer], who: str) -> None:
    """Write a line for each task that `verb` changed, and one line for all that it created. For `acting_as`.

    Answers that mean no change (`under_way`, `not_found`, `kept`, ...) get no line.
    """
    if not _audit_log.isEnabledFor(logging.INFO):
        return
    created = [answer.record for answer in answers if answer.result is Result.CREATED and answer.record is not None]
    noted = _CHANGED if len(created) > 1 else _CHANGED | {Result.CREATED}
    for answer in answers:
        record = answer.record
        if record is not None and answer.result in noted:
            _audit_log.info(
                "%s: %s %s/%s: %s", who, verb, record.topic, record.key, answer.result.value,
                extra={
                    "who": who, "verb": verb, "topic": record.topic, "key": record.key, "id": record.id,
                    "was": None if answer.was is None else instant_text(answer.was),
                    "wake_at": instant_text(record.wake_at) if record.state.live else None,
                    "answer": answer.result.value,
                },
            )  # fmt: skip
    if len(created) > 1:
        topics = dict(Counter(record.topic for record in created))
        _audit_log.info(
            "%s: %s %d tasks of %s: created", who, verb, len(created), ", ".join(topics),
            extra={
                "who": who, "verb": verb, "count": len(created), "topics": topics, "answer": Result.CREATED.value,
            },
        )  # fmt: skip


def audit_pause(who: str, verb: str, topic: Topic, answer: str) -> None:
    """Write a line for a pause or a resume of a topic."""
    _audit_log.info(
        "%s: %s %s: %s", who, verb, topic, answer,
        extra={"who": who, "verb": verb, "topic": topic, "key": None, "answer": answer},
    )  # fmt: skip


def audit_unknown(who: str, verb: str, topic: str | None = None, key: str | None = None) -> None:
    """Write a line for a change whose answer was lost (OutcomeUnknown): it may have been done."""
    _audit_log.warning(
        "%s: %s %s: the outcome is unknown", who, verb, "many" if key is None else f"{topic}/{key}",
        extra={"who": who, "verb": verb, "topic": topic, "key": key, "answer": "unknown"},
    )  # fmt: skip


class Refusals:
    """Log lines for refusals, limited so that refused callers cannot fill a disk.

    From one peer under one name: a burst of ten, then one every ten seconds. In all: a burst of a hundred, then one a
    second, 86,400 lines a day. The next line that is written says how many were left out.
    """

    OF_ONE = (10, 0.1)
    """The burst, and the lines a second after it, from one peer under one name."""
    IN_ALL = (100, 1.0)
    MOST_PEERS = 1_000
    """The number of tracked peers; the one that has been quiet for longest is dropped first."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._all = TokenBucket(*self.IN_ALL, clock())
        self._peers: OrderedDict[tuple[str, str], TokenBucket] = OrderedDict()
        self._left_out = 0

    def note(self, error: AccessRefused, peer: str) -> None:
        """Log that a caller at `peer` (an address) was refused, within the limits."""
        now = self._clock()
        who = error.who if isinstance(error, Forbidden) else ""
        place = (network_of(peer), who)
        bucket = self._peers.get(place)
        if bucket is None:
            bucket = self._peers[place] = TokenBucket(*self.OF_ONE, now)
            if len(self._peers) > self.MOST_PEERS:
                self._peers.popitem(last=False)
        else:
            self._peers.move_to_end(place)
        if not bucket.take(now) or not self._all.take(now):
            self._left_out += 1
            return
        left_out, self._left_out = self._left_out, 0
        _audit_log.warning(
            "refused %s: %s%s", peer, error.detail, f" ({left_out} more were not logged)" if left_out else "",
            extra={
                "who": who or None, "peer": peer, "answer": error.title.lower(), "left_out": left_out,
                "verb": error.verb.value if isinstance(error, Forbidden) else None,
                "topic": error.topic if isinstance(error, Forbidden) else None,
            },
        )  # fmt: skip


class TokenBucket:
    """A token bucket: holds at most `most` tokens, and gains `rate` a second."""

    __slots__ = ("_at", "_left", "_most", "_rate")

    def __init__(self, most: float, rate: float, now: float) -> None:
        self._most = most
        self._rate = rate
        self._left = float(most)
        self._at = now

    def take(self, now: float, wanted: int = 1) -> int:
        """Take up to `wanted` tokens, and return how many there were."""
        self._left = min(self._most, self._left + max(0.0, now - self._at) * self._rate)
        self._at = now
        taken = min(wanted, int(self._left))
        self._left -= taken
        return taken


class EventQuota:
    """Limits the number of events of each caller, since the event log holds some 10,000 in total."""

    MOST, A_SECOND = 2_000, 20.0

    def __init__(self) -> None:
        self._all: dict[str, TokenBucket] = {}

    def take(self, who: str, wanted: int = 1) -> int:
        """The number of the `wanted` events that the caller may write now."""
        now = time.monotonic()
        return self._all.setdefault(who, TokenBucket(self.MOST, self.A_SECOND, now)).take(now, wanted)


def network_of(peer: str) -> str:
    """The network that belongs to one party: a single IPv4 address, or an IPv6 /64."""
    try:
        address = ipaddress.ip_address(peer.partition("%")[0])
    except ValueError:
        return peer
    if isinstance(address, ipaddress.IPv6Address):
        mapped = address.ipv4_mapped
        return str(mapped) if mapped else str(ipaddress.ip_network((address, 64), strict=False))
    return str(address)


audit_refused = Refusals().note
"""One for the process, like the logger."""
