"""Whatever becomes of a call or of its answer on the way: it is done once, and answered right."""

from __future__ import annotations

import asyncio

import pytest
from starlette.responses import Response
from tests.stores.http.serving import Service
from tests.stores.stories import (
    Story,
    extends,
    leases,
    looks,
    moves,
    purges,
    redrives,
    refuses,
    replaces,
    schedules_many,
    settles_many,
)
from tests.waiting import until

from bide.core.errors import OutcomeUnknown, StoreUnavailable
from bide.core.records import Cancel, Ref, Result
from bide.ports import remote
from bide.service.remote import ANSWER_LASTS, SESSION_LASTS, ClientSession, ClientSessions, StaleCall, Work
from bide.service.requests import Reply
from bide.stores.http import HttpStore
from bide.testing.proxy import Act, FaultProxy
from bide.testing.store_suite.base import NOW, do, look, new, put_one

REF = Ref("t", "k")
STORIES: list[Story] = [
    schedules_many, refuses, replaces, moves, redrives, leases, extends, settles_many, purges, looks,
]  # fmt: skip


@pytest.mark.parametrize(
    ("act", "to_server"),
    [(Act.CUT, True), (Act.HOLD, True), (Act.CUT, False), (Act.HOLD, False)],
    ids=["cut", "held", "answer cut", "answer held"],
)
@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
async def test_a_call_that_fails_on_the_way_is_done_once(
    way: FaultProxy, store: HttpStore, story: Story, act: Act, to_server: bool
) -> None:
    faults = []

    def is_a_call(data: bytes) -> bool:
        return not to_server or b"/v1/store/" in data

    await story(store, lambda: faults.append(way.fault(act, to_server=to_server, when=is_a_call)))
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
    with pytest.raises(OutcomeUnknown, match="has restarted"):
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


def work_of(size: int, done: list[int]) -> Work:
    async def work() -> Reply:
        done.append(size)
        return Reply(200, b"x" * size)

    return work


def begun(sessions: ClientSessions, who: str = "shop") -> tuple[str, ClientSession]:
    name = sessions.begin(who)
    session = sessions.session(name, who)
    assert session is not None
    return name, session


class Time:
    """The steady clock, moved by hand."""

    now = 1_000.0

    def __call__(self) -> float:
        return self.now


async def test_a_number_is_done_once_and_a_lower_one_never() -> None:
    sessions, done = ClientSessions(), list[int]()
    _, session = begun(sessions)
    for number in (1, 1, 2, 2, 5):
        answered = await sessions.once(session, "add", number, work_of(number, done))
        assert len(answered.body) == number
    assert done == [1, 2, 5]
    with pytest.raises(StaleCall):
        await sessions.once(session, "add", 4, work_of(4, done))
    await sessions.once(session, "change", 1, work_of(9, done))
    assert done == [1, 2, 5, 9], "each operation has numbers of its own"


async def test_what_is_under_way_is_waited_for_and_the_next_comes_after_it() -> None:
    sessions, order = ClientSessions(), list[str]()
    _, session = begun(sessions)
    go = asyncio.Event()

    async def slow() -> Reply:
        await go.wait()
        order.append("first")
        return Reply(200, b"1")

    async def next_() -> Reply:
        order.append("second")
        return Reply(200, b"2")

    first = asyncio.ensure_future(sessions.once(session, "add", 1, slow))
    again = asyncio.ensure_future(sessions.once(session, "add", 1, slow))
    await asyncio.sleep(0)
    first.cancel()
    second = asyncio.ensure_future(sessions.once(session, "add", 2, next_))
    await asyncio.sleep(0)
    go.set()
    assert ((await again).body, (await second).body) == (b"1", b"2")
    assert order == ["first", "second"]
    await sessions.close()


async def test_answers_are_forgotten_when_they_are_old_or_too_many() -> None:
    time, done = Time(), list[int]()
    sessions = ClientSessions(most_bytes=1_000, clock=time)
    _, one = begun(sessions)
    _, two = begun(sessions)
    await sessions.once(one, "add", 1, work_of(700, done))
    await sessions.once(two, "add", 1, work_of(700, done))
    await sessions.once(two, "change", 1, work_of(1, done))
    with pytest.raises(StaleCall):
        await sessions.once(one, "add", 1, work_of(700, done))
    assert len((await sessions.once(two, "add", 1, work_of(0, done))).body) == 700
    time.now += ANSWER_LASTS
    sessions.begin("shop")
    with pytest.raises(StaleCall):
        await sessions.once(two, "add", 1, work_of(0, done))
    assert done == [700, 700, 1]
    assert sessions._answers.weight == 0


async def test_sessions_are_forgotten_when_they_are_silent_or_too_many() -> None:
    time = Time()
    sessions = ClientSessions(most_sessions=2, clock=time)
    first, _ = begun(sessions)
    second, _ = begun(sessions)
    assert sessions.session(first, "shop") is not None
    begun(sessions)
    assert sessions.session(second, "shop") is None, "it had been silent for longest"
    assert sessions.session(first, "another") is None
    time.now += SESSION_LASTS
    sessions.begin("shop")
    assert sessions.session(first, "shop") is None


async def test_a_caller_pushes_out_its_own_sessions_and_answers_alone() -> None:
    sessions, done = ClientSessions(most_sessions=10, most_bytes=1_000), list[int]()
    mine = sessions.begin("shop")
    session = sessions.session(mine, "shop")
    assert session is not None
    await sessions.once(session, "add", 1, work_of(100, done))
    for number in range(100):
        greedy = sessions.session(sessions.begin("greedy"), "greedy")
        assert greedy is not None
        await sessions.once(greedy, "add", number, work_of(200, done))
    assert sessions.session(mine, "shop") is session
    await sessions.once(session, "add", 1, work_of(0, done))
    assert done.count(100) == 1, "the answer is still known"
    assert len(sessions._sessions) <= 10
    assert sessions._answers.weight <= 1_200
    assert sessions.session(sessions.begin("reader", writes=False), "reader") is None
