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
from tests.servers.mariadb_server import ask
from tests.stores.calls import READS, WRITES, refused_after_a_lost_answer
from tests.stores.mysql.conftest import OpensStore

from bide.core.errors import OutcomeUnknown, StoreUnavailable
from bide.core.names import new_id
from bide.core.records import At, Cancel, Filter, In, Move, OnConflict, Record, Redrive, Result, State
from bide.stores.mysql import MySqlStore
from bide.stores.mysql.address import address_of
from bide.testing.proxy import Act, FaultProxy, PlannedFault
from bide.testing.store_suite.acts import (
    HOUR,
    KEPT,
    NOW,
    bring,
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
    take,
)

pytestmark = pytest.mark.faults

Story = Callable[[MySqlStore, Callable[[], None]], Awaitable[Any]]
"""Prepares, says when faults may come, acts, and tells what was answered."""
Opens = Callable[..., Awaitable[MySqlStore]]


async def schedules(store: MySqlStore, now_it_fails: Callable[[], None]) -> Any:
    await put(store, new("warm", topic="other"))
    now_it_fails()
    return [answer.result for answer in await store.add([new(str(n)) for n in range(5)], now=NOW)]


async def replaces(store: MySqlStore, now_it_fails: Callable[[], None]) -> Any:
    await put(store, new("k", due=At(NOW + HOUR)), new("k", due=At(NOW + HOUR)))
    now_it_fails()
    tasks = [new("k"), new("fresh"), new("k", on_conflict=OnConflict.KEEP)]
    return [(answer.result, answer.was) for answer in await store.add(tasks, now=NOW)]


async def moves(store: MySqlStore, now_it_fails: Callable[[], None]) -> Any:
    await put(store, new("k"), new("l"))
    await do(store, Move("t", "l", In(1)))
    now_it_fails()
    answers = await store.change([Move("t", "k", In(HOUR)), Cancel("t", "l"), Cancel("t", "nobody")], now=NOW)
    return [(answer.result, answer.was) for answer in answers]


async def redrives(store: MySqlStore, now_it_fails: Callable[[], None]) -> Any:
    gone = await bring(store, State.DEAD)
    assert gone is not None
    await do(store, Move("t", "nobody", In(1)))
    now_it_fails()
    return (await do(store, Redrive("t", "k", new_id(), In(0), gone.token))).result


async def leases(store: MySqlStore, now_it_fails: Callable[[], None]) -> Any:
    await put(store, new("warm", topic="other"), new("a"), new("b", due=At(NOW - 1)))
    await take(store, topic="other")
    now_it_fails()
    leased = await lease(store, 5)
    return [(record.key, record.attempt, record.wake_at) for record in leased.tasks]


async def settles(store: MySqlStore, now_it_fails: Callable[[], None]) -> Any:
    held = await _held(store)
    assert await settle(store, done(held.pop()))
    now_it_fails()
    return await store.settle([done(one) for one in held], now=NOW)


async def retries(store: MySqlStore, now_it_fails: Callable[[], None]) -> Any:
    held = await _held(store)
    assert await settle(store, retry(held.pop(), In(5)))
    assert await settle(store, done(held.pop()))
    now_it_fails()
    return await store.settle([retry(held[0], In(7)), done(held[1], keep_until=KEPT), dead(held[2])], now=NOW)


async def extends(store: MySqlStore, now_it_fails: Callable[[], None]) -> Any:
    held = await _held(store)
    assert await extend(store, held[0], until=NOW + HOUR)
    now_it_fails()
    return await store.extend([hold(one) for one in held], now=NOW, until=NOW + HOUR)


async def _held(store: MySqlStore) -> list[Record]:
    await put(store, *(new(str(number)) for number in range(5)))
    return (await lease(store, 5)).tasks


STORIES: list[Story] = [schedules, replaces, moves, redrives, leases, settles, retries, extends]


async def told(story: Story, store: MySqlStore, now_it_fails: Callable[[], None]) -> Any:
    """What was answered, and what is there then; tokens and ids apart."""
    answered = await story(store, now_it_fails)
    left = sorted(
        (one.topic, one.key, one.state, one.wake_at, one.attempt, one.failures) for one in await listed(store, Filter())
    )
    return answered, left


async def sweep(store: MySqlStore) -> None:
    """Nothing is there any more."""
    there = await listed(store, Filter())
    await store.change([Cancel(one.topic, one.key) for one in there if one.state.live], now=NOW)
    await store.purge(now=KEPT, limit=1_000)
    assert await listed(store, Filter()) == []


@pytest.mark.parametrize("act", [Act.CUT, Act.LOSE_REPLY], ids=["never arrived", "answer lost"])
async def test_the_first_call_of_all_is_done_once(act: Act, proxy: FaultProxy, through: Opens) -> None:
    """The server does not know the caller yet: so whatever it was sent was not done."""
    for place in range(20):
        store = await through()
        await sweep(store)
        fault = proxy.fault(act, skip=place)
        answers = await store.add([new("k")], now=NOW)
        await proxy.heal()
        assert [answer.result for answer in answers] == [Result.CREATED]
        assert [one.key for one in await listed(store, Filter())] == ["k"]
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
    await told(story, store, lambda: None)  # every lane is connected
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


async def test_an_answer_that_is_repeated_shows_no_later_token(
    proxy: FaultProxy, through: Opens, url: str, open_store: OpensStore
) -> None:
    """Another leases the task between the first answer, which is lost, and the second."""
    store = await through(clock="server")
    other = await open_store(url, migrate=False, clock="server")
    await put(store, new("warm", topic="other"))
    leased: list[Record] = []
    for place in range(3):
        await proxy.refuse()
        lost = proxy.fault(Act.LOSE_REPLY, skip=place)
        adding = asyncio.create_task(store.add([new(f"{place}", due=In(0))], now=NOW))
        held: list[Record] = []
        for _ in range(20):
            await asyncio.sleep(0.01)
            held = (await lease(other)).tasks
            leased += held
            if held or adding.done():
                break
        await proxy.heal()
        [answer] = await adding
        if held and lost.hits:
            assert answer.record is not None
            assert answer.record.state is State.WAITING
            assert answer.record.token < held[0].token
    assert leased, "the answer came first each time"


async def test_a_server_that_is_away_is_told_in_time(proxy: FaultProxy, through: Opens) -> None:
    store = await through(patience=0.3)
    await put(store, new())
    await proxy.refuse()
    proxy.cut()
    await asyncio.sleep(0.1)  # until it is noticed that the connection has ended
    with pytest.raises(StoreUnavailable):
        await store.add([new("other")], now=NOW)
    await proxy.accept()
    assert [one.key for one in await listed(store, Filter())] == ["k"]


@pytest.mark.parametrize("call", WRITES)
async def test_what_cannot_be_known_is_said_to_be_so(call: str, proxy: FaultProxy, through: Opens) -> None:
    """Also where doing it twice does no harm: a lease may have been extended after all."""
    store = await through(patience=0.3, silence=0.2)
    await WRITES[call](store)
    proxy.hold()
    with pytest.raises(OutcomeUnknown):
        await WRITES[call](store)
    await proxy.heal()


@pytest.mark.parametrize("call", WRITES)
async def test_a_refusal_after_a_lost_answer_is_no_proof(
    call: str, proxy: FaultProxy, through: Opens, url: str
) -> None:
    """The first sending was done, or may have been, and the tables that the second one misses were there then."""
    drop = partial(ask, url, f"DROP DATABASE `{address_of(url).schema}`")
    await refused_after_a_lost_answer(WRITES[call], await through(), proxy, drop)


@pytest.mark.parametrize("call", READS)
async def test_what_only_reads_has_done_nothing(call: str, proxy: FaultProxy, through: Opens) -> None:
    store = await through(patience=0.3, silence=0.2)
    await READS[call](store)
    proxy.hold()
    with pytest.raises(StoreUnavailable):
        await READS[call](store)
    await proxy.heal()
