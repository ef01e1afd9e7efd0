"""Which tasks a form means: those that were chosen, each as it was seen, or all that match."""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import unquote

from bide.core.errors import BadInput
from bide.core.instants import as_datetime
from bide.core.names import check_name, check_topic
from bide.core.records import Filter, Ref, State, Token
from bide.engine.arguments import STATES, filter_of
from bide.service.console.visit import Visit

MOST_CHOSEN = 1_000
"""Tasks that one form may name."""


class Chosen(NamedTuple):
    """A task as somebody saw it."""

    ref: Ref
    token: Token


def read_ref(text: str) -> Chosen:
    """Raises BadInput."""
    name, at, token = text.rpartition("@")
    topic, slash, key = name.partition("/")
    if not at or not slash or not token.isascii() or not token.isdigit() or len(token) > 19:
        raise BadInput("ref", text, "topic/key@token, percent-encoded, as the console's own forms have it")
    return Chosen(Ref(check_topic(unquote(topic)), check_name("key", unquote(key))), int(token))


def chosen(visit: Visit) -> list[Chosen]:
    """The tasks that a form names. Raises BadInput."""
    texts = visit.all_given("ref")
    if len(texts) > MOST_CHOSEN:
        raise BadInput("ref", f"{len(texts)} tasks", f"at most {MOST_CHOSEN:,} at once; or all that match")
    return [read_ref(text) for text in dict.fromkeys(texts)]


DUE = "due"
"""What stands in a form's state for: it waits, and its time has come."""


def filter_given(visit: Visit) -> Filter:
    """The filter of a form or an address: topic, state (the five, or `due`), group, wake_from and wake_before.

    Names are taken exactly as they were sent; times are as `Phrases.read_time` takes them. Raises BadInput.
    """
    times = [
        as_datetime(visit.phrases.read_time(text, name)) if (text := visit.given(name)) else None
        for name in ("wake_from", "wake_before")
    ]
    state = visit.given("state")
    if state == DUE:
        by_now = as_datetime(visit.phrases.now + 1)
        state, times[1] = State.WAITING.value, min(times[1] or by_now, by_now)
    elif state and state not in STATES:
        raise BadInput("state", state, f"one of {', '.join(STATES)}, or {DUE}")
    return filter_of(visit.exact("topic") or None, state or None, visit.exact("group") or None, *times)
