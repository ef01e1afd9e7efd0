"""What a form of the console asks to be done, and the fields that would ask for it again."""

from __future__ import annotations

import re
from collections.abc import Iterator

from bide.core.errors import BadInput
from bide.core.instants import Millis, duration
from bide.core.names import new_id
from bide.core.records import Token
from bide.engine.bulk import MOST_PACE, Bulk, BulkVerb, May, Seen
from bide.service.callers import Verb
from bide.service.console.refs import chosen, filter_given
from bide.service.console.visit import Visit

VERBS = {
    BulkVerb.CANCEL: Verb.CANCEL,
    BulkVerb.MOVE: Verb.RESCHEDULE,
    BulkVerb.SHIFT: Verb.SHIFT,
    BulkVerb.FIRE: Verb.FIRE,
    BulkVerb.REDRIVE: Verb.REDRIVE,
}
"""What one must be allowed to do for each."""
_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_FIELDS = ("topic", "state", "group", "wake_from", "wake_before")
Field = tuple[str, str]


def read_bulk(visit: Visit) -> Bulk:
    """What is asked, by whom it is allowed. Raises BadInput, Forbidden."""
    verb = _verb(visit)
    scope = visit.given("scope", "chosen")
    if scope == "chosen":
        seen = tuple(Seen(*one) for one in chosen(visit))
        if not seen:
            raise BadInput("tasks", "none", "at least one: tick some in the list, or choose all that match")
        for topic in {one.ref.topic for one in seen}:
            visit.check(Verb.READ, topic)
            visit.check(VERBS[verb], topic)
        where = None
    elif scope == "matching":
        seen, where = (), filter_given(visit)
        if where.topic is not None:
            visit.check(Verb.READ, where.topic)
            visit.check(VERBS[verb], where.topic)
        else:
            check_somewhere(visit, VERBS[verb])
    else:
        raise BadInput("scope", scope, "chosen or matching")
    return Bulk(
        verb=verb, chosen=seen, where=where, error=visit.given("error") or None if where is not None else None,
        at=visit.phrases.read_time(visit.given("to"), "to") if verb is BulkVerb.MOVE else None,
        by=_by(visit.given("by")) if verb is BulkVerb.SHIFT else None,
        deadlines=verb is BulkVerb.SHIFT and bool(visit.given("deadlines")),
        pace=visit.whole("pace", 0, least=1, most=MOST_PACE) or None, untouched_since=_since(visit.given("since")),
    )  # fmt: skip


def check_somewhere(visit: Visit, verb: Verb) -> None:
    """Raises Forbidden where they may do it to no topic at all; which ones, is asked for each task."""
    if verb not in visit.caller.verbs or not visit.caller.topics:
        visit.check(verb, None)


def may_of(visit: Visit, verb: BulkVerb) -> May:
    """Whether who asks may do this to tasks of a topic."""
    caller, needed = visit.caller, VERBS[verb]
    return lambda topic: caller.may(needed, topic) and caller.may(Verb.READ, topic)


def fields_of(visit: Visit, bulk: Bulk) -> Iterator[Field]:
    """The hidden fields that ask for the same again, with all times fixed; without pace."""
    yield "verb", bulk.verb.value
    if bulk.where is None:
        yield "scope", "chosen"
        for text in dict.fromkeys(visit.all_given("ref")):
            yield "ref", text
    else:
        yield "scope", "matching"
        yield from filter_fields(visit, bulk)
    if bulk.at is not None:
        yield "to", visit.phrases.utc(bulk.at)
    if bulk.by is not None:
        yield "by", f"{bulk.by}ms"
    if bulk.deadlines:
        yield "deadlines", "yes"
    if bulk.untouched_since is not None:
        yield "since", str(bulk.untouched_since)


def filter_fields(visit: Visit, bulk: Bulk) -> Iterator[Field]:
    """The fields of a filter, as a form or the address of the list of tasks has them."""
    where = bulk.where
    assert where is not None
    for name in _FIELDS:
        value = getattr(where, name)
        if value is not None:
            yield name, visit.phrases.utc(value) if isinstance(value, int) else str(value)
    if bulk.error is not None:
        yield "error", bulk.error


def read_id(text: str) -> str:
    """The one-time id of a form; a fresh one where there is none. Raises BadInput."""
    if not text:
        return new_id()
    if _ID.fullmatch(text) is None:
        raise BadInput("id", text, "the id of the page that asked for a confirmation")
    return text


def _verb(visit: Visit) -> BulkVerb:
    text = visit.given("verb")
    try:
        return BulkVerb(text)
    except ValueError:
        raise BadInput("verb", text, f"one of {', '.join(BulkVerb)}") from None


def _by(text: str) -> Millis:
    return duration(text.replace("−", "-").removeprefix("+").strip(), field="by", negative=True)


def _since(text: str) -> Token | None:
    if not text:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 19:
        raise BadInput("since", text, "a token: a whole number")
    return int(text)
