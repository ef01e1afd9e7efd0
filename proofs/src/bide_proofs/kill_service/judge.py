"""Compares what the receiver saw with the history, and says what is wrong."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import msgspec

from bide.core.records import Token, Verdict
from bide.testing.history import events as ev
from bide.testing.history.events import Event
from bide_proofs.torture.topics import LEASE

KINDS = (
    "bad_delivery", "unknown_delivery", "not_applied", "unacknowledged", "unheard", "applied_twice", "stale_applied",
)  # fmt: skip
APPLIED, REPEATED, STALE, NONE = "applied", "repeated", "stale", "none"
"""The end of a delivery: its effect; none, since the life had had it; since a later token was seen; it failed."""
Ref: TypeAlias = tuple[str, str, Token]


class Arrived(msgspec.Struct, frozen=True, gc=False):
    """A delivery, and what the receiver did with it."""

    topic: str
    key: str
    id: str
    token: Token
    attempt: int
    at: int
    """Nanoseconds of the monotonic clock."""
    effect: str = APPLIED
    acknowledged: bool = True
    """True if it was answered with 200, and the connection left whole."""


def judge(arrivals: Sequence[Arrived], events: Iterable[Event]) -> dict[str, list[object]]:
    """All that is wrong, by kind. Both are in the order of time."""
    wrong: dict[str, list[object]] = {kind: [] for kind in KINDS}
    began: dict[Ref, ev.Began] = {}
    settling: dict[int, ev.Settling] = {}
    settled: dict[Ref, ev.Settling] = {}
    for event in events:
        if isinstance(event, ev.Began):
            began[event.topic, event.key, event.token] = event
        elif isinstance(event, ev.Settling):
            settling[event.call] = event
        elif isinstance(event, ev.Told) and event.ok and event.call in settling:
            ask = settling[event.call]
            settled[ask.topic, ask.key, ask.token] = ask
    by_lease: dict[Ref, list[Arrived]] = defaultdict(list)
    effects: dict[str, set[str]] = defaultdict(set)
    highest: dict[tuple[str, str], Token] = defaultdict(int)
    for one in arrivals:
        by_lease[one.topic, one.key, one.token].append(one)
        lease = began.get((one.topic, one.key, one.token))
        if lease is None or (lease.id, lease.attempt) != (one.id, one.attempt) or lease.at > one.at:
            wrong["unknown_delivery"].append((one, lease))
        if one.effect == APPLIED:
            if APPLIED in effects[one.id]:
                wrong["applied_twice"].append(one)
            if one.token < highest[one.topic, one.key]:
                wrong["stale_applied"].append(one)
        effects[one.id].add(one.effect)
        highest[one.topic, one.key] = max(one.token, highest[one.topic, one.key])
    for ref, end in settled.items():
        answered = [one for one in by_lease[ref] if one.acknowledged]
        if end.verdict is not Verdict.DONE:
            # an answer that took longer may have been given up, rightly
            wrong["unheard"] += [(one, end) for one in answered if end.at - one.at < LEASE * 1e9]
            continue
        if not answered:
            wrong["unacknowledged"].append((end, by_lease[ref]))
        elif not effects[answered[0].id] & {APPLIED, STALE}:
            wrong["not_applied"].append((end, by_lease[ref]))
    return wrong
