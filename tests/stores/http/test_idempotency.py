"""How long answers are kept, how many, and what is said when they are gone."""

from __future__ import annotations

import asyncio

import pytest

from bide.service.remote.calls import ANSWER_LASTS, SESSION_LASTS, ClientSession, ClientSessions, StaleCall, Work
from bide.service.requests import Reply


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
