"""Occurrences that were late, overlapped, or had a lease that was lost: which run, and what is told of the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some
from tests.engine.conftest import World, task_of, virtual
from tests.engine.test_recurring import MINUTE, Runs, counted
from tests.waiting import until

from bide import Bide, Dead, Every, Ladder, Retry, Task
from bide.core.instants import Millis, as_datetime
from bide.core.outcomes import Done
from bide.core.recurrence.plan import CatchUp, Recurrence

HOUR: Millis = 3_600_000
AT: Millis = 1_900_000_800_000 - 1_900_000_800_000 % HOUR
KEYS = some.sampled_from([f"k{number}" for number in range(40)])
LATE = some.integers(min_value=0, max_value=9 * HOUR)


def fired(recurrence: Recurrence, key: str) -> list[Millis]:
    """When each occurrence from `AT` on fires: with its jitter, some up to 50 minutes after its instant."""
    return [recurrence.rule.fires_at(AT + HOUR * number, key) for number in range(30)]


@given(KEYS, LATE)
def test_only_what_has_fired_is_dropped_by_overlap(key: str, took: Millis) -> None:
    recurrence = Recurrence(Every("1h", jitter="50m"))
    all_ = fired(recurrence, key)
    now = all_[0] + took
    step = recurrence.on_end(all_[0], key, all_[0], now)
    ahead = [at for at in all_ if at > now]
    assert (step.due_at, step.dropped) == (ahead[0], len(all_) - len(ahead) - 1)


@given(KEYS, LATE, some.sampled_from(CatchUp), some.sampled_from([None, HOUR, 3 * HOUR]))
def test_only_what_has_fired_is_late(key: str, late: Millis, catch_up: CatchUp, window: Millis | None) -> None:
    recurrence = Recurrence(Every("1h", jitter="50m"), catch_up, window, most=3)
    all_ = fired(recurrence, key)
    now = all_[0] + late
    due = [at for at in all_ if at <= now]
    within = [
        at for at in due if now - at <= (60_000 if window is None and catch_up is CatchUp.NONE else window or late)
    ]
    kept = {CatchUp.LATEST: within[-1:], CatchUp.ALL: within, CatchUp.NONE: [at for at in within if at == due[-1]]}
    kept[CatchUp.ALL] = [at for at in within if at in due[-3:]]
    target = (kept[catch_up] or [at for at in all_ if at > now])[0]
    if catch_up is CatchUp.NONE and len(due) > 1:  # it left the one that waited for too long, and all after it
        target = all_[len(due)]
    step = recurrence.on_lease(all_[0], key, all_[0] - HOUR, now)
    if target == all_[0]:
        assert step is None
    else:
        assert step is not None
        assert (step.due_at, step.dropped) == (target, len([at for at in due if at < target]))


@virtual
async def test_what_came_while_a_retry_was_waited_for_overlapped(world: World) -> None:
    app = world.app()
    starts: list[Millis] = []

    @app.handler("t", retry=Ladder("150m"))
    async def handle(task: Task[Any]) -> Any:
        starts.append(world.elapsed // 60_000)
        return Retry("once") if len(starts) == 1 else None

    async with app, app.worker():
        await app.recurring.add("t", Every("1h"), catch_up="all")
        await world.pause(5.1 * 3_600)
        first = starts[0]
        assert starts == [first, first + 150, *range(first + 180, starts[-1] + 1, 60)]
        assert counted(await app.events(), "dropped") == ["overlap: 2 occurrences did not run"]


@virtual
async def test_what_a_queue_has_no_room_for_overlapped(world: World) -> None:
    app = world.app()
    runs = Runs(world, app, takes=5.5 * MINUTE)
    async with app, app.worker():
        await app.recurring.add("t", Every("1m"), overlap="queue", most=2)
        await world.pause(12.1 * MINUTE)
        assert runs.minutes == [1, 5, 11]
        assert counted(await app.events(), "dropped") == [
            "overlap: 3 occurrences did not run", "overlap: 5 occurrences did not run"
        ]  # fmt: skip


@virtual
async def test_a_death_tells_its_own_error_and_the_drops_theirs(world: World) -> None:
    app = world.app()
    runs = Runs(world, app, takes=2.5 * MINUTE)
    runs.outcomes = {1: Dead("customer 4711 is unknown")}
    async with app, app.worker():
        await app.recurring.add("t", Every("1m"))
        await world.pause(4 * MINUTE)
        assert counted(await app.events(), "dropped") == ["overlap: 2 occurrences did not run"]
        assert counted(await app.events(), "dead") == ["customer 4711 is unknown"]


@virtual
async def test_drops_are_told_also_when_the_rule_ends_with_them(world: World) -> None:
    app = world.app()
    runs = Runs(world, app, takes=10 * MINUTE)
    async with app, app.worker():
        await app.recurring.add("t", Every("1m", until=as_datetime(world.start + 3 * 60_000)))
        await world.pause(12 * MINUTE)
        assert runs.minutes == [1]
        assert counted(await app.events(), "dropped") == ["overlap: 2 occurrences did not run"]


async def test_drops_are_told_when_the_handlers_transaction_settled(tmp_path: Path) -> None:
    app = Bide(f"sqlite:///{tmp_path}/a.db")
    settled: list[Any] = []

    @app.handler("t")
    async def handle(task: Task[Any]) -> None:
        await until(lambda: app.clock.now() >= task.record.due_at + 2_000, "two more have come")
        async with task.transaction():
            pass

    async with app, app.worker(observe=lambda record, settlement: settled.append(settlement)):
        await app.recurring.add("t", Every("1s"))
        await until(lambda: bool(settled), "the first has ended")
    assert settled[0].dropped >= 2
    assert settled[0].dropped_why.startswith("overlap: ")


@virtual
async def test_allow_keeps_to_the_deadline(world: World) -> None:
    app = world.app()
    runs = Runs(world, app)
    async with app:
        await app.recurring.add("t", Every("1h"), overlap="allow", deadline="10m", catch_up="latest")
        await world.pause(6.5 * 3_600)
        async with app.worker():
            await world.pause(60)
        assert not runs.tasks
        [own] = [task async for task in app.find(topic="t", state="dead")]
        assert own.error is not None
        assert own.error.startswith("deadline: ")


@virtual
async def test_cancel_running_lets_the_late_and_the_paused_run(world: World) -> None:
    app = world.app()
    runs = Runs(world, app, takes=30)
    paused = Runs(world, app, "paused", takes=10 * MINUTE)
    async with app:
        await app.recurring.add("t", Every("5m"), overlap="cancel_running", catch_up="all")
        await app.recurring.add("paused", Every("1m"), overlap="cancel_running")
        await app.recurring.pause("paused")
        await app.fire_now("paused", "paused")
        await world.pause(22 * MINUTE)
        async with app.worker():
            await world.pause(11 * MINUTE)
            assert runs.minutes == [5, 10, 15, 20, 25, 30]
            assert runs.ended == 6, "none was cancelled by one that was due before it began"
            assert (len(paused.tasks), paused.ended) == (1, 1)


@virtual
async def test_a_retry_for_which_the_next_one_came_is_not_tried_with_cancel_running(world: World) -> None:
    app = world.app()
    started: list[tuple[float, float, int]] = []

    @app.handler("t", retry=Ladder("90s"))
    async def handle(task: Task[Any]) -> Retry:  # it never waits, so that nothing could cancel it
        at = (task.record.due_at - world.start) / 60_000
        started.append((at, world.elapsed / 60_000, task.attempt))
        return Retry("once more")

    async with app, app.worker():
        await app.recurring.add("t", Every("1m"), overlap="cancel_running")
        await world.pause(3.9 * MINUTE)
        assert started == [(1, 1, 1), (2, 2.5, 1)]
        assert counted(await app.events(), "dropped") == ["overlap: the occurrence was cancelled by the next one"]


@virtual
async def test_cancel_running_waits_for_its_instant_after_the_clock_was_set_back(world: World) -> None:
    app = world.app()
    runs = Runs(world, app, takes=90)
    async with app, app.worker() as worker:
        await app.recurring.add("t", Every("1m"), overlap="cancel_running")
        await world.until(lambda: bool(runs.tasks))
        [delivery] = worker._executors["t"].running
        worker._time_out(delivery)  # as when the timer ends before the instant by the clock
        assert not delivery.over
        await world.until(lambda: len(runs.tasks) == 2)
        assert (worker.stats.retried, worker.stats.dead, [at // 1_000 for at in runs.started]) == (0, 0, [60, 120])


@virtual
async def test_an_occurrence_of_its_own_ends_with_its_first_success(world: World) -> None:
    app = world.app()
    runs = Runs(world, app)
    runs.outcomes = dict.fromkeys(range(1, 9), Done(again_in="20m"))
    async with app, app.worker():
        await app.recurring.add("t", Every("1m"), overlap="allow")
        await world.pause(2.5 * MINUTE)
        await app.recurring.remove("t")
        await world.pause(60 * MINUTE)
        assert runs.minutes == [1, 2]


@virtual
async def test_replan_leaves_what_waits_for_its_jitter(world: World) -> None:
    app = world.app()
    async with app:
        for key in ("a", "b", "c"):
            await app.recurring.add("t", Every("1h", jitter="50m"), key=key)
        due = {task.key: task.due_at async for task in app.find(topic="t")}
        first = max(due.values())
        await world.until(lambda: as_datetime(world.clock.now()) >= first.replace(minute=0, second=1))
        for key, at in due.items():
            await app.recurring.replan("t", key)
            assert (await task_of(app, "t", key)).due_at == at


@pytest.mark.parametrize("how", [{}, {"catch_up": "none"}, {"window": "1m"}])
@virtual
async def test_a_run_that_a_stopping_worker_cancels_begins_again_at_any_age(world: World, how: dict[str, Any]) -> None:
    app = world.app(grace="1s")
    runs = Runs(world, app, takes=10 * MINUTE)
    async with app:
        await app.recurring.add("t", Every("1h"), **how)
        async with app.worker():
            await world.until(lambda: bool(runs.started))
            await world.pause(2 * MINUTE)
        assert (await app.recurring.add("t", Every("1h"), "changed", **how)).result == "under_way"
        await world.pause(MINUTE)
        async with app.worker():
            await world.pause(11 * MINUTE)
        first, again = runs.tasks
        assert (again.occurrence, again.id, again.attempt) == (first.occurrence, first.id, 2)
        assert runs.ended == 1
        assert not counted(await app.events(), "dropped")


@virtual
async def test_the_next_occurrence_does_not_wait_for_the_lease_of_a_run_that_was_cancelled(world: World) -> None:
    app = world.app(grace="1s")
    runs = Runs(world, app, takes=10 * MINUTE)
    async with app:
        await app.recurring.add("t", Every("128s"), window="1m")
        async with app.worker():
            await world.pause(249)
        async with app.worker():  # the lease would end at 260
            await world.pause(20)
        assert runs.started == [128_000, 256_000]
        assert counted(await app.events(), "dropped") == ["late: 1 occurrence did not run"]
