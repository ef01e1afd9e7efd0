"""How deliveries end: by outcomes, exceptions and cancellation, in the executor, and what is told of the dead."""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import pytest
from tests.engine.conftest import World, nothing, stores, task_of, virtual
from tests.engine.test_loops_and_forks import forks, in_a_child, quietly
from tests.waiting import PATIENCE, elapse, forever, until

from bide import Bide, Dead, Defer, Done, Retry, SetupError, StoreUnavailable, Task
from bide.core.outcomes import Outcome
from bide.testing import TimeMachine


class Panic(BaseException):
    """As bindings to other languages raise it."""


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


class Proxy(Exception):
    def __getattribute__(self, name: str) -> Any:
        raise EOFError("far away")


class Own(Retry):
    def __init__(self) -> None:
        """Without what a Retry has."""


@dataclass
class Order:
    number: int


def leave() -> None:
    sys.exit(3)


def throw(error: BaseException) -> Callable[[], None]:
    def thrown() -> None:
        raise error

    return thrown


ODD: list[tuple[Callable[[], object], str]] = [
    (throw(Retry(ConnectionError("x"))), "ConnectionError: x"),
    (lambda: Dead(404), "404"),
    (throw(Mute()), "Mute: Mute()"),
    (throw(Proxy("far away")), ": far away"),
    (throw(ValueError(b"caf\xe9".decode("utf-8", "surrogateescape"))), "ValueError: caf\\udce9"),
    (throw(Panic("no more")), "Panic: no more"),
    (throw(GeneratorExit()), "GeneratorExit"),
    (throw(StopIteration()), "StopIteration"),
    (leave, "SystemExit: 3"),
    (throw(Own()), "AttributeError"),
    (lambda: Outcome, "TypeError: the handler returned the class Outcome"),
]
NAMES = [
    "retry an error", "dead by number", "mute", "proxy", "surrogate", "panic", "generator", "stop", "exit", "own",
    "class",
]  # fmt: skip


@pytest.mark.parametrize("plain", [False, True], ids=["coroutine", "plain"])
@pytest.mark.parametrize(("odd", "said"), ODD, ids=NAMES)
@virtual
async def test_whatever_a_handler_does_ends_its_own_task_only(
    world: World, odd: Callable[[], object], said: str, *, plain: bool
) -> None:
    app = world.app()

    def act(task: Task[Any]) -> Any:
        return odd() if task.key.startswith("odd") else None

    async def awaited(task: Task[Any]) -> Any:
        await asyncio.sleep(0)
        return act(task)

    app.handler("work", concurrency=2, retry="never")(act if plain else awaited)
    async with app, app.worker() as worker:
        await app.schedule_many([app.new("work", None, key=f"odd {n}", delay="0s") for n in range(4)])
        await app.schedule_many([app.new("work", None, key=f"good {n}", delay="0s") for n in range(4)])
        await worker.until_empty()
        assert (worker.stats.done, worker.stats.dead, worker.stats.lost) == (4, 4, 0)
        assert worker._executors["work"].free == 2
        for task in [task async for task in app.find(state="dead")]:
            assert said in (task.error or "")


@pytest.mark.parametrize(
    ("ends", "state", "said"),
    [
        ([Dead("closed")], "dead", "closed"),
        ([Done()], "done", None),
        ([Dead("closed"), ValueError("other")], "dead", "ExceptionGroup: "),
        ([ValueError("other")], "dead", "ExceptionGroup: "),
    ],
    ids=["dead", "done", "two", "an error"],
)
@virtual
async def test_an_outcome_raised_in_a_task_group_counts_if_it_is_alone(
    world: World, ends: list[Exception], state: str, said: str | None
) -> None:
    app = world.app(keep_done="1h")

    async def part(end: Exception) -> None:
        raise end

    @app.handler("work", retry="never")
    async def work(task: Task[Any]) -> None:
        async with asyncio.TaskGroup() as outer, asyncio.TaskGroup() as inner:
            outer.create_task(forever())
            for end in ends:
                inner.create_task(part(end))

    async with app, app.worker() as worker:
        await work.schedule(None, key="k", delay="0s")
        await worker.until_empty()
        task = await task_of(app, "work", "k")
    assert task.state == state
    assert (task.error or "").startswith(said or "")


RAN: list[str] = []


async def effect(task: Task[Any]) -> Dead:
    await asyncio.sleep(0)
    RAN.append(task.key)
    return Dead("as its outcome says")


def plain_effect(task: Task[Any]) -> Dead:
    RAN.append(task.key)
    return Dead("as its outcome says")


@wraps(plain_effect)
async def async_over_plain(task: Task[Any]) -> Dead:
    return plain_effect(task)


@wraps(effect)
def plain_over_async(task: Task[Any]) -> Dead:
    return plain_effect(task)


@wraps(effect)
def plain_passing_on(task: Task[Any]) -> Any:
    return effect(task)


async def unawaited(task: Task[Any]) -> Any:
    return effect(task)


@pytest.mark.parametrize(
    "function",
    [async_over_plain, plain_over_async, plain_passing_on, unawaited, lambda task: effect(task)],
    ids=["async over plain", "plain over async", "plain passing on", "unawaited", "lambda"],
)
@virtual
async def test_a_handler_runs_to_its_end_however_it_is_wrapped(world: World, function: Any) -> None:
    app = world.app()
    app.handler("work", retry="never")(function)
    RAN.clear()
    async with app, app.worker() as worker:
        await app.schedule("work", None, key="k", delay="0s")
        await worker.until_empty()
        task = await task_of(app, "work", "k")
    assert (RAN, task.error) == (["k"], "as its outcome says")


class AsyncCallable:
    """An object that is called with orders."""

    async def __call__(self, task: Task[Order]) -> None:
        RAN.append(f"{task.payload.number}")


class PlainCallable:
    def __call__(self, task: Task[Order]) -> None:
        RAN.append(f"{task.payload.number}")


async def with_more(more: list[str], task: Task[Order]) -> None:
    more.append(f"{task.payload.number}")


@pytest.mark.parametrize(
    "function",
    [AsyncCallable(), PlainCallable(), partial(with_more, RAN), partial(partial(with_more), RAN)],
    ids=["object", "plain object", "partial", "partial of a partial"],
)
async def test_an_object_and_a_partial_function_are_handlers_too(function: Any) -> None:
    app = Bide("memory:")
    work = app.handler("work")(function)
    RAN.clear()
    async with app, app.worker() as worker:
        await work.schedule(Order(42), delay="0s")
        await worker.until_empty()
    assert RAN == ["42"]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize(
    "outcome", [Done(), Done(again_in="1h"), Defer("1m"), Retry("why", delay="5s"), Retry(), Dead("no")], ids=repr
)
def test_an_outcome_may_cross_to_another_process(outcome: Outcome, protocol: int) -> None:
    again = pickle.loads(pickle.dumps(outcome, protocol))
    assert (type(again), again.args, vars(again)) == (type(outcome), outcome.args, vars(outcome))


def yields(task: Task[Any]) -> Any:
    yield task


async def yields_later(task: Task[Any]) -> Any:
    yield task


@pytest.mark.parametrize("function", [yields, yields_later])
async def test_a_generator_which_would_run_nothing_is_refused(function: Any) -> None:
    app = Bide("memory:")
    with pytest.raises(SetupError, match=f"{function.__name__} is a generator function"):
        app.handler("work")(function)
    app.handler("hidden", retry="never")(lambda task: function(task))
    async with app, app.worker() as worker:
        await app.schedule("hidden", None, key="k", delay="0s")
        await worker.until_empty()
        task = await task_of(app, "hidden", "k")
    assert task.error == f"TypeError: the handler returned the generator {function.__name__}, which has not run"


def test_an_interrupt_from_the_keyboard_ends_the_program_and_is_no_failure() -> None:
    left: list[tuple[str, int, int]] = []

    async def main() -> None:
        app = Bide("memory:")

        @app.handler("work", concurrency=1)
        async def work(task: Task[Any]) -> None:
            raise KeyboardInterrupt

        async with app:
            try:
                async with app.worker():
                    await work.schedule(None, key="k", delay="0s")
                    await forever()
            finally:
                task = await task_of(app, "work", "k")
                left.append((task.state, task.attempt, task.failures))

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())
    assert left == [("waiting", 0, 0)]


@stores("sqlite", "redis", "postgres", "mysql")
async def test_an_error_of_any_text_takes_no_other_outcome_along(store_url: str) -> None:
    app = Bide(store_url)
    gate = asyncio.Event()

    @app.handler("work", retry="never")
    async def work(task: Task[Any]) -> None:
        await gate.wait()
        if task.key == "bad":
            raise ValueError("cannot read " + b"caf\xe9\0.txt".decode("utf-8", "surrogateescape"))

    async with app, app.worker() as worker:
        await app.schedule_many([work.new(None, key=key, delay="0s") for key in ("bad", *"abcdefgh")])
        await until(lambda: len(worker._executors["work"].running) == 9, "all to run")
        gate.set()
        await worker.until_empty()
        assert (worker.stats.done, worker.stats.dead, worker.stats.lost) == (8, 1, 0)
        task = await task_of(app, "work", "bad")
        assert task.error == "ValueError: cannot read caf\\udce9\\x00.txt"


@virtual
async def test_a_defect_at_one_outcome_falls_on_that_one_alone(world: World, caplog: pytest.LogCaptureFixture) -> None:
    app = world.app(lease="9s")
    settle, asked = world.memory.settle, 0

    async def defective(outcomes: Any, *, now: int) -> Any:
        nonlocal asked
        asked += 1
        if asked == 3:
            raise StoreUnavailable("away for a moment")
        if any(one.key == "bad" for one in outcomes) and world.elapsed < 1_000:
            raise TypeError("cannot be written")
        return await settle(outcomes, now=now)

    world.memory.settle = defective  # type: ignore[method-assign]
    runs: list[str] = []

    @app.handler("work")
    async def work(task: Task[Any]) -> None:
        runs.append(task.key)

    async with app, app.worker() as worker:
        await app.schedule_many([work.new(None, key=key, delay="0s") for key in ("bad", *"abcd")])
        await worker.until_empty()
        assert (worker.stats.done, worker.stats.lost) == (5, 0)
        assert sorted(runs) == ["a", "b", "bad", "bad", "c", "d"]
        assert world.elapsed >= 9_000, "the lease of the one has ended by itself"
    assert "the outcome of work/bad cannot be kept" in caplog.text


@virtual
async def test_an_observer_that_raises_is_told_of_the_next_all_the_same(world: World) -> None:
    app, told = world.app(), list[str]()
    work = app.handler("work")(nothing)

    def observe(record: Any, outcome: Any) -> None:
        told.append(record.key)
        raise ValueError("a defect of the observer")

    async with app, app.worker(observe=observe) as worker:
        await app.schedule_many([work.new(None, delay="0s") for _ in range(5)])
        await worker.until_empty()
        assert (len(told), worker.stats.done) == (5, 5)


@forks
@quietly
def test_a_forked_child_runs_plain_handlers_in_threads_of_its_own() -> None:
    app, ran = Bide("memory:"), list[int]()

    @app.handler("work")
    def work(task: Task[Any]) -> None:
        ran.append(os.getpid())

    async def main() -> None:
        async with app, app.worker() as worker:
            await work.schedule(None, delay="0s")
            await worker.until_empty()

    def again() -> bool:
        asyncio.run(main())
        return ran[1:] == [os.getpid()]

    asyncio.run(main())
    assert in_a_child(again)


class Shop:
    """A handler that ends as it is told, and what its hooks heard."""

    def __init__(self) -> None:
        self.app = Bide("memory:")
        self.end: BaseException | None = None
        self.told: list[tuple[Any, str, str]] = []

        @self.app.on_dead("order.refund")  # before the handler is declared: the order does not matter
        async def first(task: Task[Order]) -> None:
            self.told.append((task.payload, task.state, task.error or ""))

        @self.app.handler("order.refund", retry="never", losses=1)
        async def refund(task: Task[Order]) -> None:
            if self.end is not None:
                raise self.end

        self.refund = refund


@pytest.fixture
def shop() -> Shop:
    return Shop()


@pytest.mark.parametrize(
    ("end", "error"),
    [
        (Dead("no such bank"), "no such bank"), (OSError("away"), "OSError: away"),
        (Defer("1d"), "deadline: deferred"), (None, "deadline: not after"),
    ],
    ids=["dead", "failed", "deferred", "before any handler saw it"],
)  # fmt: skip
async def test_a_death_is_told_in_the_type_that_the_hook_was_declared_with(
    shop: Shop, end: BaseException | None, error: str
) -> None:
    shop.end = end
    async with TimeMachine(shop.app) as machine:
        await shop.refund.schedule(Order(42), key="42", delay="0s", deadline="1h")
        if end is None:
            await machine.pass_unattended("2h")
        await machine.advance("0s")
    [(payload, state, why)] = shop.told
    assert (payload, state) == (Order(42), "dead")
    assert why.startswith(error)


async def test_a_payload_that_nobody_could_read_is_told_as_it_is(shop: Shop) -> None:
    async with TimeMachine(shop.app) as machine:
        await shop.app.schedule("order.refund", b'{"number": "forty-two"}', key="42", delay="0s")
        await machine.advance("0s")
    [(payload, _, why)] = shop.told
    assert payload == {"number": "forty-two"}
    assert "Expected `int`" in why


@pytest.mark.parametrize("error", [KeyError("in the hook"), SystemExit(3)], ids=["error", "exit"])
async def test_a_hook_that_fails_stops_nobody(
    shop: Shop, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    def second(task: Task[Order]) -> None:
        raise error

    assert shop.app.on_dead("order.refund")(second) is second

    @shop.app.on_dead("order.refund")
    def third(task: Task[Order]) -> None:
        shop.told.append((task.payload, "third", ""))

    shop.end = Dead("no such bank")
    async with TimeMachine(shop.app) as machine:
        await shop.refund.schedule(Order(42), key="42", delay="0s")
        await machine.advance("0s")
    assert sorted(state for _, state, _ in shop.told) == ["dead", "third"]
    assert "on_dead hook for order.refund/42 failed" in caplog.text


async def test_a_plain_hook_runs_in_a_thread_where_it_may_block(shop: Shop) -> None:
    threads, answers = list[threading.Thread](), list[str]()

    @shop.app.on_dead("order.refund")
    def apologize(task: Task[Order]) -> None:
        threads.append(threading.current_thread())
        answers.append(shop.app.sync.schedule("order.apologize", 1, key=task.key, delay="1h").result)

    shop.end = Dead("no such bank")
    async with shop.app, shop.app.worker() as worker:
        await shop.refund.schedule(Order(42), key="42", delay="0s")
        await worker.until_empty()
        await until(lambda: answers, "the hook to end")
    assert threads != [threading.main_thread()]
    assert answers == ["created"]


@virtual
async def test_a_hook_that_never_ends_has_no_longer_than_the_grace(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    app = world.app(grace="30s")
    app.on_dead("work")(lambda task: forever())

    @app.handler("work")
    async def work(task: Task[Any]) -> None:
        raise Dead("at once")

    async with app:
        before = asyncio.all_tasks()
        async with app.worker() as worker:
            await work.schedule(None, key="k", delay="0s")
            await worker.until_empty()
        assert asyncio.all_tasks() == before
        assert world.elapsed == pytest.approx(30_000, abs=100)
    assert "on_dead hook for work/k is cut off" in caplog.text


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "in the middle of a handler"])
def test_a_program_ends_although_its_worker_was_never_stopped(busy: bool) -> None:
    """As after a failed test or an error in `main`: asyncio.run cancels every task once, and waits for all of them."""
    ended = threading.Event()

    async def main() -> None:
        app, running = Bide("memory:"), asyncio.Event()

        @app.handler("work")
        async def work(task: Task[Any]) -> None:
            running.set()
            await (forever() if busy else asyncio.sleep(0))

        await app.open()
        worker = await app.worker().__aenter__()
        for _ in range(3):
            await work.schedule(None, delay="0s")
        await running.wait()
        await until(lambda: busy or worker.stats.done == 3, "all three to be done")

    def program() -> None:
        asyncio.run(main())
        ended.set()

    threading.Thread(target=program, daemon=True).start()
    assert ended.wait(PATIENCE)


async def test_runners_that_somebody_cancels_are_replaced() -> None:
    app, seen = Bide("memory:"), list[str]()

    @app.handler("work", concurrency=2)
    async def work(task: Task[Any]) -> None:
        seen.append(task.key)
        await asyncio.sleep(0)

    async with app, app.worker() as worker:
        for number in range(5):
            await work.schedule(None, key=f"{number}", delay="0s")
            await worker.until_empty()
            for runner in list(worker._executors["work"]._runners):
                runner.cancel()
    assert seen == ["0", "1", "2", "3", "4"]


@virtual
async def test_a_handler_that_takes_no_cancel_holds_up_nobodys_end(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    app, cancels, may_end = world.app(grace="1s"), list[int](), False

    @app.handler("deaf")
    async def deaf(task: Task[Any]) -> None:
        while not may_end:
            try:
                await elapse(0.5)
            except asyncio.CancelledError:
                cancels.append(world.elapsed)

    async with app:
        async with app.worker() as worker:
            await deaf.schedule(None, key="k", delay="0s")
            await world.until(lambda: worker.stats.leased == 1)
        assert world.elapsed < 10_000
        may_end = True
        await elapse(1)
        task = await task_of(app, "deaf", "k")
        assert (task.state, task.attempt, worker.stats.delivered) == ("leased", 1, 0)
    assert cancels
    assert "deaf/k goes on although it was cancelled" in caplog.text


async def test_a_worker_that_cannot_start_leaves_nothing_behind() -> None:
    app = Bide("memory:")
    app.handler("work")(nothing)
    async with app:
        before = asyncio.all_tasks()

        async def refused(*asked: Any) -> None:
            raise StoreUnavailable("it cannot be listened to")

        app.store.listen = refused  # type: ignore[attr-defined]
        with pytest.raises(StoreUnavailable):
            await app.worker().__aenter__()
        assert asyncio.all_tasks() == before
