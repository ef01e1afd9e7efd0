"""Who calls the service, and what they may do: verbs, topic patterns, and the two refusals.

A pattern is a topic in which `*` stands for any characters, also none; every other character stands for itself alone:
`?` and `[` are no wildcards, case matters, and nothing is decoded or normalised, as stores compare topics byte by byte
too. Matching never goes back, so its cost is at most (parts of the pattern) x (length of the topic).
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import force_setattr, replace

from bide.core.answers import Answer
from bide.core.errors import BadInput, BideError
from bide.core.names import LONGEST_NAME, RESERVED_TOPICS, check_name
from bide.core.records import Record, Result

REALM = "bide"


class Verb(StrEnum):
    """What a caller may be allowed to do."""

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
    """The call is refused because of who makes it; what RFC 9457 and RFC 6750 want to know of that.

    Nothing in it comes from the credentials that were sent.
    """

    status: int
    title: str
    code: str | None
    """The error of RFC 6750 section 3.1; None when no credentials were sent, as the section asks."""

    def __init__(self, detail: str) -> None:
        self.detail = detail
        super().__init__(detail)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.detail,)

    @property
    def challenge(self) -> str:
        """The value of the WWW-Authenticate header."""
        parts = [f'realm="{REALM}"']
        if self.code is not None:
            parts += [f'error="{self.code}"', f'error_description="{_quotable(self.detail)}"']
        return f"Bearer {', '.join(parts)}"


class Unauthorized(AccessRefused):
    """It is not known who calls: no token, or none that counts."""

    status = 401
    title = "Unauthorized"

    def __init__(self, detail: str, *, sent: bool = True) -> None:
        self.code = "invalid_token" if sent else None
        super().__init__(detail)

    def __reduce__(self) -> tuple[object, ...]:
        return _again_unauthorized, (self.detail, self.code is not None)


class Forbidden(AccessRefused):
    """It is known who calls, and this is not among what they may do."""

    status = 403
    title = "Forbidden"
    code = "insufficient_scope"

    def __init__(self, verb: Verb, topic: str | None, who: str) -> None:
        self.verb = verb
        self.topic = topic = (
            topic if topic is None else topic[:LONGEST_NAME]
        )  # not checked yet: it may be of any length
        self.who = who
        what = "over all topics, which needs the pattern '*'" if topic is None else f"on topic {topic!r}"
        super().__init__(f"{who!r} may not {verb.value} {what}")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.verb, self.topic, self.who)


def _again_unauthorized(detail: str, sent: bool) -> Unauthorized:
    return Unauthorized(detail, sent=sent)


def _quotable(text: str) -> str:
    """What RFC 6750 lets stand in an error_description: printable ASCII without quotes and backslashes."""
    return "".join(letter if " " <= letter <= "~" and letter not in '"\\' else "'" for letter in text)


class Pattern(NamedTuple):
    """A pattern, cut up once."""

    first: str
    between: tuple[str, ...]
    last: str | None
    """What a topic must end with; None: there is no `*`, and the topic is `first`."""

    def matches(self, topic: str) -> bool:
        if self.last is None:
            return topic == self.first
        end = len(topic) - len(self.last)
        place = len(self.first)
        if place > end or not topic.startswith(self.first) or not topic.endswith(self.last):
            return False
        for part in self.between:  # the earliest place is as good as any later one
            found = topic.find(part, place, end)
            if found < 0:
                return False
            place = found + len(part)
        return True


def pattern_of(text: str) -> Pattern:
    """`text` cut up at its `*`."""
    parts = text.split("*")
    if len(parts) == 1:
        return Pattern(text, (), None)
    return Pattern(parts[0], tuple(part for part in parts[1:-1] if part), parts[-1])


def check_pattern(value: object, field: str = "topic") -> str:
    """`value`, if it can be a topic pattern. Raises BadInput."""
    accepted = f'a topic, in which * stands for any characters, such as "order.*": 1 to {LONGEST_NAME} bytes of text'
    if not isinstance(value, str):
        raise BadInput(field, value, accepted)
    try:
        text = check_name(field, value)
    except BadInput:
        raise BadInput(field, value, accepted) from None
    if text in RESERVED_TOPICS:
        raise BadInput(field, value, "a topic of your own: this one holds what is bide's own")
    return text


class Caller(Struct, frozen=True):
    """Who calls, and what they may do. Made once per token, asked at every call."""

    name: str
    verbs: frozenset[Verb] = ALL_VERBS
    topics: tuple[str, ...] = ("*",)
    """Patterns."""
    id: str = ""
    """Of the token that they show: it is who they are. Several may have one name."""
    _patterns: tuple[Pattern, ...] = ()
    _everywhere: bool = False

    def __post_init__(self) -> None:
        force_setattr(self, "_patterns", tuple(pattern_of(text) for text in self.topics))
        force_setattr(self, "_everywhere", any(text.strip("*") == "" and text for text in self.topics))

    def may(self, verb: Verb, topic: str | None) -> bool:
        """Whether they may do `verb` to tasks of `topic`; None: of all topics, which needs the pattern `*`.

        O(patterns). bide's own settings are nobody's.
        """
        if verb not in self.verbs or topic in RESERVED_TOPICS:
            return False
        if self._everywhere:
            return True
        return topic is not None and any(pattern.matches(topic) for pattern in self._patterns)

    def visible(self, records: Iterable[Record], verb: Verb = Verb.READ) -> list[Record]:
        """Of these, the tasks of topics to which they may do `verb`. What goes out as a list passes here: whatever else
        a store found, or a made-up cursor led to, goes to nobody."""
        return [record for record in records if self.may(verb, record.topic)]

    def seen(self, answer: Answer) -> Answer:
        """The answer to a verb of theirs, as they may see it: every answer passes here on its way out.

        Without `read` of the topic, the payload, the error and the options of a task are left out, unless this answer
        made this life of it: then they are what the caller has sent.
        """
        record = answer.record
        if record is None or answer.result in _MADE or self.may(Verb.READ, record.topic):
            return answer
        return replace(answer, record=replace(record, payload=b"", options=b"", error=None))

    def check(self, verb: Verb, topic: str | None) -> None:
        """Raises Forbidden unless they may."""
        if not self.may(verb, topic):
            raise Forbidden(verb, topic, self.name)

    def check_all(self, verb: Verb, topics: Iterable[str]) -> None:
        """The same for each topic of a batch: looks at each distinct one once."""
        if verb in self.verbs and self._everywhere:
            for topic in topics:
                if topic in RESERVED_TOPICS:
                    raise Forbidden(verb, topic, self.name)
            return
        for topic in set(topics):
            self.check(verb, topic)


ANONYMOUS = "anonymous"
_ANYBODY = Caller(ANONYMOUS, id=ANONYMOUS)


def anonymous() -> Caller:
    """Whoever it is, where that is allowed: everything."""
    return _ANYBODY
