"""How long answers are kept, how many, and what is said when they are gone."""

from __future__ import annotations

import asyncio

import pytest

from bide.service.store_repeats import ANSWER_LASTS, SESSION_LASTS, Answered, PassedOver, Repeats, Session, Work


def work_of(size: int, done: list[int]) -> Work:
    async def work() -> Answered:
        done.append(size)
        return Answered(200, b"x" * size, {})

    return work


def begun(repeats: Repeats, who: str = "shop") -> tuple[str, Session]:
    name = repeats.begin(who)
    session = repeats.session(name, who)
    assert session is not None
    return name, session


class Time:
    """The steady clock, moved by hand."""

    now = 1_000.0

    def __call__(self) -> float:
        return self.now


async def test_a_number_is_done_once_and_a_lower_one_never() -> None:
    repeats, done = Repeats(), list[int]()
    _, session = begun(repeats)
    for number in (1, 1, 2, 2, 5):
        answered = await repeats.once(session, "add", number, work_of(number, done))
        assert len(answered.body) == number
    assert done == [1, 2, 5]
    with pytest.raises(PassedOver):
        await repeats.once(session, "add", 4, work_of(4, done))
    await repeats.once(session, "change", 1, work_of(9, done))
    assert done == [1, 2, 5, 9], "each operation has numbers of its own"


async def test_what_is_under_way_is_waited_for_and_the_next_comes_after_it() -> None:
    repeats, order = Repeats(), list[str]()
    _, session = begun(repeats)
    go = asyncio.Event()

    async def slow() -> Answered:
        await go.wait()
        order.append("first")
        return Answered(200, b"1", {})

    async def next_() -> Answered:
        order.append("second")
        return Answered(200, b"2", {})

    first = asyncio.ensure_future(repeats.once(session, "add", 1, slow))
    again = asyncio.ensure_future(repeats.once(session, "add", 1, slow))
    await asyncio.sleep(0)
    first.cancel()
    second = asyncio.ensure_future(repeats.once(session, "add", 2, next_))
    await asyncio.sleep(0)
    go.set()
    assert ((await again).body, (await second).body) == (b"1", b"2")
    assert order == ["first", "second"]
    await repeats.close()


async def test_answers_are_forgotten_when_they_are_old_or_too_many() -> None:
    time, done = Time(), list[int]()
    repeats = Repeats(most_bytes=1_000, clock=time)
    _, one = begun(repeats)
    _, two = begun(repeats)
    await repeats.once(one, "add", 1, work_of(700, done))
    await repeats.once(two, "add", 1, work_of(700, done))
    await repeats.once(two, "change", 1, work_of(1, done))
    with pytest.raises(PassedOver):
        await repeats.once(one, "add", 1, work_of(700, done))
    assert len((await repeats.once(two, "add", 1, work_of(0, done))).body) == 700
    time.now += ANSWER_LASTS
    repeats.begin("shop")
    with pytest.raises(PassedOver):
        await repeats.once(two, "add", 1, work_of(0, done))
    assert done == [700, 700, 1]
    assert repeats._bytes == 0
    assert not repeats._kept


async def test_sessions_are_forgotten_when_they_are_silent_or_too_many() -> None:
    time = Time()
    repeats = Repeats(most_sessions=2, clock=time)
    first, _ = begun(repeats)
    second, _ = begun(repeats)
    assert repeats.session(first, "shop") is not None
    begun(repeats)
    assert repeats.session(second, "shop") is None, "it had been silent for longest"
    assert repeats.session(first, "another") is None
    time.now += SESSION_LASTS
    repeats.begin("shop")
    assert repeats.session(first, "shop") is None


async def test_a_caller_pushes_out_its_own_sessions_and_answers_alone() -> None:
    repeats, done = Repeats(most_sessions=10, most_bytes=1_000), list[int]()
    mine = repeats.begin("shop")
    session = repeats.session(mine, "shop")
    assert session is not None
    await repeats.once(session, "add", 1, work_of(100, done))
    for number in range(100):
        greedy = repeats.session(repeats.begin("greedy"), "greedy")
        assert greedy is not None
        await repeats.once(greedy, "add", number, work_of(200, done))
    assert repeats.session(mine, "shop") is session
    await repeats.once(session, "add", 1, work_of(0, done))
    assert done.count(100) == 1, "the answer is still known"
    assert len(repeats._sessions) <= 10
    assert repeats._bytes <= 1_200
    assert repeats.session(repeats.begin("reader", writes=False), "reader") is None
