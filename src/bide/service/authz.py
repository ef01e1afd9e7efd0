"""Authorization: verbs, topic patterns, the two refusals, and the tokens that grant access.

A pattern is a topic in which `*` stands for any characters, or none. Every other character stands for itself: `?` and
`[` are not wildcards, case matters, and nothing is decoded or normalised, since stores compare topics byte by byte too.
Matching never backtracks, so it costs at most (parts of the pattern) x (length of the topic).

A token is `bide_<id>_<secret>`: the prefix lets scanners find leaked tokens, the id names it, and the secret is 32
random bytes, of which only the SHA-256 is kept. A fast hash is right here. A password hash is slow to make guessing
from a short list expensive, but 2^256 equally likely secrets have no short list. A slow hash would only let callers
without a token waste the service's time.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import string
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple

import msgspec
from msgspec import Struct
from msgspec.structs import force_setattr, replace

from bide.core.answers import Answer
from bide.core.errors import BadInput, BideError
from bide.core.instants import Millis
from bide.core.names import LONGEST_NAME, RESERVED_TOPICS, check_name
from bide.core.records import Record, Result
from bide.engine.settings_store import SettingsStore


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
    if not isinstance(value, str):
        raise BadInput("topic", value, accepted)
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


class TokenParts(NamedTuple):
    """A token as it was sent, in two parts."""

    id: str
    secret: str


def parse(text: str) -> TokenParts | None:
    """The parts of a token; None if `text` does not have the form of a token. O(1)."""
    if len(text) != LONGEST_TOKEN:
        return None
    found = _FORM.fullmatch(text)
    return None if found is None else TokenParts(found[1], found[2])


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
