"""A store with a few tasks in every state, and everything that can be asked of it after somebody has damaged it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence, Set
from typing import Any, NamedTuple, TypeAlias

from tests.fuzz.tasks import worked_on

from bide.core.events import Event, EventKind
from bide.core.instants import At
from bide.core.names import new_id
from bide.core.records import (
    Cancel,
    Change,
    Filter,
    Move,
    NewTask,
    OutcomeKind,
    Page,
    Record,
    Redrive,
    Ref,
    Settlement,
    State,
)
from bide.stores.redis import RedisStore
from bide.stores.sqlite import SqliteStore
from bide.testing.clock import FIRST_INSTANT as NOW

Damaged: TypeAlias = SqliteStore | RedisStore
May: TypeAlias = Callable[[Awaitable[Any]], Awaitable[Any]]
"""Awaits a call; None where it was right not to answer."""
HOUR = 3_600_000
LATER = NOW + 2 * HOUR
FILTERS = (Filter(), Filter(topic="t"), Filter(group="g"), Filter(state=State.WAITING))
MOST = 120
"""Pages and leases that nobody needs more of: damage may lead in a circle."""


class Kept(NamedTuple):
    """What must not be lost."""

    refs: Sequence[Ref]
    """All that were there, of the topics t and u."""
    found: Set[Ref]
    """Those that are to be found."""
    held: Set[Ref]
    """Those whose leases are to be accepted."""
    whole: bool
    """Leases come to an end, and what is new is kept."""


class Played(NamedTuple):
    leased: dict[Ref, Record]
    dead: set[Ref]
    """Before that, or set aside."""


def payload_of(key: str) -> bytes:
    return b'{"key":"%s","text":"%s"}' % (key.encode(), key.encode() * 40)


async def fill(store: Damaged, refs: Sequence[Ref], groups: Sequence[str | None]) -> Ref:
    """Add them in a few batches, lease five, and let one die, whose name is returned."""
    tasks = [
        NewTask(*ref, new_id(), At(NOW + number % 7), payload_of(ref.key), groups[number % len(groups)])
        for number, ref in enumerate(refs)
    ]
    for first in range(0, len(tasks), 6):
        await store.add(tasks[first : first + 6], now=NOW)
    ended = (await store.lease({"t": 4, "u": 1}, now=NOW + 7, until=NOW + 10_000, holder="w")).tasks[0]
    dead = Settlement(*ended.ref, ended.token, OutcomeKind.DEAD, keep_until=LATER * 2, error="bad")
    await store.settle([dead], now=NOW + 7)
    await store.record([Event(at=NOW, topic="t", key=refs[1].key, id="i", kind=EventKind.DEAD, what="bad")] * 3)
    await store.announce("w", ["t"], LATER * 2, now=NOW)
    return ended.ref


async def play(store: Damaged, kept: Kept, verdict: OutcomeKind, may: May) -> Played:
    """Ask everything; what is leased ends with `verdict`."""
    for ref, record in zip(kept.refs, await may(store.get(kept.refs)) or (), strict=False):
        assert record is not None or ref not in kept.found, f"{ref} is not found"
        if record is not None:
            worked_on(record)
    for where in FILTERS:
        await may(every(store, where))
    await may(store.tally([0, NOW, LATER]))
    leased = await _take_all(store, kept, may)
    dead = {one.ref for one in await may(every(store, Filter(state=State.DEAD))) or ()}
    outcomes = [Settlement(*ref, one.token, verdict, At(LATER + HOUR), error="\0é") for ref, one in leased.items()]
    for ref, settled in zip(leased, await may(store.settle(outcomes, now=LATER)) or (), strict=False):
        assert settled or ref not in kept.held, f"a live lease of {ref} is not accepted"
    last = kept.refs[-1]
    changes: list[Change] = [Move(*last, At(LATER)), Cancel(*kept.refs[-2])]
    changes += [Redrive(ref.topic, ref.key, new_id(), At(LATER)) for ref in sorted(dead)[:1]]
    await may(store.change(changes, now=LATER))
    tasks = [NewTask("t", key, new_id(), At(LATER), b"{}", "g") for key in (kept.refs[1].key, "another")]
    if await may(store.add(tasks, now=LATER)) is not None:
        [another] = await may(store.get([Ref("t", "another")])) or [None]
        assert (another is not None and another.payload == b"{}") or not kept.whole, "what was just added is not there"
    await may(store.events(limit=10))
    await may(store.events(kept.refs[1], limit=10))
    await may(store.announce("x", ["t"], LATER * 2, now=NOW))
    await may(store.purge(now=LATER + 30 * HOUR, limit=100))
    for finding in await may(store.diagnose()) or ():
        assert finding.what
    return Played(leased, dead)


async def _take_all(store: Damaged, kept: Kept, may: May) -> dict[Ref, Record]:
    """Lease until nothing is due."""
    taken: dict[Ref, Record] = {}
    for _ in range(MOST):
        leased = await may(store.lease({"t": 7, "u": 7}, now=LATER, until=LATER + HOUR, holder="x"))
        for one in leased.tasks if leased else ():
            assert one.ref not in taken, f"{one.ref} is leased twice"
            taken[one.ref] = one
            worked_on(one)
        if leased and not leased.tasks and (leased.next_wake is None or leased.next_wake > LATER):
            return taken
    assert not kept.whole, "nothing is to be had, and it is said to be due: whoever works on it asks for ever"
    return taken


async def every(store: Damaged, where: Filter) -> list[Record]:
    """The tasks of all pages."""
    records: list[Record] = []
    cursor: str | None = None
    for _ in range(MOST):
        found = await store.find(where, Page(limit=25, cursor=cursor))
        records += found.tasks
        cursor = found.cursor
        if cursor is None:
            return records
    raise AssertionError("a list without an end")
