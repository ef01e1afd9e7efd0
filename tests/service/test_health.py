"""Readiness, and what the API answers, with stores that are well, dead, slow, full, old, or of another time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import pytest
from msgspec.structs import replace
from tests.service.calling import Api, Gated, running
from tests.service.conftest import KEPT
from tests.service.test_api_batches import calling
from tests.waiting import PATIENCE, in_virtual_time, until

from bide import Bide
from bide.core.errors import OutcomeUnknown, StoreCorrupt, StoreFull, StoreUnavailable
from bide.core.records import Record, Ref
from bide.ports import Features
from bide.service.health import Health, Level, Readiness, ready
from bide.stores.memory import MemoryStore
from bide.testing import ManualClock
from bide.testing.faults import FaultyStore
from bide.testing.virtual import VirtualLoop

Line = tuple[str, Level, str]
OK: Line = ("store", Level.OK, "it answers")
WALL = ManualClock()


class Known(MemoryStore):
    """A store with a schema and a clock, both as told."""

    def __init__(self, found: int = 3, ahead: float = 0.0) -> None:
        super().__init__()
        self.versions = found, 3
        self.ahead = ahead
        self.asked = 0

    @property
    def features(self) -> Features:
        return replace(super().features, schema=self, clock=self)

    async def schema_version(self) -> tuple[int, int]:
        self.asked += 1
        return self.versions

    async def plan(self) -> None:
        return None

    async def migrate(self) -> None:
        """Nothing to do."""

    async def time(self) -> int:
        return WALL.now() + int(self.ahead * 1000)

    def clock(self) -> None:
        return None


def lines(found: Readiness) -> tuple[Line, ...]:
    return tuple((one.name, one.level, one.what) for one in found.checks)


async def test_a_store_that_is_well() -> None:
    async with Bide("memory:") as app:
        found = await ready(app)
    assert lines(found) == (OK,)
    assert (found.ready, found.status) == (True, 200)
    assert found.document() == {"status": "ready", "checks": [{"name": "store", "level": "ok", "what": "it answers"}]}


async def test_an_app_that_is_not_open() -> None:
    found = await ready(Bide("memory:"))
    assert found.status == 503
    assert lines(found) == (("store", Level.FAILED, "not open yet, or closed"),)


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (StoreUnavailable("redis://user:secret@10.0.0.1 refused"), "the store cannot be reached (StoreUnavailable)"),
        (RuntimeError("secret"), "the check itself failed (RuntimeError)"),
    ],
)
async def test_a_store_that_raises(error: Exception, what: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "bide.health")
    store = FaultyStore(MemoryStore())
    async with Bide(store) as app:
        health = Health(app, every=0)
        store.fault = lambda point: error if point == "get:before" else None
        for _ in range(3):
            found = await health.ready()
            assert lines(found) == (("store", Level.FAILED, what),)
            assert found.status == 503
            assert "secret" not in str(found.document())
        store.fault = lambda _: None
        assert (await health.ready()).ready
    before, after = caplog.messages
    assert before.startswith("not ready: store: ")
    assert "secret" in before, "the log says what exactly it was, once"
    assert after == "ready again"


async def test_a_slow_store_and_no_more_than_the_patience() -> None:
    store = FaultyStore(MemoryStore(), latency=lambda name: 3_600.0 if name == "get" else 0.0)
    async with Bide(store) as app:
        found = await ready(app, patience=0.02)
    assert lines(found) == (("store", Level.FAILED, "no answer within 0.02 s"),)


class InParts(MemoryStore):
    """A store of several parts, of which some are away."""

    away: tuple[int, ...] = ()
    hangs: tuple[int, ...] = ()

    @property
    def features(self) -> Features:
        return replace(super().features, parts=self)

    def part_of(self, topic: str, key: str) -> int:
        return sum(key.encode()) % 4

    async def get(self, refs: Sequence[Ref]) -> list[Record | None]:
        part = self.part_of(*refs[0])
        if part in self.hangs:
            await asyncio.Event().wait()
        if part in self.away:
            raise StoreUnavailable("away")
        return await super().get(refs)


@in_virtual_time
async def test_a_store_is_there_while_one_of_its_parts_is(loop: VirtualLoop) -> None:
    store = InParts()
    async with Bide(store) as app:
        assert lines(await ready(app)) == (OK,)
        store.away, store.hangs = (1,), (2, 3)
        found = await ready(app)
        assert lines(found) == (("store", Level.WARNING, "3 of 4 parts do not answer"),)
        assert found.ready
        store.away = (0, 1)
        found = await ready(app)
        assert lines(found) == (("store", Level.FAILED, "no answer within 2 s"),)
        store.away, store.hangs = (0, 1, 2, 3), ()
        found = await ready(app)
        assert lines(found) == (("store", Level.FAILED, "the store cannot be reached (StoreUnavailable)"),)


@pytest.mark.parametrize(
    ("found", "level", "what"),
    [
        (2, Level.FAILED, "version 2, but 3 is needed: bide migrate"),
        (3, Level.OK, "version 3"),
        (4, Level.WARNING, "version 4, newer than this program, which knows 3"),  # an update is under way
    ],
)
async def test_the_schema(found: int, level: Level, what: str) -> None:
    store = Known(found)
    async with Bide(store) as app:
        health = Health(app, every=0, wall=WALL)
        for _ in range(3):
            readiness = await health.ready()
            assert lines(readiness)[1] == ("schema", level, what)
            assert readiness.ready == (level is not Level.FAILED)
    assert store.asked == 1 or level is not Level.OK, "one that is right is not asked for all the time"


@pytest.mark.parametrize(
    ("ahead", "level", "what"),
    [
        (0, Level.OK, "within a second of the store's"),
        (90, Level.WARNING, "this machine's clock is 90.0 s behind the store's"),
        (-301, Level.FAILED, "this machine's clock is 301.0 s ahead of the store's"),
    ],
)
async def test_the_clock(ahead: float, level: Level, what: str) -> None:
    async with Bide(Known(ahead=ahead)) as app:
        found = await ready(app, wall=WALL)
    assert lines(found)[2] == ("clock", level, what)
    assert found.ready == (level is not Level.FAILED)


async def test_many_who_ask_share_one_look() -> None:
    store = FaultyStore(MemoryStore())
    async with Bide(store) as app:
        health = Health(app, every=60)
        found = await asyncio.gather(*(health.ready() for _ in range(20)))
        assert all(one is found[0] for one in found)
        assert await health.ready() is found[0]
        assert store.calls["get"] == 1


async def test_one_who_stops_asking_takes_nothing_from_the_others() -> None:
    store = FaultyStore(MemoryStore(), latency=lambda _: 0.01)
    async with Bide(store) as app:
        health = Health(app, patience=PATIENCE)
        first, second = asyncio.create_task(health.ready()), asyncio.create_task(health.ready())
        await asyncio.sleep(0)
        first.cancel()
        assert (await second).ready


async def test_sqlite_is_asked_for_its_schema(tmp_path: Any) -> None:
    async with Bide(f"sqlite:///{tmp_path}/health.db") as app:
        found = await ready(app, patience=PATIENCE)
    assert [check.name for check in found.checks] == ["store", "schema"]
    assert found.ready


CALLS: list[tuple[str, str, Any]] = [
    ("PUT", "/v1/topics/a/tasks/b", {"delay": "1h"}),
    ("GET", "/v1/topics/a/tasks/b", None),
    ("PATCH", "/v1/topics/a/tasks/b", {"delay": "1h"}),
    ("DELETE", "/v1/topics/a/tasks/b", None),
    ("POST", "/v1/schedule", [{"topic": "a", "delay": "1h"}]),
    ("POST", "/v1/cancel", {"group": "a"}),
    ("GET", "/v1/tasks", None),
    ("POST", "/v1/lease", {"topics": {"a": 1}}),
    ("POST", "/v1/lease", {"topics": {"a": 1}, "wait": "60s"}),
    ("POST", "/v1/settle", [{"topic": "a", "key": "b", "token": 1, "outcome": "done"}]),
    ("POST", "/v1/extend", {"leases": [{"topic": "a", "key": "b", "token": 1}]}),
]


@pytest.mark.parametrize(
    ("error", "status"),
    [(StoreUnavailable("away"), 503), (StoreFull("full"), 507), (StoreCorrupt("odd"), 503),
     (OutcomeUnknown("lost"), 504), (RuntimeError("a defect with a secret"), 500)],
    ids=lambda given: type(given).__name__,
)  # fmt: skip
def test_what_the_store_raises_has_a_status(error: Exception, status: int) -> None:
    failing = False
    store = FaultyStore(MemoryStore(), fault=lambda point: error if failing and point.endswith("before") else None)
    with running(store, **KEPT) as service, closing(Api(service.url)) as api:
        api.put("a", "b")
        failing = True
        for method, path, ask in CALLS:
            reply = api(method, path, ask)
            assert reply.status == status, (method, path, reply)
            assert ("retry-after" in reply.headers) is (status in (503, 507))
            assert b"secret" not in reply.body
        reply = api("GET", "/v1/events")
        assert reply.status == status
        failing = False
        assert api.get("a", "b")["state"] == "waiting"
        api.put("a", "c", delay="0s")
        assert [task["key"] for task in api.lease("a", 10, wait="60s")] == ["c"]


async def test_a_slow_store_answers_those_who_wait_for_something_else() -> None:
    store = Gated()
    with running(store, **KEPT) as service:
        async with calling(service.url) as many:
            store.held.add("tally")
            counting = asyncio.ensure_future(many("GET", "/v1/topics"))
            await until(lambda: store.calls.get("tally", 0), "the call that is slow")
            await many.put("a", "b", delay="0s")
            assert [task["key"] for task in await many.lease("a", wait="60s")] == ["b"]
            assert not counting.done()
            store.held.clear()
            assert (await counting)[0] == 200
