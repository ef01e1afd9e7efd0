"""What comes over the wire of the store calls is looked at, all of it, before any of it reaches a store.

The library checks its callers at its public verbs and trusts what is below. Here whoever has a token can send any
record that MessagePack can hold, so every field is checked again: names, instants, lengths, tokens, ids, options. Whole
columns are looked at in one go where that is possible; the one that is wrong is searched for only when there is one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence, Sized
from functools import lru_cache

import msgspec

from bide.core.errors import BadInput
from bide.core.events import Event
from bide.core.instants import LAST_INSTANT, Millis
from bide.core.names import LONGEST_NAME, check_name, check_topic
from bide.core.options import LONGEST_HEADERS, decode_options
from bide.core.records import (
    Cancel,
    Change,
    Due,
    Filter,
    In,
    Lease,
    Move,
    NewTask,
    Redrive,
    Ref,
    Settlement,
    Token,
    Topic,
    Verdict,
)
from bide.core.retry import FOREVER
from bide.engine.history import MINUTE
from bide.engine.throughput import MINUTES
from bide.ports.wire import MOST
from bide.service.asks import LONGEST_LEASE, SHORTEST_LEASE

LONGEST_ERROR = 8_192
"""Characters that the error of an outcome may have with its trace, or an event."""
_LONGEST_OPTIONS = 2 * LONGEST_HEADERS
_LAST_TOKEN = 2**63 - 1
_DIGITS = "[0-9a-f]"
_ID = re.compile(f"{_DIGITS}{{8}}-{_DIGITS}{{4}}-{_DIGITS}{{4}}-{_DIGITS}{{4}}-{_DIGITS}{{12}}")
_IDS = re.compile(f"(?:{_ID.pattern})*")
_ID_ACCEPTED = "a UUID in canonical text, 36 characters in lower case"
_INSTANT = "milliseconds since the epoch, within the years 1970 to 9999"
_LENGTH = "milliseconds that end before the year 10000"


def check_tasks(tasks: Sequence[NewTask], payload_limit: int, *, options: bool = True) -> None:
    """Raises BadInput. Without `options` these may be any bytes."""
    check_topics(task.topic for task in tasks)
    check_names("key", [task.key for task in tasks])
    check_names("group", [task.group for task in tasks if task.group is not None])
    check_ids([task.id for task in tasks])
    check_dues(task.due for task in tasks)
    for task in tasks:
        if len(task.payload) > payload_limit:
            raise BadInput("payload", f"{len(task.payload)} bytes", f"at most {payload_limit} bytes")
        if task.deadline is not None:
            check_millis("deadline", task.deadline)
        if task.options and options:
            _check_options(task.options)


def check_changes(changes: Sequence[Change]) -> None:
    check_topics(change.topic for change in changes)
    check_names("key", [change.key for change in changes])
    check_dues(change.due for change in changes if not isinstance(change, Cancel))
    check_ids([change.id for change in changes if isinstance(change, Redrive)])
    check_tokens([change.if_token for change in changes if change.if_token is not None])
    for change in changes:
        if isinstance(change, Cancel):
            check_millis("keep_until", change.keep_until)
        elif isinstance(change, Move) and change.deadline is not None:
            check_millis("deadline", change.deadline)


def check_settlements(outcomes: Sequence[Settlement]) -> None:
    check_topics(one.topic for one in outcomes)
    check_names("key", [one.key for one in outcomes])
    check_tokens([one.token for one in outcomes])
    check_dues((one.wake for one in outcomes if one.wake is not None), "wake")
    for one in outcomes:
        if one.wake is None:
            if one.verdict is Verdict.RETRY or one.verdict is Verdict.DEFER:
                raise BadInput("wake", None, f"an instant or a length: {one.verdict.value} needs one")
        elif one.verdict is Verdict.DONE:
            check_ids([one.next_id], "next_id")
        if one.keep_until:
            check_millis("keep_until", one.keep_until)
        if one.error is not None:
            check_text("error", one.error)


def check_leases(leases: Sequence[Lease]) -> None:
    check_topics(lease.topic for lease in leases)
    check_names("key", [lease.key for lease in leases])
    check_tokens([lease.token for lease in leases])


def check_refs(refs: Sequence[Ref]) -> None:
    check_count("refs", refs)
    check_topics(ref.topic for ref in refs)
    check_names("key", [ref.key for ref in refs])


def check_minutes(first: int, last: int) -> tuple[int, int]:
    if not 0 <= first <= last < first + MINUTES or last > LAST_INSTANT // MINUTE:
        raise BadInput("minutes", (first, last), f"minutes since the epoch, at most {MINUTES} of them")
    return first, last


def check_wants(wants: Mapping[Topic, int]) -> None:
    check_count("wants", wants)
    check_topics(wants)
    for topic, want in wants.items():
        if not 0 <= want <= MOST:
            raise BadInput(f"wants[{topic!r}]", want, f"a number from 0 to {MOST}")
    if sum(wants.values()) > MOST:
        raise BadInput("wants", sum(wants.values()), f"at most {MOST} in all")


def check_filter(where: Filter) -> None:
    if where.topic is not None:
        check_topic(where.topic)
    if where.group is not None:
        check_name("group", where.group)
    for field, edge in (("wake_from", where.wake_from), ("wake_before", where.wake_before)):
        if edge is not None:
            check_edge(field, edge)


def check_events(events: Sequence[Event]) -> None:
    check_count("events", events)
    check_topics(event.topic for event in events)
    check_names("key", [event.key for event in events])
    check_ids([event.id for event in events if event.id])
    for event in events:
        check_millis("at", event.at)
        check_text("what", event.what)
        if event.who is not None:
            check_text("who", event.who, LONGEST_NAME)
        if not 0 <= event.attempt <= FOREVER:
            raise BadInput("attempt", event.attempt, f"a number from 0 to {FOREVER}")
        for field, edge in (("was", event.was), ("wake_at", event.wake_at)):
            if edge is not None:
                check_edge(field, edge)


# --- one field of many


def check_count(field: str, items: Sized) -> None:
    if len(items) > MOST:
        raise BadInput(field, f"{len(items)} items", f"at most {MOST} in one call")


def check_topics(topics: Iterable[Topic]) -> None:
    """Each distinct one is looked at once. Raises BadInput, also for the topic that holds bide's own settings."""
    for topic in set(topics):
        check_topic(topic)


def check_names(field: str, names: Sequence[str]) -> None:
    if not names:
        return
    text = "".join(names)
    if text.isascii() and text.isprintable() and all(names) and len(max(names, key=len)) <= LONGEST_NAME:
        return
    for name in names:
        check_name(field, name)


def check_ids(ids: Sequence[str], field: str = "id") -> None:
    if {*map(len, ids)} <= {36} and _IDS.fullmatch("".join(ids)):
        return
    for one in ids:
        if not _ID.fullmatch(one):
            raise BadInput(field, one, _ID_ACCEPTED)


def check_tokens(tokens: Sequence[Token]) -> None:
    if tokens and not (min(tokens) >= 0 and max(tokens) <= _LAST_TOKEN):
        wrong = next(token for token in tokens if not 0 <= token <= _LAST_TOKEN)
        raise BadInput("token", wrong, f"a token: a number from 0 to {_LAST_TOKEN}")


def check_dues(dues: Iterable[Due], field: str = "due") -> None:
    """What lies before 1970 is due at once, and nothing lies beyond the last instant: the stores see to that."""
    for due in dues:
        if not -LAST_INSTANT <= due.millis <= LAST_INSTANT:
            raise BadInput(field, due.millis, _LENGTH if isinstance(due, In) else _INSTANT)


def check_millis(field: str, millis: Millis) -> None:
    if not 0 <= millis <= LAST_INSTANT:
        raise BadInput(field, millis, _INSTANT)


def check_edge(field: str, millis: Millis) -> None:
    """An instant that nothing has to lie at: also one before 1970."""
    if not -LAST_INSTANT <= millis <= LAST_INSTANT:
        raise BadInput(field, millis, _INSTANT)


def check_lasts(lasts: Millis) -> None:
    """How long a lease is held, or a worker is taken to live."""
    if not 0 <= lasts <= LAST_INSTANT:
        raise BadInput("lasts", lasts, _LENGTH)


def lease_length(lasts: Millis) -> Millis:
    """How long a lease is held: as over the calls for other languages, at least a second. Raises BadInput."""
    check_lasts(lasts)
    if lasts > 1_000 * LONGEST_LEASE:
        raise BadInput("lasts", lasts, f"milliseconds: at most {1_000 * LONGEST_LEASE}, which are 24 hours")
    return max(lasts, 1_000 * SHORTEST_LEASE)


def check_text(field: str, text: str, longest: int = LONGEST_ERROR) -> None:
    if len(text) > longest:
        raise BadInput(field, f"{len(text)} characters", f"at most {longest} characters")


# --- options


@lru_cache(maxsize=1024)
def _check_options(options: bytes) -> None:
    """Cached, since the tasks of a topic have mostly the same. Raises BadInput, which is not cached."""
    if len(options) > _LONGEST_OPTIONS:
        raise BadInput("options", f"{len(options)} bytes", f"at most {_LONGEST_OPTIONS} bytes")
    try:
        read = decode_options(options)
    except msgspec.DecodeError as error:
        raise BadInput("options", options[:60], f"what bide encodes ({error})") from None
    if sum(map(len, read.headers)) + sum(map(len, read.headers.values())) > LONGEST_HEADERS:
        raise BadInput("headers", f"{len(read.headers)} headers", f"at most {LONGEST_HEADERS} bytes in all")
    for name, value in read.headers.items():
        if not name or not name.isprintable() or not value.isprintable():
            raise BadInput("headers", {name: value}, "printable text for both name and value")
