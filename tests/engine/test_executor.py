"""A lane that was cancelled ends, whoever did it; the deliveries go on, and so does the end of a program."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest
from tests.waiting import PATIENCE, elapse, forever, until

from bide import Bide, StoreUnavailable, Task

if TYPE_CHECKING:
    from tests.engine.conftest import Tell, World


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


def test_a_handler_that_takes_no_cancel_holds_up_nobodys_end(virtual: Tell, caplog: pytest.LogCaptureFixture) -> None:
    async def story(world: World) -> None:
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
            task = await app.get("deaf", "k")
            assert task is not None
            assert (task.state, task.attempt, worker.stats.delivered) == ("leased", 1, 0)
        assert cancels

    virtual(story)
    assert "deaf/k goes on although it was cancelled" in caplog.text


async def test_a_worker_that_cannot_start_leaves_nothing_behind() -> None:
    app = Bide("memory:")

    @app.handler("work")
    async def work(task: Task[Any]) -> None: ...

    async with app:
        before = asyncio.all_tasks()

        async def refused(*asked: Any) -> None:
            raise StoreUnavailable("it cannot be listened to")

        app.store.listen = refused  # type: ignore[attr-defined]
        with pytest.raises(StoreUnavailable):
            await app.worker().__aenter__()
        assert asyncio.all_tasks() == before
