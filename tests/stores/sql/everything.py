"""Everything that a store on a server can do, done once, so that each right is used."""

from __future__ import annotations

from typing import Any

from bide.core.events import Event, EventKind
from bide.core.instants import In
from bide.core.names import new_id
from bide.core.records import (
    Cancel,
    Filter,
    Lease,
    Move,
    NewTask,
    OutcomeKind,
    Page,
    Record,
    Redrive,
    Ref,
    Result,
    Settlement,
    State,
)
from bide.testing.store_suite.base import add_all, change_all, settle_all

TOPIC, KEYS = "order.close", ["1", "2", "3", "4", "5", "6"]


async def everything(store: Any) -> None:
    """Opens the store, which keeps two events, and closes it."""
    await store.open()
    try:
        now = await store.time()
        heard: list[str] = []
        listening = await store.listen([TOPIC], lambda topic, wake: heard.append(topic))
        assert list(await store.announce("worker", [TOPIC], now + 30_000, now=now)) == ["worker"]
        await store.announce("gone", [TOPIC], now - 1, now=now)

        tasks = [NewTask(TOPIC, key, new_id(), In(0), b"{}", group="user-7") for key in KEYS]
        assert {answer.result for answer in await add_all(store, tasks, now=now)} == {Result.CREATED}
        assert (await add_all(store, [tasks[0]], now=now))[0].result is Result.REPLACED
        moved, cancelled = await change_all(store, [Move(TOPIC, "1", In(3_600_000)), Cancel(TOPIC, "2")], now=now)
        assert (moved.result, cancelled.result) == (Result.MOVED, Result.CANCELLED)
        held: dict[str, Record] = {}
        while len(held) < 4:  # on Redis a call asks some shards
            leased = await store.lease({TOPIC: 10}, now=now, until=now + 10_000, holder="worker")
            held |= {task.key: task for task in leased.tasks}
        assert set(held) == {"3", "4", "5", "6"}
        assert await store.extend([Lease(TOPIC, "3", held["3"].token)], now=now, until=now + 20_000) == [True]
        ends = [
            Settlement(TOPIC, "3", held["3"].token, OutcomeKind.DONE),
            Settlement(TOPIC, "4", held["4"].token, OutcomeKind.RETRY, In(3_600_000), error="no"),
            Settlement(TOPIC, "5", held["5"].token, OutcomeKind.DEAD, keep_until=now + 3_600_000, error="no"),
            Settlement(TOPIC, "6", held["6"].token, OutcomeKind.DONE, keep_until=now + 3_600_000),
        ]
        assert await settle_all(store, ends, now=now) == [True] * 4
        [redriven] = await change_all(store, [Redrive(TOPIC, "5", new_id(), In(0))], now=now)
        assert redriven.result is Result.REDRIVEN
        assert await store.purge(now=now, limit=100) == 0

        for where in (Filter(), Filter(group="user-7"), Filter(topic=TOPIC, state=State.WAITING, wake_from=now)):
            assert (await store.find(where, Page(limit=2))).tasks
        await store.tally([now, now + 60_000])
        assert await store.get([Ref(TOPIC, "1")]) != [None]
        for number in range(4):
            await store.record([Event(at=now, topic=TOPIC, key=str(number), id="x", kind=EventKind.RETRY)])
        assert len(await store.events()) == 2
        assert len(await store.events(Ref(TOPIC, "3"))) == 1
        found, wanted = await store.schema_version()
        assert found == wanted
        assert not await store.plan()
        assert len(await store.diagnose()) > 5
        assert heard
        await store.announce("worker", [], now, now=now)
        await listening.close()
        await change_all(store, [Cancel(TOPIC, key) for key in KEYS], now=now)
    finally:
        await store.close()
