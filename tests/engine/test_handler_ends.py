"""Whatever a handler raises or returns becomes the outcome of its own task, and of no other."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from tests.engine.conftest import stores
from tests.waiting import PATIENCE, forever, until

from bide import Bide, Dead, Retry, StoreUnavailable, Task
from bide.core.outcomes import Outcome

if TYPE_CHECKING:
    from tests.engine.conftest import Tell, World


class Panic(BaseException):
    """As bindings to other languages raise it."""


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


class Own(Retry):
    def __init__(self) -> None:
        """Without what a Retry has."""


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
    (throw(ValueError(b"caf\xe9".decode("utf-8", "surrogateescape"))), "ValueError: caf\\udce9"),
    (throw(Panic("no more")), "Panic: no more"),
    (throw(GeneratorExit()), "GeneratorExit"),
    (throw(StopIteration()), "StopIteration"),
    (leave, "SystemExit: 3"),
    (throw(Own()), "AttributeError"),
    (lambda: Outcome, "TypeError: the handler returned the class Outcome"),
]
NAMES = ["retry an error", "dead by number", "mute", "surrogate", "panic", "generator", "stop", "exit", "own", "class"]


@pytest.mark.parametrize("plain", [False, True], ids=["coroutine", "plain"])
@pytest.mark.parametrize(("odd", "said"), ODD, ids=NAMES)
def test_whatever_a_handler_does_ends_its_own_task_only(
    virtual: Tell, odd: Callable[[], object], said: str, *, plain: bool
) -> None:
    async def story(world: World) -> None:
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

    virtual(story)


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
                task = await app.get("work", "k")
                assert task is not None
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
        task = await app.get("work", "bad")
        assert task is not None
        assert task.error == "ValueError: cannot read caf\\udce9\\x00.txt"


def test_a_defect_at_one_outcome_falls_on_that_one_alone(virtual: Tell, caplog: pytest.LogCaptureFixture) -> None:
    async def story(world: World) -> None:
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

    virtual(story)
    assert "the outcome of work/bad cannot be kept" in caplog.text


def test_an_observer_that_raises_is_told_of_the_next_all_the_same(virtual: Tell) -> None:
    async def story(world: World) -> None:
        app, told = world.app(), []

        @app.handler("work")
        async def work(task: Task[Any]) -> None: ...

        def observe(record: Any, outcome: Any) -> None:
            told.append(record.key)
            raise ValueError("a defect of the observer")

        async with app, app.worker(observe=observe) as worker:
            await app.schedule_many([work.new(None, delay="0s") for _ in range(5)])
            await worker.until_empty()
            assert (len(told), worker.stats.done) == (5, 5)

    virtual(story)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_runs_plain_handlers_in_threads_of_its_own() -> None:
    app, ran = Bide("memory:"), list[int]()

    @app.handler("work")
    def work(task: Task[Any]) -> None:
        ran.append(os.getpid())

    async def main() -> None:
        async with app, app.worker() as worker:
            await work.schedule(None, delay="0s")
            await asyncio.wait_for(worker.until_empty(), PATIENCE)

    asyncio.run(main())
    child = os.fork()
    if child == 0:
        try:
            asyncio.run(main())
        finally:
            os._exit(0 if ran[1:] == [os.getpid()] else 1)
    assert os.waitpid(child, 0)[1] == 0
