"""Authorization: verbs, topic patterns, refusals, the tokens that grant access, and the audit log of its use.

A pattern is a topic in which `*` stands for any characters, or none. Every other character stands for itself: `?` and
`[` are not wildcards, case matters, and nothing is decoded or normalised, since stores compare topics byte by byte too.
Matching never backtracks, so it costs at most (parts of the pattern) x (length of the topic).

A token is `bide_<id>_<secret>`: the prefix lets scanners find leaked tokens, the id names it, and the secret is 32
random bytes, of which only the SHA-256 is kept. A fast hash is right here. A password hash is slow to make guessing
from a short list expensive, but 2^256 equally likely secrets have no short list. A slow hash would only let callers
without a token waste the service's time.

The audit log has one structured line for every change by a caller, and a limited number for refusals. Lines go to the
logger `bide.audit`: changes at INFO, refusals at WARNING. A line has its parts as extra fields (`who`, `verb`, `topic`,
`key`, `id`, `was`, `wake_at`, `answer`) for a formatter that writes JSON. Names cannot hold control characters, so no
caller can forge a line.
"""

from __future__ import annotations

import hashlib
import ipaddress
import logging
import re
import secrets
import string
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum

import msgspec
from msgspec import Struct
from msgspec.structs import force_setattr, replace

from bide.core.answers import Answer
from bide.core.errors import BadInput, BideError
from bide.core.instants import Millis, instant_text
from bide.core.names import LONGEST_NAME, RESERVED_TOPICS, check_name
from bide.core.records import Record, Result, Topic
from bide.engine.settings_store import SettingsStore

_log = logging.getLogger("bide.audit")


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
        """The value of the WWW-Authenticate header."""
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
        what = "over all topics, which needs the pattern '*'" if topic is None else f"on topic {topic!r}"
        super().__init__(f"{who!r} may not {verb.value} {what}")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.verb, self.topic, self.who)


def _quotable(text: str) -> str:
    """Keep only what RFC 6750 allows in an error_description: printable ASCII without quotes and backslashes."""
    return "".join(letter if " " <= letter <= "~" and letter not in '"\\' else "'" for letter in text)


def matches(parts: Sequence[str], topic: str) -> bool:
    """Return True if a topic matches a pattern that was split at its `*`."""
    first, *between = parts
    if not between:
        return topic == first
    last = between.pop()
    place, end = len(first), len(topic) - len(last)
    if place > end or not topic.startswith(first) or not topic.endswith(last):
        return False
    for part in between:  # the earliest match is as good as a later one
        found = topic.find(part, place, end)
        if found < 0:
            return False
        place = found + len(part)
    return True


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
    """Patterns."""
    id: str = ""
    """The id of their token, which identifies them. Several callers may have one name."""
    _patterns: tuple[Sequence[str], ...] = ()
    _everywhere: bool = False

    def __post_init__(self) -> None:
        force_setattr(self, "_patterns", tuple(text.split("*") for text in self.topics))
        force_setattr(self, "_everywhere", any(text.strip("*") == "" and text for text in self.topics))

    def may(self, verb: Verb, topic: str | None) -> bool:
        """Return True if the caller may use `verb` on tasks of `topic`; None: of all, which needs the pattern `*`.

        O(patterns). No caller has access to the topics reserved for bide.
        """
        if verb not in self.verbs or topic in RESERVED_TOPICS:
            return False
        if self._everywhere:
            return True
        return topic is not None and any(matches(pattern, topic) for pattern in self._patterns)

    def visible(self, records: Iterable[Record], verb: Verb = Verb.READ) -> list[Record]:
        """The records of topics on which the caller may use `verb`. Every list passes here before it is sent, so that
        no other record that a store found, or to which a forged cursor led, is sent."""
        return [record for record in records if self.may(verb, record.topic)]

    def seen(self, answer: Answer) -> Answer:
        """The part of an answer that the caller may see. Every answer passes here before it is sent.

        Without `read` on the topic, a task lacks its payload, error and options, unless this answer created this life:
        then they are the ones the caller sent.
        """
        record = answer.record
        if record is None or answer.result in _MADE or self.may(Verb.READ, record.topic):
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

    def check_all(self, verb: Verb, topics: Iterable[str]) -> None:
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

PREFIX = "token:"
"""The prefix of the names of kept tokens."""
MOST_PATTERNS = 100
LONGEST_TOKEN = 5 + 8 + 1 + 43
"""Characters of every token."""
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
    """The tokens that a store keeps."""

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
        """Remove the token; return True if there was one. Services refuse it within `access.FRESH` seconds."""
        return await self._kept.remove(PREFIX + check_id(id))


# --- the audit log

_CHANGED = frozenset({Result.REPLACED, Result.MOVED, Result.CANCELLED, Result.CANCELLED_WHILE_LEASED, Result.REDRIVEN})


def audit(verb: str, answers: Sequence[Answer], who: str) -> None:
    """Write a line for each task that `verb` changed, and one line for all that it created. For `acting_as`.

    Answers that mean no change (`under_way`, `not_found`, `kept`, ...) get no line.
    """
    if not _log.isEnabledFor(logging.INFO):
        return
    created = [answer.record for answer in answers if answer.result is Result.CREATED and answer.record is not None]
    noted = _CHANGED if len(created) > 1 else _CHANGED | {Result.CREATED}
    for answer in answers:
        record = answer.record
        if record is not None and answer.result in noted:
            _log.info(
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
        _log.info(
            "%s: %s %d tasks of %s: created", who, verb, len(created), ", ".join(topics),
            extra={
                "who": who, "verb": verb, "count": len(created), "topics": topics, "answer": Result.CREATED.value,
            },
        )  # fmt: skip


def audit_pause(who: str, verb: str, topic: Topic, answer: str) -> None:
    """Write a line for a pause or a resume of a topic."""
    _log.info(
        "%s: %s %s: %s", who, verb, topic, answer,
        extra={"who": who, "verb": verb, "topic": topic, "key": None, "answer": answer},
    )  # fmt: skip


def audit_unknown(who: str, verb: str, topic: str | None = None, key: str | None = None) -> None:
    """Write a line for a change whose answer was lost (OutcomeUnknown): it may have been done."""
    _log.warning(
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
        _log.warning(
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
