"""Whatever becomes of a call or of its answer on the way: it is done once, and answered right.

Each story is told once undisturbed. Then again and again, with the connection cut at each message in turn: before the
server has got it, and after it has acted on it. The end is the same every time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest
from tests.stores.sql.calls import READS, WRITES, refused_after_a_lost_answer
from tests.stores.sql.database import Database
from tests.stores.sql.fixtures import OpensStore, behind
from tests.waiting import until

from bide.core.errors import OutcomeUnknown, StoreUnavailable
from bide.core.instants import At, In
from bide.core.names import new_id
from bide.core.records import Cancel, Filter, Move, OnConflict, Record, Redrive, Result, State
from bide.ports import Store
from bide.testing.proxy import Act, FaultProxy, PlannedFault
from bide.testing.store_suite.base import (
    HOUR,
    KEPT,
    NOW,
    add_all,
    bring,
    change_all,
    dead,
    do,
    done,
    extend,
    hold,
    lease,
    listed,
    new,
    put,
    retry,
    settle,
    settle_all,
    take,
)

Story = Callable[[Store, Callable[[], None]], Awaitable[Any]]
"""Prepares, says when faults may come, acts, and tells what was answered."""
Opens = Callable[..., Awaitable[Any]]


async def schedules(store: Store, now_it_fails: Callable[[], None]) -> Any:
    await put(store, new("warm", topic="other"))
    now_it_fails()
    return [answer.result for answer in await add_all(store, [new(str(n)) for n in range(5)])]


async def replaces(store: Store, now_it_fails: Callable[[], None]) -> Any:
    await put(store, new("k", due=At(NOW + HOUR)), new("k", due=At(NOW + HOUR)))
    now_it_fails()
    tasks = [new("k"), new("fresh"), new("k", on_conflict=OnConflict.KEEP)]
    return [(answer.result, answer.was) for answer in await add_all(store, tasks)]


async def moves(store: Store, now_it_fails: Callable[[], None]) -> Any:
    await put(store, new("k"), new("l"))
    await do(store, Move("t", "l", In(1)))
    now_it_fails()
    answers = await change_all(store, [Move("t", "k", In(HOUR)), Cancel("t", "l"), Cancel("t", "nobody")])
    return [(answer.result, answer.was) for answer in answers]


async def moves_alone(store: Store, now_it_fails: Callable[[], None]) -> Any:
    await put(store, new("k", payload=b"\0\xff", group="g"), new("l"), new("m", deadline=NOW + 5))
    await do(store, Move("t", "l", In(1)))
    now_it_fails()
    moves = [Move("t", key, In(HOUR)) for key in ("k", "nobody", "m", "l", "k")]
    answers = await change_all(store, moves)
    return [(one.result, one.was, one.record and (one.record.payload, one.record.group)) for one in answers]


async def redrives(store: Store, now_it_fails: Callable[[], None]) -> Any:
    gone = await bring(store, State.DEAD)
    assert gone is not None
    await do(store, Move("t", "nobody", In(1)))
    now_it_fails()
    return (await do(store, Redrive("t", "k", new_id(), In(0), gone.token))).result


async def leases(store: Store, now_it_fails: Callable[[], None]) -> Any:
    await put(store, new("warm", topic="other"), new("a"), new("b", due=At(NOW - 1)))
    await take(store, topic="other")
    now_it_fails()
    leased = await lease(store, 5)
    return [(record.key, record.attempt, record.wake_at) for record in leased.tasks]


async def settles(store: Store, now_it_fails: Callable[[], None]) -> Any:
    held = await _held(store)
    assert await settle(store, done(held.pop()))
    now_it_fails()
    return await settle_all(store, [done(one) for one in held])


async def retries(store: Store, now_it_fails: Callable[[], None]) -> Any:
    held = await _held(store)
    assert await settle(store, retry(held.pop(), In(5)))
    assert await settle(store, done(held.pop()))
    now_it_fails()
    return await settle_all(store, [retry(held[0], In(7)), done(held[1], keep_until=KEPT), dead(held[2])])


async def extends(store: Store, now_it_fails: Callable[[], None]) -> Any:
    held = await _held(store)
    assert await extend(store, held[0], until=NOW + HOUR)
    now_it_fails()
    return await store.extend([hold(one) for one in held], now=NOW, until=NOW + HOUR)


async def _held(store: Store) -> list[Record]:
    await put(store, *(new(str(number)) for number in range(5)))
    return (await lease(store, 5)).tasks


STORIES: list[Story] = [schedules, replaces, moves, moves_alone, redrives, leases, settles, retries, extends]


async def told(story: Story, store: Store, now_it_fails: Callable[[], None]) -> Any:
    """What was answered, and what is there then; tokens and ids apart."""
    answered = await story(store, now_it_fails)
    left = sorted(
        (one.topic, one.key, one.state, one.wake_at, one.attempt, one.failures) for one in await listed(store, Filter())
    )
    return answered, left


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
    await told(story, store, lambda: None)  # every statement is prepared
    await sweep(store)
    undisturbed = await told(story, store, lambda: None)
    for place in range(50):
        await sweep(store)
        planned: list[PlannedFault] = []

        def now_it_fails(skip: int = place, planned: list[PlannedFault] = planned) -> None:
            planned.append(proxy.fault(act, skip=skip))

        assert await told(story, store, now_it_fails) == undisturbed, f"cut at message {place}"
        [fault] = planned
        if not fault.hits:
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


@pytest.mark.parametrize("call", WRITES)
async def test_what_cannot_be_known_is_said_to_be_so(call: str, proxy: FaultProxy, through: Opens) -> None:
    """Also where doing it twice does no harm: a lease may have been extended after all."""
    store = await through()
    await WRITES[call](store)
    hurry(store)
    proxy.hold()
    with pytest.raises(OutcomeUnknown):
        await WRITES[call](store)
    await proxy.heal()


@pytest.mark.parametrize("call", WRITES)
async def test_a_refusal_after_a_lost_answer_is_no_proof(
    call: str, database: Database, proxy: FaultProxy, open_store: OpensStore, fresh_url: str
) -> None:
    """The first sending was done, or may have been, and the tables that the second one misses were there then."""
    await database.schema.migrate(fresh_url)
    store = await open_store(behind(proxy, fresh_url), migrate=False)
    await refused_after_a_lost_answer(WRITES[call], store, proxy, partial(database.drop, fresh_url))


@pytest.mark.parametrize("call", READS)
async def test_what_only_reads_has_done_nothing(call: str, proxy: FaultProxy, through: Opens) -> None:
    store = await through()
    await READS[call](store)
    hurry(store)
    proxy.hold()
    with pytest.raises(StoreUnavailable):
        await READS[call](store)
    await proxy.heal()


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
