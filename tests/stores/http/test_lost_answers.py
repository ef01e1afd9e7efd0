"""Whatever becomes of a call or of its answer on the way: it is done once, and answered right."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from msgspec import Raw
from starlette.responses import Response
from tests.stores.http.serving import Service
from tests.waiting import until

from bide.core.errors import OutcomeUnknown, StoreUnavailable
from bide.core.instants import At, In
from bide.core.names import new_id
from bide.core.records import Cancel, Filter, Move, OnConflict, Redrive, Ref, Result, State
from bide.ports import remote
from bide.stores.http import HttpStore
from bide.testing.proxy import Act, FaultProxy
from bide.testing.store_suite.base import (
    HOUR,
    NOW,
    bring,
    do,
    done,
    extend,
    keys,
    lease,
    listed,
    look,
    new,
    put,
    put_one,
    see,
    settle,
    take,
)

REF = Ref("t", "k")
Story = Callable[[HttpStore, Callable[[], None]], Awaitable[None]]
"""Prepares, says when the fault is to come, acts, and checks that the act was done once and answered right."""


async def schedules(store: HttpStore, now_it_fails: Callable[[], None]) -> None:
    now_it_fails()
    tasks = [new(on_conflict=OnConflict.REFUSE), new(on_conflict=OnConflict.REFUSE)]
    answers = await store.add(tasks, now=NOW)
    assert [answer.result for answer in answers] == [Result.CREATED, Result.REFUSED]


async def moves(store: HttpStore, now_it_fails: Callable[[], None]) -> None:
    before = await put_one(store)
    now_it_fails()
    answer = await do(store, Move("t", "k", At(NOW + HOUR), if_token=before.token))
    assert (answer.result, answer.was) == (Result.MOVED, NOW), "its own doing has not made its token stale"


async def cancels(store: HttpStore, now_it_fails: Callable[[], None]) -> None:
    await put_one(store)
    now_it_fails()
    answer = await do(store, Cancel("t", "k"))
    assert answer.result is Result.CANCELLED, "and not that it was never there"
    assert await look(store, REF) is None


async def redrives(store: HttpStore, now_it_fails: Callable[[], None]) -> None:
    await bring(store, State.DEAD)
    now_it_fails()
    assert (await do(store, Redrive("t", "k", new_id(), In(0)))).result is Result.REDRIVEN


async def leases(store: HttpStore, now_it_fails: Callable[[], None]) -> None:
    await put(store, *(new(f"{number:03}") for number in range(100)))
    now_it_fails()
    leased = await lease(store, 1_000)
    assert sorted(keys(leased.tasks)) == [f"{number:03}" for number in range(100)]
    assert {(task.attempt, task.losses) for task in leased.tasks} == {(1, 0)}, "nothing was leased in vain"


async def extends(store: HttpStore, now_it_fails: Callable[[], None]) -> None:
    await put_one(store)
    held = await take(store)
    now_it_fails()
    assert await extend(store, held, until=NOW + HOUR)
    assert (await see(store, held)).wake_at == NOW + HOUR


async def settles(store: HttpStore, now_it_fails: Callable[[], None]) -> None:
    await put_one(store)
    held = await take(store)
    now_it_fails()
    assert await settle(store, done(held)), "and not that the lease is gone, which this call itself has ended"


async def looks(store: HttpStore, now_it_fails: Callable[[], None]) -> None:
    await put_one(store)
    now_it_fails()
    assert [record.key for record in await listed(store, Filter())] == ["k"]


STORIES: list[Story] = [schedules, moves, cancels, redrives, leases, extends, settles, looks]


@pytest.mark.parametrize("act", [Act.CUT, Act.LOSE_REPLY, Act.HOLD], ids=lambda act: act.value)
@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
async def test_a_call_that_fails_on_the_way_is_done_once(
    way: FaultProxy, store: HttpStore, story: Story, act: Act
) -> None:
    faults = []
    await story(store, lambda: faults.append(way.fault(act, when=lambda data: b"/v1/store/" in data)))
    assert faults[0].hits == 1


@pytest.mark.parametrize("act", [Act.CUT, Act.HOLD], ids=lambda act: act.value)
@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
async def test_an_answer_that_is_lost_is_given_again(way: FaultProxy, store: HttpStore, story: Story, act: Act) -> None:
    faults = []
    await story(store, lambda: faults.append(way.fault(act, to_server=False)))
    assert faults[0].hits == 1


async def test_the_answer_of_a_restarted_service_is_that_it_does_not_know(
    way: FaultProxy, service: Service, store: HttpStore
) -> None:
    await put_one(store, new("before"))
    way.fault(Act.LOSE_REPLY, when=lambda data: b"/v1/store/add" in data)
    await way.refuse()  # so that it is not sent again before the service has been restarted
    asked = len(service.asked)
    adding = asyncio.ensure_future(store.add([new("lost")], now=NOW))
    await until(lambda: len(service.asked) > asked, "the call to be there")
    await service.restart()
    await way.accept()
    with pytest.raises(OutcomeUnknown, match="begun anew"):
        await adding
    assert (await put_one(store, new("after"))).key == "after", "in a session of its own"
    assert await look(store, Ref("t", "lost")) is not None, "it had been done, and was not done again"


async def test_a_call_that_was_never_sent_goes_to_the_restarted_service(service: Service, store: HttpStore) -> None:
    await put_one(store, new("before"))
    await service.restart()
    assert (await put_one(store, new("after"))).key == "after"
    assert (await do(store, Cancel("t", "before"))).result is Result.CANCELLED


def impatient(store: HttpStore) -> None:
    """From now on it gives up after a moment."""
    assert store._opened is not None
    store._opened.calls._patience = 0.1


async def test_nobody_there_means_that_nothing_was_done(way: FaultProxy, store: HttpStore) -> None:
    await way.refuse()
    way.cut()
    impatient(store)
    with pytest.raises(StoreUnavailable):
        await store.get([REF])  # after which it is known that there is no connection
    with pytest.raises(StoreUnavailable):
        await store.add([new()], now=NOW)
    await way.accept()
    assert await look(store, REF) is None


async def test_what_is_swallowed_for_longer_than_one_waits_is_unknown(way: FaultProxy, store: HttpStore) -> None:
    await put_one(store)
    way.hold()
    impatient(store)
    with pytest.raises(OutcomeUnknown):
        await do(store, Cancel("t", "k"))
    with pytest.raises(StoreUnavailable):
        await store.get([REF])


async def test_a_slow_service_is_waited_for_and_does_it_once(service: Service, store: HttpStore) -> None:
    slow = asyncio.Event()
    times = 0

    async def wait(operation: str) -> None:
        nonlocal times
        times += operation == "change"
        if operation == "change" and times == 2:  # the first was given up, and goes on all the same
            slow.set()
        await (slow.wait() if operation == "change" else asyncio.sleep(0))

    await put_one(store)
    service.before = wait
    assert (await do(store, Cancel("t", "k"))).result is Result.CANCELLED
    assert times >= 2


@pytest.mark.parametrize(
    "garbage",
    [
        Response(b"\xc1", media_type=remote.CONTENT_TYPE),
        Response(b"\x91", media_type=remote.CONTENT_TYPE),
        Response(b"<html>", media_type="text/html"),
        Response(b"Bad Gateway", 502),
        Response(b"Slow down", 429),
    ],
    ids=["no msgpack", "cut short", "a page", "a proxy", "a limit"],
)
async def test_garbage_is_asked_again_and_the_call_is_done_once(
    service: Service, store: HttpStore, garbage: Response
) -> None:
    await put_one(store)
    answers = [garbage, garbage]

    async def instead(operation: str) -> Response | None:
        return answers.pop() if answers else None

    service.before = instead
    assert (await do(store, Cancel("t", "k"))).result is Result.CANCELLED


async def test_garbage_for_ever_is_unknown(service: Service, store: HttpStore) -> None:
    async def instead(operation: str) -> Response | None:
        return Response(b"\x00" * 100, media_type=remote.CONTENT_TYPE)

    service.before = instead
    impatient(store)
    with pytest.raises(OutcomeUnknown):
        await store.add([new()], now=NOW)
    with pytest.raises(StoreUnavailable):
        await store.tally()


async def test_an_answer_of_the_wrong_shape_is_unknown(service: Service, store: HttpStore) -> None:
    async def instead(operation: str) -> Response | None:
        success = remote.encode(remote.Success(1, Raw(remote.encode([True, False]))))
        return Response(success, media_type=remote.CONTENT_TYPE)

    service.before = instead
    with pytest.raises(OutcomeUnknown):
        await store.add([new()], now=NOW)
