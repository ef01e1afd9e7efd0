"""The suite's base class, with the flags that a binding sets for its store and the fixtures of the tests.

It also has the steps that the tests consist of: put a task, take it, bring it into a state, read a whole listing.

Time is always an argument. Everything happens near `NOW`, a fixed instant, so that no test sleeps and every answer can
be compared exactly.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeAlias

import pytest
import pytest_asyncio
from msgspec.structs import replace

from bide.core import lifecycle
from bide.core.answers import Answer
from bide.core.instants import LAST_INSTANT, At, Due, In, Millis
from bide.core.names import new_id
from bide.core.records import (
    Cancel,
    Change,
    Count,
    Filter,
    Lease,
    Leased,
    Move,
    NewTask,
    OnConflict,
    OutcomeKind,
    Page,
    Record,
    Redrive,
    Ref,
    Settlement,
    State,
    Tally,
    Topic,
)
from bide.ports import Store, Verbs, all_answers
from bide.testing.clock import FIRST_INSTANT

NOW: Millis = FIRST_INSTANT
SECOND: Millis = 1_000
MINUTE: Millis = 60 * SECOND
HOUR: Millis = 60 * MINUTE
DAY: Millis = 24 * HOUR
LEASE: Millis = 10 * SECOND
"""The default length of a lease in these tests."""
KEPT: Millis = NOW + 30 * DAY
"""A `keep_until` that no test reaches by accident."""
Notices: TypeAlias = list[tuple[Topic, Millis]]
"""Notifications: topics, each with its wake time."""


def new(
    key: str = "k",
    *,
    topic: Topic = "t",
    due: Due | None = None,
    payload: bytes = b"{}",
    group: str | None = None,
    options: bytes = b"",
    deadline: Millis | None = None,
    on_conflict: OnConflict = OnConflict.REPLACE,
    if_token: int | None = None,
) -> NewTask:
    """A task to add, with a new id, due at `NOW` by default."""
    return NewTask(
        topic, key, new_id(), At(NOW) if due is None else due, payload, group, options, deadline, on_conflict, if_token
    )


async def add_all(store: Verbs, tasks: Sequence[NewTask], *, now: Millis = NOW) -> list[Answer]:
    """Add the tasks in one batch; return the answers."""
    return await all_answers(await store.add(tasks, now=now))


async def change_all(store: Verbs, changes: Sequence[Change], *, now: Millis = NOW) -> list[Answer]:
    """Make the changes in one batch; return the answers."""
    return await all_answers(await store.change(changes, now=now))


async def settle_all(store: Verbs, outcomes: Sequence[Settlement], *, now: Millis = NOW) -> list[bool]:
    """Settle in one batch; return for each outcome if it was accepted."""
    return await all_answers(await store.settle(outcomes, now=now))


async def put(store: Verbs, *tasks: NewTask, now: Millis = NOW) -> list[Record]:
    """Add the tasks; return their records. Each key must be free, or its task replaceable."""
    return [record_of(answer) for answer in await add_all(store, tasks, now=now)]


async def put_one(store: Verbs, task: NewTask | None = None, *, now: Millis = NOW) -> Record:
    """Add one task (by default a plain one, due at `NOW`); return its record."""
    [record] = await put(store, new() if task is None else task, now=now)
    return record


def record_of(answer: Answer) -> Record:
    """The record in an answer; fails if there is none."""
    assert answer.record is not None, f"{answer.result} carries no task"
    return answer.record


async def lease(
    store: Store, count: int = 1, *, topic: Topic = "t", now: Millis = NOW, lasts: Millis = LEASE, holder: str = "w"
) -> Leased:
    """Ask for `count` tasks of one topic."""
    return await store.lease({topic: count}, now=now, until=now + lasts, holder=holder)


async def take(
    store: Store, *, topic: Topic = "t", now: Millis = NOW, lasts: Millis = LEASE, holder: str = "w"
) -> Record:
    """Lease the one due task of the topic; fails if there is none."""
    leased = await lease(store, topic=topic, now=now, lasts=lasts, holder=holder)
    assert len(leased.tasks) == 1, "there should be one due task to take"
    return leased.tasks[0]


async def put_and_take(store: Store, task: NewTask | None = None) -> Record:
    """Add one task (by default a plain one) and lease it at once; return its record as leased."""
    record = await put_one(store, task)
    return await take(store, topic=record.topic)


async def look(store: Verbs, which: Record | Ref) -> Record | None:
    """The current version of the task; None if it is gone."""
    [record] = await store.get([Ref(which.topic, which.key)])
    return record


async def see(store: Verbs, which: Record | Ref) -> Record:
    """The current version of the task; fails if it is gone."""
    record = await look(store, which)
    assert record is not None, f"{which.topic}/{which.key} should be there"
    return record


async def do(store: Verbs, change: Change, *, now: Millis = NOW) -> Answer:
    """Make one change; return its answer."""
    [answer] = await change_all(store, [change], now=now)
    return answer


async def settle(store: Verbs, outcome: Settlement, *, now: Millis = NOW) -> bool:
    """Settle one outcome; return True if it was accepted."""
    [accepted] = await settle_all(store, [outcome], now=now)
    return accepted


async def extend(store: Store, held: Record, *, until: Millis, now: Millis = NOW) -> bool:
    """Extend one lease; return True if it was accepted."""
    [accepted] = await store.extend([hold(held)], now=now, until=until)
    return accepted


def hold(held: Record) -> Lease:
    """The lease of a leased record."""
    return Lease(held.topic, held.key, held.token)


def done(held: Record | Lease, *, keep_until: Millis = 0) -> Settlement:
    return Settlement(held.topic, held.key, held.token, OutcomeKind.DONE, keep_until=keep_until)


def again(held: Record | Lease, wake: Due, *, next_id: str = "") -> Settlement:
    return Settlement(held.topic, held.key, held.token, OutcomeKind.DONE, next_at=wake, next_id=next_id or new_id())


def retry(held: Record | Lease, wake: Due, *, error: str | None = "it failed") -> Settlement:
    return Settlement(held.topic, held.key, held.token, OutcomeKind.RETRY, next_at=wake, error=error)


def defer(held: Record | Lease, wake: Due) -> Settlement:
    return Settlement(held.topic, held.key, held.token, OutcomeKind.DEFER, next_at=wake)


def dead(held: Record | Lease, *, keep_until: Millis = KEPT, error: str | None = "it will never work") -> Settlement:
    return Settlement(held.topic, held.key, held.token, OutcomeKind.DEAD, keep_until=keep_until, error=error)


async def bring(
    store: Store, state: State | None, key: str = "k", *, topic: Topic = "t", group: str | None = None,
    keep_until: Millis = KEPT,
) -> Record | None:  # fmt: skip
    """Put a task and bring it into `state` at `NOW` (None: leave the key free); return its record.

    No other task of the topic may be due at `NOW`.
    """
    if state is None:
        return None
    record = await put_one(store, new(key, topic=topic, group=group, payload=b'{"of": "before"}'))
    if state is State.WAITING:
        return record
    held = record if state is State.CANCELLED else await take(store, topic=topic)
    return await _brought(store, state, held, keep_until, NOW)


async def _brought(store: Store, state: State, held: Record, keep_until: Millis, now: Millis) -> Record:
    """Bring the task from its lease into `state`; a cancelled one may wait."""
    if state is State.CANCELLED:
        await do(store, Cancel(held.topic, held.key, keep_until), now=now)
    elif not state.live:
        assert await settle(store, (dead if state is State.DEAD else done)(held, keep_until=keep_until), now=now)
    return await see(store, held)


async def lived(store: Store, state: State | None, *, keep_until: Millis = KEPT) -> Record | None:
    """Like `bring`, but the task has failed once, and what is leased or has ended lost a lease, too: at `NOW` to 3 s.

    A waiting one wakes a day after `NOW`, at which it was due.
    """
    if state is None:
        return None
    await put_one(store, new(payload=b"before", group="before", options=b"\x81", deadline=NOW + 8 * HOUR))
    await take(store, lasts=SECOND)
    held = await take(store, now=NOW + SECOND)
    wake = At(NOW + DAY) if state is State.WAITING else In(SECOND)
    assert await settle(store, retry(held, wake, error="the first failure"), now=NOW + SECOND)
    if state is State.WAITING:
        return await see(store, held)
    await take(store, now=NOW + 2 * SECOND, lasts=SECOND)
    return await _brought(store, state, await take(store, now=NOW + 3 * SECOND), keep_until, NOW + 3 * SECOND)


class Take(NamedTuple):
    """A worker asks for one due task of a topic."""

    topic: Topic
    holder: str


Call: TypeAlias = NewTask | Change | Settlement | Lease | Take
"""A call that concerns one task. A `Lease` is extended by an hour."""
HELD = Lease("t", "k", 0)
"""A lease of the task `k`, for calls of which `meant` sets the token."""
TIMED: dict[str, tuple[State | None, Callable[[Due], Call]]] = {
    "schedule": (None, lambda due: new(due=due)),
    "replace": (State.WAITING, lambda due: new(due=due)),
    "move": (State.WAITING, lambda due: Move("t", "k", due)),
    "redrive": (State.DEAD, lambda due: Redrive("t", "k", "", due)),
    "again": (State.LEASED, lambda due: again(HELD, due)),
    "retry": (State.LEASED, lambda due: retry(HELD, due)),
    "defer": (State.LEASED, lambda due: defer(HELD, due)),
}
"""The calls that give a task another time, each with the state that it has before."""


def meant(asked: Call, topic: Topic, old: Record | None) -> Call:
    """The call for the task `old` of this topic: a token or `if_token` in `asked` is counted from the task's own."""
    own = 1 if old is None else old.token
    if isinstance(asked, Take):
        return asked._replace(topic=topic)
    if isinstance(asked, Lease):
        return asked._replace(topic=topic, token=own + asked.token)
    if isinstance(asked, Settlement):
        return replace(asked, topic=topic, token=own + asked.token)
    asked = replace(asked, topic=topic, if_token=None if asked.if_token is None else own + asked.if_token)
    return replace(asked, id=new_id()) if isinstance(asked, NewTask | Redrive) else asked


async def call(store: Store, asked: Call, now: Millis) -> object:
    """Make the call; return its answer, for a `Take` the tasks."""
    if isinstance(asked, NewTask):
        return (await add_all(store, [asked], now=now))[0]
    if isinstance(asked, Settlement):
        return await settle(store, asked, now=now)
    if isinstance(asked, Lease):
        return (await store.extend([asked], now=now, until=now + HOUR))[0]
    if isinstance(asked, Take):
        return (await lease(store, topic=asked.topic, now=now, holder=asked.holder)).tasks
    return await do(store, asked, now=now)


def effect(asked: Call, old: Record | None, now: Millis, token: int) -> tuple[object, Record | None]:
    """The answer that the lifecycle gives to the call, and the task after it; `token` is that of a new version."""
    there = None if old is None or lifecycle.gone(old, now) else old
    if isinstance(asked, Take):
        if there is None or not lifecycle.may_lease(there, now):
            return [], old
        record = lifecycle.lease(there, now, now + LEASE, asked.holder, token)
        return [record], record
    if isinstance(asked, Settlement | Lease):
        if there is None or not lifecycle.holds(there, asked.token):
            return False, old
        if isinstance(asked, Lease):
            return True, lifecycle.extend(there, now + HOUR)
        record = lifecycle.settle(asked, there, now, token)
        return True, None if lifecycle.gone(record, now) else record
    decide: Any = lifecycle.schedule if isinstance(asked, NewTask) else lifecycle.change
    answer: Answer = decide(asked, there, now, token)
    if answer.record is None:
        return answer, old
    return answer, None if lifecycle.gone(answer.record, now) else answer.record


async def pages(store: Verbs, where: Filter, limit: int) -> AsyncIterator[list[Record]]:
    """The pages of a listing; checks that none exceeds the limit."""
    page = Page(limit=limit)
    while True:
        found = await store.find(where, page)
        assert len(found.tasks) <= limit, "a page is never longer than asked for"
        yield found.tasks
        if found.cursor is None:
            return
        page = Page(limit=limit, cursor=found.cursor)


async def listed(store: Verbs, where: Filter, *, limit: int = 1_000) -> list[Record]:
    """All tasks of a listing, read page by page."""
    return [record async for page in pages(store, where, limit) for record in page]


def place(record: Record, where: Filter) -> tuple[str, str | Millis]:
    """The position of a record in the listing of `where`, as far as `Verbs.find` promises it."""
    timed = where.state is not None or where.wake_from is not None or where.wake_before is not None
    if where.group is not None:
        return record.topic, record.key
    if not timed:
        return record.topic, ""
    return record.topic, record.wake_at if record.finished_at is None else record.finished_at


def matches(record: Record, where: Filter) -> bool:
    """True if the filter matches: an independent implementation."""
    if where.wake_from is not None or where.wake_before is not None:
        wakes = record.state.live
        wakes = wakes and (where.wake_from is None or record.wake_at >= where.wake_from)
        wakes = wakes and (where.wake_before is None or record.wake_at < where.wake_before)
        if not wakes:
            return False
    return (
        (where.topic is None or record.topic == where.topic)
        and (where.state is None or record.state is where.state)
        and (where.group is None or record.group == where.group)
    )


def counted(tally: Tally, topic: Topic, state: State) -> Count:
    """The count of one topic and state; zero if it is not listed."""
    return tally.counts.get((topic, state), Count(0))


@asynccontextmanager
async def notified(store: Store, topics: Collection[str]) -> AsyncIterator[Notices]:
    """Collect the notifications of earlier wakes for these topics. Skips a store that sends none."""
    if (wakes := store.features.wakes) is None:
        pytest.skip("this store tells of nothing")
    heard: Notices = []
    listening = await wakes.listen(topics, lambda topic, wake: heard.append((topic, wake)))
    try:
        yield heard
    finally:
        await listening.close()


async def until(condition: Callable[[], bool], what: str) -> None:
    """Give the event loop time until `condition` holds: a notification may take a moment. Fails after 5 s."""
    for _ in range(1_000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"waited 5 s for {what}")


def keys(records: Sequence[Record]) -> list[str]:
    return [record.key for record in records]


class SuiteBase:
    """Subclass `StoreSuite`, override `make_store`, set the flags that differ."""

    pytestmark: ClassVar[list[pytest.MarkDecorator]] = [pytest.mark.asyncio]

    durable: ClassVar[bool] = False
    """True if another store made for the same directory sees the same tasks, at once and after a close."""
    many: ClassVar[int] = 10_000
    """The number of tasks in large batches."""
    races: ClassVar[int] = 1_000
    """The number of runs of each race."""
    exact_wakes: ClassVar[bool] = True
    """True if `next_wake` is exactly the earliest wake time; else it may be earlier, but still later than now."""

    exact_ends: ClassVar[bool] = True
    """True if `next_wake` changes when a lease is extended or ends early; else it may be the lease's original end."""

    exact_order: ClassVar[bool] = True
    """True if a lease with a limit takes the oldest of all tasks; else the oldest of some shards."""

    hears_commits: ClassVar[bool] = True
    """True if a commit of a caller's own transaction notifies listeners; else workers find its tasks by polling."""

    tells_what_is_taken: ClassVar[bool] = False
    """True if other workers are notified of a lease that leaves nothing due; see `ports.Notifies`."""

    async def make_store(self, tmp_path: Path) -> Store:
        """Make a store that is not open yet, with its data under `tmp_path` (or in a namespace named after it).

        A store with a clock of its own must be configured to use the caller's.
        """
        raise NotImplementedError

    def callers_transaction(self, tmp_path: Path) -> AbstractAsyncContextManager[Any]:
        """A caller's own connection to the store's database, in a transaction.

        It commits on leaving without an error, else it rolls back. For stores with `features.transactions`.
        """
        pytest.skip("this binding knows no connection of the caller's")

    async def write_text(self, connection: Any, text: str) -> None:
        """Write a row of the caller's own in the current transaction of `connection`."""
        pytest.skip("this binding writes no rows of the caller's")

    async def texts(self, tmp_path: Path) -> list[str]:
        """The committed rows of `write_text`."""
        raise NotImplementedError

    async def damage(self, tmp_path: Path, ref: Ref) -> None:
        """Make the stored task unreadable behind the store's back, as a fault of the disk or another program would."""
        pytest.skip("this binding has no back door")

    @pytest_asyncio.fixture
    async def store(self, tmp_path: Path) -> AsyncIterator[Store]:
        """An open, empty store."""
        async with self.opened(tmp_path) as store:
            yield store

    @pytest_asyncio.fixture
    async def rival(self, store: Store, tmp_path: Path) -> AsyncIterator[Store]:
        """Another open client of the same tasks; the store itself if there can be no other."""
        if not self.durable:
            yield store
            return
        async with self.opened(tmp_path) as rival:
            yield rival

    @asynccontextmanager
    async def opened(self, tmp_path: Path) -> AsyncIterator[Store]:
        """A client of the tasks under `tmp_path`, open within this context."""
        store = await self.make_store(tmp_path)
        await store.open()
        try:
            yield store
        finally:
            await store.close()

    async def rests_until(self, store: Store, wake: Millis, *, topic: Topic = "t", now: Millis = NOW) -> None:
        """Check that no task of the topic is due and that a lease reports this next wake time."""
        asked = await lease(store, 5, topic=topic, now=now)
        assert asked.tasks == [], f"a lease at {now} gave out a task that wakes at {wake}"
        assert self.wakes_at(asked.next_wake, wake, now), (
            f"next_wake of a lease at {now} for a task that wakes at {wake}"
        )

    async def shown(self, store: Store, record: Record | None) -> None:
        """Check that each query finds this one task, as it is in `record`; None: nothing.

        The queries are by topic `t` and by the groups `before` and `after`.
        """
        there = [] if record is None else [record]
        assert await store.get([Ref("t", "k")]) == [record]
        for where in (
            Filter(), Filter(topic="t"), Filter(group="before"), Filter(group="after"), Filter(wake_before=NOW + HOUR),
            Filter(group="before", wake_from=0), Filter(group="after", wake_from=0),
            *(Filter(topic="t", state=state) for state in State),
        ):  # fmt: skip
            assert await listed(store, where) == [one for one in there if matches(one, where)], where
        tally = await store.tally([0, NOW + HOUR, KEPT])
        counts = {each: count.number for each, count in tally.counts.items() if count.number}
        assert counts == {(one.topic, one.state): 1 for one in there}, "the counts of a tally"
        ahead = [count.number for counts in tally.forecast.values() for count in counts if count.number]
        assert ahead == [1 for one in there if one.state is State.WAITING and one.wake_at < KEPT], (
            "the forecast of a tally"
        )

    async def alone(self, store: Store, record: Record | None, *, now: Millis) -> None:
        """Check that queries find this one task (None: nothing), and a lease takes it at its time and not before."""
        await self.shown(store, record)
        if record is None or not record.state.live:
            asked = await lease(store, 5, now=NOW + 2 * DAY)
            assert (asked.tasks, asked.next_wake) == ([], None)
            if record is None and (log := store.features.events) is not None:
                assert await log.events(Ref("t", "k")) == []
            return
        wake = record.wake_at
        if wake > now:
            await self.rests_until(store, wake, now=wake - 1)
        at = max(wake, now)
        until = min(at + LEASE, LAST_INSTANT)
        held = await take(store, now=at, lasts=until - at, holder="another")
        assert held == lifecycle.lease(record, at, until, "another", held.token)
        assert held.token > record.token
        assert await see(store, held) == held

    def wakes_at(self, told: Millis | None, earliest: Millis, now: Millis) -> bool:
        """True if `told` is a valid `next_wake` when the earliest wake time is `earliest`."""
        if told is None:
            return False
        if self.exact_wakes or earliest <= now:
            return told == earliest
        return now < told <= earliest
