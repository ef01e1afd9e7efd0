"""Whatever becomes of a call or of its answer on the way: it is done once, and answered right.

Each story is told once undisturbed. Then again and again, with the connection cut at each message in turn: before the
server has got it, and after it has acted on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest
from tests.stores.sql.database import Database
from tests.stores.sql.fixtures import OpensStore, behind
from tests.stores.stories import (
    Story,
    changes,
    ends_of_every_kind,
    extends,
    leases,
    moves,
    moves_many,
    moves_nobody,
    redrives,
    replaces,
    schedules_many,
    settles_many,
)
from tests.waiting import until

from bide.core.errors import OutcomeUnknown, StoreUnavailable
from bide.core.events import Event, EventKind
from bide.core.instants import In
from bide.core.names import new_id
from bide.core.records import Cancel, Filter, Lease, Page, Ref, Result, State
from bide.ports import Store
from bide.testing.proxy import Act, FaultProxy, PlannedFault
from bide.testing.store_suite.base import HOUR, KEPT, NOW, add_all, change_all, lease, listed, new, put

Opens = Callable[..., Awaitable[Any]]
Call = Callable[[Any], Awaitable[Any]]
"""Of an open store; it may be made again and again."""

_EVENT = Event(at=NOW, topic="t", key="k", id=new_id(), kind=EventKind.CHANGE)

WRITES: dict[str, Call] = {  # and do not look first, which is safe to lose
    "add": lambda store: add_all(store, [new()]),
    "extend": lambda store: store.extend([Lease("t", "nobody", 1)], now=NOW, until=NOW + HOUR),
    "purge": lambda store: store.purge(now=NOW, limit=1),
    "announce": lambda store: store.announce("w", ["t"], NOW + HOUR, now=NOW),
    "record": lambda store: store.record([_EVENT]),
}
READS: dict[str, Call] = {
    "get": lambda store: store.get([Ref("t", "k")]),
    "find": lambda store: store.find(Filter(), Page()),
    "look": lambda store: store.lease({"t": 0}, now=NOW, until=NOW + HOUR, holder="w"),
    "tally": lambda store: store.tally(),
    "events": lambda store: store.events(),
}


async def schedules_in_parts(store: Store, now_it_fails: Callable[[], None]) -> None:
    """More than MySQL inserts by two statements."""
    tasks = [new(f"{number}'", group="g" if number % 2 else None) for number in range(330)]
    now_it_fails()
    answers = await add_all(store, tasks)
    assert {answer.result for answer in answers} == {Result.CREATED}
    assert await store.get([Ref(task.topic, task.key) for task in tasks]) == [answer.record for answer in answers]


STORIES: list[Story] = [
    schedules_many, schedules_in_parts, replaces, moves, moves_many, moves_nobody, changes, redrives, leases,
    settles_many, ends_of_every_kind, extends,
]  # fmt: skip


async def sweep(store: Store) -> None:
    """Nothing is there any more."""
    there = await listed(store, Filter())
    await change_all(store, [Cancel(one.topic, one.key) for one in there if one.state.live])
    await store.purge(now=KEPT, limit=1_000)
    assert await listed(store, Filter()) == []


@pytest.mark.parametrize("act", [Act.CUT, Act.LOSE_REPLY], ids=["never arrived", "answer lost"])
async def test_the_first_call_of_all_is_done_once(act: Act, proxy: FaultProxy, through: Opens) -> None:
    """The server does not know the caller yet: so whatever it was sent was not done."""
    for place in range(20):
        store = await through()
        fault = proxy.fault(act, skip=place)
        answers = await add_all(store, [new("k")])
        await proxy.heal()
        assert [answer.result for answer in answers] == [Result.CREATED]
        assert [one.key for one in await listed(store, Filter())] == ["k"]
        await sweep(store)
        await store.close()
        if not fault.hits:
            break
    else:
        raise AssertionError("the call has no end")
    assert place >= 2, "nothing was cut"


@pytest.mark.parametrize("act", [Act.CUT, Act.LOSE_REPLY], ids=["never arrived", "answer lost"])
@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
async def test_what_is_cut_anywhere_is_done_once(story: Story, act: Act, proxy: FaultProxy, through: Opens) -> None:
    store = await through()
    await story(store, lambda: None)  # every statement is prepared
    for place in range(50):
        await sweep(store)
        planned: list[PlannedFault] = []

        def now_it_fails(skip: int = place, planned: list[PlannedFault] = planned) -> None:
            planned.append(proxy.fault(act, skip=skip))

        try:
            await story(store, now_it_fails)
        except AssertionError as wrong:
            wrong.add_note(f"cut at message {place}")
            raise
        if not planned[0].hits:
            await proxy.heal()
            break
    else:
        raise AssertionError("the story has no end")
    assert place >= 1, "nothing was cut"


def hurry(store: Any) -> None:
    """Its calls give up soon, from now on."""
    for lane in store._open().connections.values():
        lane.patience, lane._silence = 0.3, 0.2


async def test_a_server_that_is_away_is_told(proxy: FaultProxy, through: Opens) -> None:
    store = await through()
    await put(store, new())
    hurry(store)
    await proxy.refuse()
    proxy.cut()
    with pytest.raises((StoreUnavailable, OutcomeUnknown)):  # it may not be known yet that the connection has ended
        await add_all(store, [new("other")])
    with pytest.raises(StoreUnavailable):
        await add_all(store, [new("other")])
    await proxy.accept()
    assert [one.key for one in await listed(await through(), Filter())] == ["k"]


@pytest.mark.parametrize("call", [*WRITES, *READS])
async def test_what_cannot_be_known_is_said_to_be_so(call: str, proxy: FaultProxy, through: Opens) -> None:
    """Also where doing it twice does no harm: a lease may have been extended after all. What only reads did nothing."""
    store = await through()
    await (WRITES | READS)[call](store)
    hurry(store)
    proxy.hold()
    with pytest.raises(OutcomeUnknown if call in WRITES else StoreUnavailable):
        await (WRITES | READS)[call](store)
    await proxy.heal()


@pytest.mark.parametrize("call", WRITES)
async def test_a_refusal_after_a_lost_answer_is_no_proof(
    call: str, database: Database, proxy: FaultProxy, open_store: OpensStore, fresh_url: str
) -> None:
    """The first sending was done, or may have been, and the tables that the second one misses were there then."""
    await database.schema.migrate(fresh_url)
    store = await open_store(behind(proxy, fresh_url), migrate=False)
    await WRITES[call](store)
    await proxy.refuse()
    lost = proxy.fault(Act.LOSE_REPLY)
    calling = asyncio.ensure_future(WRITES[call](store))
    await until(lambda: bool(lost.hits), "the call to be sent")
    await asyncio.to_thread(database.drop, fresh_url)
    await proxy.accept()
    with pytest.raises(OutcomeUnknown, match="an answer was lost"):
        await calling


async def test_an_answer_that_is_repeated_shows_no_later_token(
    proxy: FaultProxy, through: Opens, url: str, open_store: OpensStore
) -> None:
    """Another leases the task between the first answer, which is lost, and the second."""
    store = await through(clock="server")
    other = await open_store(url, clock="server")
    await put(store, new("warm", topic="other"))
    repeated = 0
    for place in range(3):
        connections = proxy.open_connections
        await proxy.refuse()
        lost = proxy.fault(Act.LOSE_REPLY, skip=place)
        adding = asyncio.create_task(add_all(store, [new(f"{place}", due=In(0))]))
        cut = partial(lambda adding, before: adding.done() or proxy.open_connections < before, adding, connections)
        await until(cut, "an answer, or its loss")
        held = (await lease(other)).tasks
        await proxy.heal()
        [answer] = await adding
        if held and lost.hits:
            repeated += 1
            assert answer.record is not None
            assert answer.record.state is State.WAITING
            assert answer.record.token < held[0].token
    assert repeated, "no answer was lost"
