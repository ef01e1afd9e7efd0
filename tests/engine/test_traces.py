"""The trace of a task's last exception: kept behind the text of its error, and never taken for it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.engine.conftest import World, stores, task_of, virtual

from bide import Bide, Retry, Task
from bide.core.names import TRACE
from bide.engine.delivery.settlement import LONGEST_TRACE, trace_of


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


class Torn(Exception):
    """Nothing of it can be read."""

    @property
    def __cause__(self) -> BaseException:  # type: ignore[override]
        raise LookupError("none of this")


def look_up() -> None:
    try:
        raise Mute
    except Mute as error:
        raise LookupError("no such order") from error


def dig(depth: int) -> None:
    if depth:
        dig_on(depth - 1)
    raise ValueError("the bottom")


def dig_on(depth: int) -> None:
    """Another function, since the frames of one that calls itself are written as one."""
    dig(depth)


async def in_a_group() -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(asyncio.to_thread(look_up))


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except type(error) as met:
        return met


def test_a_trace_says_where_and_what_led_to_it() -> None:
    with pytest.raises(LookupError) as met:
        look_up()
    first, last = trace_of(met.value).split("\n\nwhich led to:\n\n")
    assert first.startswith(f"{TRACE}Traceback (most recent call last):\n  File ")
    assert first.endswith("    raise Mute\nMute: Mute()")
    assert last.endswith('    raise LookupError("no such order") from error\n')


def test_of_a_long_trace_the_end_is_kept() -> None:
    with pytest.raises(ValueError, match="the bottom") as met:
        dig(200)
    long = type("E" * 3_000, (Exception,), {})("x")
    for error in (met.value, raised(ExceptionGroup("several", [met.value, met.value]))):
        error.__context__ = raised(long)
        long.__cause__ = met.value
        trace = trace_of(error)
        assert 1_000 < len(trace) < LONGEST_TRACE + 60
    assert trace_of(met.value).endswith('    raise ValueError("the bottom")\n')


def test_errors_that_hide_their_trace_or_have_none() -> None:
    assert trace_of(ValueError("never raised")) == ""
    assert trace_of(raised(Torn())) == ""
    loop = raised(ValueError("both its own cause"))
    loop.__context__ = raised(ValueError("and its effect"))
    loop.__context__.__context__ = loop
    assert trace_of(loop).count("which led to") == 4


@stores("memory", "sqlite", "redis", "postgres", "mysql")
async def test_the_last_trace_stays_with_the_task_and_out_of_its_error(store_url: str) -> None:
    app = Bide(store_url, keep_done="1h")
    mourned: list[tuple[str | None, str | None]] = []

    @app.handler("work", retry="never")
    async def work(task: Task[Any]) -> None:
        await in_a_group()

    @app.handler("plain", retry="quick")
    def plain(task: Task[Any]) -> Retry | None:
        if task.failures == 0:
            look_up()
        assert (task.error, "which led to" in (task.trace or "")) == ("LookupError: no such order", True)
        return None

    @app.on_dead("work")
    async def tell(task: Task[Any]) -> None:
        mourned.append((task.error, task.trace))

    async with app, app.worker() as worker:
        await app.schedule_many([work.new(None, key="k", delay="0s"), plain.new(None, key="k", delay="0s")])
        await worker.until_empty()
        dead, done = await app.get("work", "k"), await app.get("plain", "k")
        events = await app.events()
        assert done is not None
        assert (done.state, done.error, done.trace) == ("done", None, None)
        assert dead is not None
        assert (dead.error or "").startswith("ExceptionGroup: unhandled errors")
        assert "\n" not in (dead.error or "")
        assert "in look_up\n" in (dead.trace or "")
        assert "bide/engine" not in (dead.trace or ""), "it begins with the handler"
        assert mourned == [(dead.error, dead.trace)]
        assert [event.what for event in events if "Traceback" in event.what or "\x1f" in event.what] == []


@virtual
async def test_no_trace_where_it_is_turned_off_or_an_outcome_was_raised(world: World) -> None:
    said = "sh failed:\nTraceback (most recent call last):\n x"

    def refuse() -> None:
        raise Retry(said)

    for place, (raises, settings) in enumerate([(look_up, {"traces": "off"}), (refuse, {})]):
        app = world.app(**settings)

        @app.handler(f"work {place}", retry="never")
        async def work(task: Task[Any]) -> None:
            raises()  # noqa: B023 - it is over before the next round

        async with app, app.worker() as worker:
            await work.schedule(None, key="k", delay="0s")
            await worker.until_empty()
            task = await task_of(app, f"work {place}", "k")
            assert task.trace is None
            assert task.error in ("LookupError: no such order", said)
