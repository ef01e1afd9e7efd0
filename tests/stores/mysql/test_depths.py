"""Under an old snapshot thorough looks begin where nothing is missed for long, and whole ones are made beside."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest
from tests.stores.looks import goes_on, soon
from tests.stores.mysql.conftest import OpensStore
from tests.stores.mysql.connections import by_asyncmy
from tests.stores.mysql.test_keeping import ask

from bide.core.records import In
from bide.stores import floors
from bide.stores.floors import SLACK
from bide.stores.mysql import depths
from bide.stores.mysql.address import address_of
from bide.stores.mysql.depths import BACK, Depth, Depths
from bide.stores.mysql.lane import Call
from bide.testing.store_suite.acts import HOUR, MINUTE, NOW, lease, new, put_one

WHOLE = Depth({"t": 0}, {"t": 0}, {"t": 0}, True, True)


class Known(Depths):
    """With a stopwatch that is set by hand, and a note of what was begun beside."""

    def __init__(self) -> None:
        self.seconds = 100.0
        self.begun: list[Sequence[str]] = []
        super().__init__(used=True, beside=self.begun.append, clock=lambda: self.seconds)

    def look(self, at: int, *, took: float = 0.001, waiting: int | None = None, lost: int | None = None) -> Depth:
        depth = self.reach(["t"], [NOW - 7], thorough=True)
        self.looked(depth, took, at)
        self.left("t", waiting, lost)
        return depth


def test_as_long_as_a_whole_look_is_cheap_each_is_one() -> None:
    known = Known()
    for second in range(3):
        assert known.look(NOW + second, took=0.004) == WHOLE
    assert known.reach(["t"], [5], thorough=False) == Depth({"t": 5}, {"t": 5}, {}, False, False)


def test_after_a_dear_one_a_look_begins_a_little_before_the_last() -> None:
    known = Known()
    known.look(NOW, took=0.02)
    assert known.look(NOW + 1_000) == Depth({"t": NOW - BACK}, {"t": NOW - 7}, {"t": NOW - SLACK}, False, True)
    assert known.look(NOW + 2_000).waiting == {"t": NOW + 1_000 - BACK}
    known.look(NOW + 30_000, waiting=NOW + 7, lost=NOW + 8)
    assert known.look(NOW + 31_000) == Depth({"t": NOW + 7}, {"t": NOW + 7}, {"t": NOW + 8}, False, True), (
        "what was left is due"
    )
    known.told({"t": NOW + 3, "u": NOW})
    assert known.look(NOW + 32_000).waiting == {"t": NOW + 3}


def test_whole_ones_are_made_beside() -> None:
    known = Known()
    known.look(NOW, took=0.02)
    known.look(NOW + 1_000)
    assert known.begun == []
    known.seconds += 0.02 * depths.SHARE
    known.look(NOW + 40_000)
    assert known.begun == [["t"]]
    known.found({"t": (NOW + 5, NOW + 6)}, 0.02)
    assert known.look(NOW + 41_000) == Depth({"t": NOW + 5}, {"t": NOW + 5}, {"t": NOW + 6}, False, True)
    known.found({"t": (None, NOW * 2)}, 0.004)
    assert known.look(NOW + 42_000) == WHOLE, "it is cheap again"


def test_with_another_connection_or_an_earlier_clock_nothing_is_known() -> None:
    known = Known()
    connection = object()
    known.on(connection)
    known.look(NOW, took=0.02)
    known.on(connection)
    assert not known.look(NOW + 1_000).whole
    known.on(object())
    assert known.look(NOW + 2_000, took=0.02).whole
    assert not known.look(NOW).whole
    assert known.look(NOW + 1).whole, "the clock was set back"


def test_a_whole_look_that_was_cut_short_may_take_longer() -> None:
    known = Known()
    for took, patience in ((10.0, 20.0), (20.0, 40.0), (0.001, 40.0), (400.0, 600.0)):
        known.failed(WHOLE, took)
        assert known.patience == patience
    known.look(NOW, took=90.0)
    assert known.patience == 0.0


@pytest.fixture
def always_dear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(depths, "DEAR", 0.0)
    monkeypatch.setattr(depths, "SHARE", 1_000_000_000)


@pytest.mark.real_time
async def test_a_task_whose_transaction_was_open_for_long_and_a_lost_lease_are_found(
    url: str, open_store: OpensStore, always_dear: None
) -> None:
    store, other = await open_store(url, clock="server"), await open_store(url, clock="server")
    await goes_on(store, 1.2)
    async with by_asyncmy(url) as caller:
        verbs = other.using(caller.given)
        await verbs.add([new("open for long", due=In(0))], now=NOW)
        await goes_on(store, 2.5)
        await caller.commit()
    assert [one.key for one in await soon(store)] == ["open for long"]
    await put_one(other, new("lost", due=In(0)))
    [held] = (await lease(other, 1, lasts=2_500)).tasks
    assert held.key == "lost"
    await goes_on(store, 2.0)
    assert [one.key for one in await soon(store)] == ["lost"]


@pytest.mark.real_time
async def test_a_task_that_was_locked_is_found_when_it_is_let_go(
    url: str, open_store: OpensStore, always_dear: None
) -> None:
    store = await open_store(url, clock="server")
    await goes_on(store, 1.2)
    await put_one(store, new("locked", due=In(HOUR)))
    async with by_asyncmy(url) as caller:
        table = f"`{address_of(url).schema}`.bide_task"
        await ask(url, f"UPDATE {{0}}_task SET at = {int(time.time() * 1000)}")
        await caller.execute(f"UPDATE {table} SET created_at = created_at + 1")
        await goes_on(store, 2.0)
        await caller.rollback()
    assert [one.key for one in await soon(store)] == ["locked"]


@pytest.mark.real_time
async def test_what_lies_further_back_is_found_beside(
    url: str, open_store: OpensStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(depths, "DEAR", 0.0)
    monkeypatch.setattr(depths, "SHARE", 1)
    store = await open_store(url, clock="server")
    await goes_on(store, 1.2)
    await put_one(store, new("by hand", due=In(HOUR)))
    await ask(url, f"UPDATE {{0}}_task SET at = {int(time.time() * 1000) - 60_000}")
    assert [one.key for one in await soon(store, 3.0)] == ["by hand"], "it is found by one look, and leased by the next"


@pytest.mark.real_time
async def test_a_worker_that_begins_where_a_whole_look_takes_longer_than_a_call_may_begins_late(
    url: str, open_store: OpensStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(floors, "THOROUGH", 0.0)
    store = await open_store(url, clock="server", silence=1.0)
    await put_one(store, new("before", due=In(0)))
    assert len((await lease(store, 5)).tasks) == 1, "from now on the caller is known"
    await put_one(store, new(due=In(0)))
    timed, looks = Call.timed, []

    async def slow(call: Call, *statements: bytes, commits: bool = False) -> list[object]:
        if any(b"SKIP LOCKED" in one for one in statements):
            looks.append(1)
            await asyncio.sleep(1.3)
        return await timed(call, *statements, commits=commits)  # type: ignore[return-value]

    monkeypatch.setattr(Call, "timed", slow)
    assert [one.key for one in (await lease(store, 5, lasts=MINUTE)).tasks] == ["k"]
    assert len(looks) == 2
