"""Recurring tasks: each occurrence once, whatever ends, overlaps, changes, or is away."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.engine.conftest import World, nothing, stores, task_of, virtual
from tests.service.calling import running
from tests.waiting import until

from bide import (
    Answer,
    At,
    BadInput,
    Bide,
    Cron,
    Dead,
    DuplicateHandler,
    Every,
    Handler,
    Ladder,
    Result,
    StoreUnavailable,
    Task,
)
from bide.core.instants import LAST_INSTANT, Millis, as_datetime
from bide.core.options import recurrence_of, with_recurrence
from bide.core.outcomes import Defer, Done, Outcome
from bide.core.records import Lease, NewTask
from bide.core.retry import policy
from bide.engine.delivery.long_poll import LongPoll
from bide.engine.delivery.occurrences import passed_over
from bide.ports import Policy
from bide.testing import TimeMachine

MINUTE = 60.0


class Runs:
    """The occurrences that a handler of `topic` was given, in minutes since the start of the world."""

    def __init__(self, world: World, app: Bide, topic: str = "t", *, takes: float = 0.0) -> None:
        self.world = world
        self.tasks: list[Task[Any]] = []
        self.started: list[Millis] = []
        self.ended = 0
        self.takes = takes
        self.outcomes: dict[float, Outcome] = {}

        @app.handler(topic, retry="never")
        async def handle(task: Task[Any]) -> Outcome | None:
            self.tasks.append(task)
            self.started.append(world.elapsed)
            await world.pause(self.takes)
            self.ended += 1
            return self.outcomes.get(self.minutes[-1])

        self.handler: Handler[Any] = handle

    @property
    def minutes(self) -> list[float]:
        found = []
        for task in self.tasks:
            assert task.occurrence is not None
            found.append((task.occurrence - as_datetime(self.world.start)) / timedelta(minutes=1))
        return found


def counted(events: list[Any], kind: str) -> list[str]:
    return [event.what for event in reversed(events) if event.kind == kind]


@virtual
async def test_each_instant_runs_once_under_one_key_and_a_new_id(world: World) -> None:
    app = world.app()
    runs = Runs(world, app)
    async with app, app.worker():
        answer = await app.recurring.add("t", Every("1m"), {"n": 1}, key="k", group="g")
        assert answer.result == "created"
        await world.pause(5 * MINUTE + 1)
        assert runs.minutes == [1, 2, 3, 4, 5]
        assert runs.started == [60_000 * n for n in range(1, 6)], "on time"
        assert len({task.id for task in runs.tasks}) == 5
        assert {(task.key, task.group, task.payload["n"], task.attempt) for task in runs.tasks} == {("k", "g", 1, 1)}
        [task] = [one async for one in app.recurring.find()]
        assert task.recurrence is not None
        assert task.recurrence.rule == Every("1m")
        assert await app.recurring.next("t", "k", n=2) == [as_datetime(world.start + 60_000 * n) for n in (6, 7)]


@pytest.mark.parametrize(
    ("overlap", "expected", "starts"),
    [
        ("skip", [1, 4, 7], [1, 4, 7]),
        ("queue", [1, 2, 3], [1, 3.5, 6]),
        ("allow", [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7, 8]),
        ("cancel_running", [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7, 8]),
    ],
)
@virtual
async def test_what_comes_while_one_runs(
    world: World, overlap: str, expected: list[float], starts: list[float]
) -> None:
    app = world.app()
    runs = Runs(world, app, takes=2.5 * MINUTE)
    async with app, app.worker():
        await app.recurring.add("t", Every("1m"), overlap=overlap)
        await world.pause(8.4 * MINUTE)
        assert runs.minutes == expected
        assert [round(at / 60_000, 2) for at in runs.started] == starts
        dropped = counted(await app.events(), "dropped")
        assert len({task.id for task in runs.tasks}) == len(runs.tasks)
        if overlap == "skip":
            assert dropped == ["overlap: 2 occurrences did not run"] * 2
        if overlap == "cancel_running":
            assert dropped == ["overlap: the occurrence was cancelled by the next one"] * 7
            assert runs.ended == 0
        if overlap in ("queue", "allow"):
            assert not dropped
        if overlap == "allow":
            assert {task.key for task in runs.tasks} == {f"t@{one}" for one in written(world, range(1, 9))}


def written(world: World, minutes: range) -> list[str]:
    return [f"{as_datetime(world.start + 60_000 * n).isoformat(timespec='milliseconds')[:-6]}Z" for n in minutes]


@pytest.mark.parametrize(
    ("how", "ran", "dropped"),
    [
        ({"catch_up": "latest"}, [5, 190, 195], ["late: 36 occurrences did not run"]),
        ({"catch_up": "none"}, [5, 195], ["late: 37 occurrences did not run"]),
        ({"catch_up": "all"}, [5, *range(10, 200, 5)], []),
        ({"catch_up": "all", "most": 3}, [5, 180, 185, 190, 195], ["late: 34 occurrences did not run"]),
        ({"catch_up": "all", "window": "21m"}, [5, 175, 180, 185, 190, 195], ["late: 33 occurrences did not run"]),
        ({"catch_up": "latest", "window": "1m"}, [5, 195], ["late: 37 occurrences did not run"]),
        ({"catch_up": "latest", "overlap": "queue"}, [5, 190, 195], ["late: 36 occurrences did not run"]),
        ({"catch_up": "latest", "overlap": "allow"}, [5, 190, 195], ["late: 36 occurrences did not run"]),
        ({"overlap": "cancel_running"}, [5, 190, 195], ["late: 36 occurrences did not run"]),
        ({"catch_up": "latest", "deadline": "10m"}, [5, 190, 195], ["late: 36 occurrences did not run"]),
    ],
)
@pytest.mark.parametrize("died", [False, True], ids=["drained", "died in mid-run"])
@virtual
async def test_after_an_outage_of_three_hours(
    world: World, how: dict[str, Any], ran: list[float], dropped: list[str], *, died: bool
) -> None:
    app = world.app()
    runs = Runs(world, app)
    async with app:
        await app.recurring.add("t", Every("5m"), **how)
        if died:
            await world.pause(5 * MINUTE)
            now = world.clock.now()
            assert (await world.memory.lease({"t": 1}, now=now, until=now + 30_000, holder="dying")).tasks
        else:
            async with app.worker():
                await world.pause(5 * MINUTE)
        await world.pause(186.5 * MINUTE)
        async with app.worker():
            await world.pause(4 * MINUTE)
        assert runs.minutes == (ran[1:] if died and "deadline" in how else ran)
        assert counted(await app.events(), "dropped") == dropped


@virtual
async def test_a_dead_occurrence_does_not_end_the_rule_unless_asked(world: World) -> None:
    app = world.app()
    dead: list[tuple[str, str | None]] = []
    for topic in ("goes_on", "ends"):
        runs = Runs(world, app, topic)
        runs.outcomes = {2: Dead("broken")}

        @app.on_dead(topic)
        def died(task: Task[Any]) -> None:
            dead.append((task.topic, task.error))

    async with app, app.worker() as worker:
        await app.recurring.add("goes_on", Every("1m"))
        await app.recurring.add("ends", Every("1m"), end_when_dead=True)
        await world.pause(4.5 * MINUTE)
        assert worker.stats.done == 3 + 1
        assert worker.stats.dead == 2
        assert sorted(dead) == [("ends", "broken"), ("goes_on", "broken")]
        assert [task.state async for task in app.find(topic="ends")] == ["dead"]
        assert [task.state async for task in app.find(topic="goes_on")] == ["waiting"]
        assert sorted(event.topic for event in await app.events() if event.kind == "dead") == ["ends", "goes_on"]


@virtual
async def test_a_rule_that_ends_leaves_a_done_task_or_nothing(world: World) -> None:
    app = world.app(keep_done="1h")
    runs = Runs(world, app)
    async with app, app.worker():
        times = [as_datetime(world.start + 60_000 * n) for n in (1, 3)]
        await app.recurring.add("t", At(times))
        await world.pause(5 * MINUTE)
        assert runs.minutes == [1, 3]
        [task] = [one async for one in app.find()]
        assert task.state == "done"
        with pytest.raises(BadInput, match="future instant"):
            await app.recurring.add("t", At(times))


@virtual
async def test_a_change_moves_the_next_occurrence_and_the_same_again_moves_nothing(world: World) -> None:
    app = world.app()
    runs = Runs(world, app)
    async with app, app.worker():
        first = await app.recurring.add("t", Every("10m"), "a", group="g")
        same = await app.recurring.add("t", Every("10m"), "a", group="g")
        assert same.result == "kept"
        assert (same.task and same.task.id) == (first.task and first.task.id)
        changed = await app.recurring.add("t", Every("3m"), "b")
        assert changed.result == "replaced"
        await world.pause(7 * MINUTE)
        assert runs.minutes == [3, 6]
        assert [(task.payload, task.group) for task in runs.tasks] == [("b", None)] * 2


@virtual
async def test_a_change_at_the_instant_neither_loses_nor_doubles_the_occurrence(world: World) -> None:
    """Due and waiting for its jitter, due without a worker, running: it runs once, and then the new rule holds."""
    app = world.app()
    async with app:
        jittered = Every("10m", jitter="5m")
        key = next(f"k{n}" for n in range(99) if jittered.fires_at(0, f"k{n}") > 240_000)
        await app.recurring.add("t", jittered, key=key)
        await app.recurring.add("t", Every("10m"), key="overdue")
        changed = Every("7m", start=as_datetime(world.start))
        await world.pause(12 * MINUTE)
        for name in (key, "overdue"):
            assert (await app.recurring.add("t", changed, "new", key=name)).result == "replaced"
        runs = Runs(world, app, takes=30)
        async with app.worker():
            await world.until(lambda: len(runs.tasks) >= 1)
            assert (await app.recurring.add("t", Every("3m"), key="overdue")).result == "under_way"
            await world.pause(7 * MINUTE)
        by_key = [(task.key, minutes) for task, minutes in zip(runs.tasks, runs.minutes, strict=True)]
        late = 10 + jittered.fires_at(0, key) / 60_000
        assert by_key == [("overdue", 10), ("overdue", 14), (key, late)]


@virtual
async def test_pause_resume_skip_run_now_backfill_and_remove(world: World) -> None:
    app = world.app()
    runs = Runs(world, app)
    recurring = app.recurring
    async with app, app.worker():
        await recurring.add("t", Every("1m"), key="k")
        assert (await recurring.pause("t", "k")).result == "replaced"
        assert (await recurring.pause("t", "k")).result == "kept"
        assert (await recurring.add("t", Every("2m"), key="k")).result == "replaced", "a deploy while it is paused"
        await world.pause(3 * MINUTE + 1)
        assert not runs.tasks
        assert await recurring.next("t", "k") == []
        assert (await recurring.skip_next("t", "k")).result == "refused"
        assert (await recurring.run_now("t", "k")).result == "created"
        await world.pause(1)
        assert len(runs.tasks) == 1
        assert (await recurring.resume("t", "k")).result == "replaced"
        assert (await recurring.resume("t", "k")).result == "kept"
        assert (await recurring.skip_next("t", "k")).result == "moved"
        await world.pause(3 * MINUTE)
        assert runs.minutes[1:] == [6]
        since, until = (as_datetime(world.start + 60_000 * n) for n in (-4, 2))
        again = [answer.result for answer in await recurring.backfill("t", "k", since=since, until=until)]
        assert again == ["created"] * 4
        assert {answer.result for answer in await recurring.backfill("t", "k", since=since, until=until)} == {"kept"}
        await world.pause(1)
        assert sorted(runs.minutes[2:]) == [-4, -2, 0, 2]
        assert (await recurring.remove("t", "k")).result == "cancelled"
        for verb in (recurring.pause, recurring.resume, recurring.run_now, recurring.skip_next, recurring.replan):
            assert (await verb("t", "none")).result == "not_found"
            assert (await verb("t", "k")).result == "finished"
        await recurring.add("t", Every("1s"), key="s")
        with pytest.raises(BadInput, match="until"):
            await recurring.backfill("t", "s", since=since, until="2030-01-01T00:00:00Z")
        with pytest.raises(BadInput, match="not before since"):
            await recurring.backfill("t", "k", since=until, until=since)


@virtual
async def test_fire_now_brings_the_planned_occurrence_beside_another(world: World) -> None:
    app = world.app()
    runs = Runs(world, app)
    async with app, app.worker():
        await app.recurring.add("t", Every("10m"))
        await world.pause(4 * MINUTE)
        await app.fire_now("t", "t")
        await world.pause(7 * MINUTE)
        assert runs.minutes == [4, 10], "the plan goes on from the time to which the occurrence was moved"


@virtual
async def test_declared_rules_survive_deploys_side_by_side_and_orphans_are_pruned(world: World) -> None:
    def version(length: str, *, also: bool) -> tuple[Bide, Runs]:
        app = world.app()
        runs = Runs(world, app)
        app.recurs(Every(length), topic="t", payload=length)(runs.handler)
        if also:
            app.every("1m", topic="gone", key="gone")(app.handler("gone")(nothing))
        return app, runs

    old, old_runs = version("2m", also=True)
    new, new_runs = version("3m", also=False)
    async with old, old.worker():
        await world.pause(2.5 * MINUTE)
        assert old_runs.minutes == [2]
        async with new, new.worker():
            await world.pause(7 * MINUTE)
            both = old_runs.minutes + new_runs.minutes
            assert sorted(both) == [2, 3, 6, 9], "the version that started last decides, and runs nothing twice"
            assert [task.key for task in await new.orphaned()] == ["gone"]
            assert [answer.result for answer in await new.prune()] == ["cancelled"]
            assert await new.orphaned() == []
            assert await old.orphaned() == []


@virtual
async def test_a_declaration_that_fails_is_tried_again_ever_less_often(world: World) -> None:
    app, runs = recurs(world, "1h", takes=0)
    tries: set[Millis] = set()

    def refuse(point: str) -> None:
        if point == "add:before" and world.elapsed < 110_000:
            tries.add(world.elapsed // 1000)
            raise StoreUnavailable("away")

    world.store.fault = refuse
    async with app, app.worker():
        await world.pause(120 * MINUTE + 1)
        assert sorted(tries) == [0, 2, 6, 14, 30, 60, 90]
        assert runs.minutes == [60, 120]


@virtual
async def test_a_program_outlives_its_rules_and_one_key_has_one_rule(world: World) -> None:
    app = world.app()

    @app.recurs(Every("1m", until="2020-01-01T00:00:00Z"))
    async def ended(task: Task[Any]) -> None:
        raise AssertionError

    @app.cron("0 8 * * *", key="a")
    @app.cron("0 9 * * *", zone="Asia/Shanghai", key="b")
    async def report(task: Task[Any]) -> None: ...

    with pytest.raises(DuplicateHandler, match="recurs by another rule"):
        app.cron("0 10 * * *", key="b")(report)
    async with app, app.worker():
        await world.pause(MINUTE)
        found = {task.key: task.due_at.hour async for task in app.recurring.find()}
        assert found == {"a": 8, "b": 1}


@virtual
async def test_a_consumer_over_the_long_poll_settles_a_recurring_task_plainly(world: World) -> None:
    app = world.app()
    async with app:
        await app.recurring.add("t", Every("1m"), key="k")
        polls = [LongPoll(app, policy_of=lambda _: Policy(policy(None))) for _ in range(2)]
        for poll in polls:
            await poll.start()
        seen = []
        for turn in range(3):
            [record] = await polls[0].lease({"t": 1}, holder="c", wait=120, lease_for=10_000)
            seen.append(record.due_at - world.start)
            lease = Lease(record.topic, record.key, record.token)
            assert await polls[turn % 2].settle([(lease, Done())], who="c") == [True], "also at another instance"
        assert seen == [60_000, 120_000, 180_000]
        for poll in polls:
            await poll.close()


async def started_and_died(world: World, app: Bide, lease: Millis) -> NewTask:
    """A process adds an occurrence that is a separate task, and dies before it settles its lease."""
    await app.recurring.add("t", Every("1m"), overlap="allow")
    await world.pause(MINUTE)
    now = world.clock.now()
    leased = await world.memory.lease({"t": 1}, now=now, until=now + lease, holder="dying")
    over = passed_over(leased.tasks[0], app.config.retentions.of("t"), now)
    assert over is not None
    assert over.own is not None
    await world.memory.add([over.own], now=now)
    return over.own


def test_a_wrong_option_is_refused_by_its_name() -> None:
    app = Bide("memory:")
    wrong: dict[str, Any] = {
        "catch_up": "some", "overlap": "maybe", "most": 0, "window": "soon", "deadline": -1, "key": "k" * 176,
        "retry": "often", "end_when_dead": None,
    }  # fmt: skip
    for field, value in wrong.items():
        with pytest.raises(BadInput) as refused:
            app.recurring.new("t", Every("1m"), **{field: value})
        assert refused.value.field == field
    with pytest.raises(BadInput, match="rule"):
        app.recurring.new("t", "0 8 * * *")  # type: ignore[arg-type]
    calls: list[Callable[..., object]] = [
        lambda **how: app.cron("0 8 * * *", **how), partial(app.every, "1h"), partial(app.recurs, Every("1h")),
        partial(app.recurring.new, "t", Every("1h")),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(BadInput, match=r"to the rule, as in @app\.recurs\(Cron\(\.\.\., jitter=\.\.\.\)\)"):
            call(jitter="5m")
        with pytest.raises(BadInput, match="the closest name is catch_up"):
            call(catchup="all")


def test_the_last_instants_are_found_in_few_steps_however_far_back_the_first_lies() -> None:
    rule = Cron("*/5 9-17 * * mon-fri", zone="Europe/Rome")
    last = int(datetime.fromisoformat("2031-03-31T12:01:00+02:00").timestamp() * 1000)
    found = rule.latest(0, last, 100)
    assert found[-1] == last - 60_000
    assert len(found) == 100
    assert found == rule.upto(found[0], last, 1_000)
    assert rule.latest(found[3], last, 200) == found[3:]
    assert rule.latest(last + 1, last, 5) == []


@stores("sqlite", "redis", "postgres", "mysql")
async def test_on_every_store_a_rule_runs_changes_pauses_and_ends(store_url: str) -> None:
    """In real time, with the store's own clock; every wait is for a condition."""
    app = Bide(store_url)
    ran: list[Task[Any]] = []

    @app.handler("t")
    async def handle(task: Task[Any]) -> None:
        ran.append(task)

    async with app, app.worker():
        await app.recurring.add("t", Every("1s"), "one", key="k", group="g")
        await until(lambda: len(ran) >= 2, "two occurrences")
        await until(lambda: steering(app.recurring.add("t", Every("1s"), "two", key="k", group="g")), "the change")
        await until(lambda: ran[-1].payload == "two", "an occurrence of the new version")
        await until(lambda: steering(app.recurring.pause("t", "k")), "a moment at which none runs")
        assert await app.recurring.next("t", "k") == []
        await app.recurring.run_now("t", "k")
        await until(lambda: ran[-1].key != "k", "the run beside the plan")
        assert (await app.recurring.backfill("t", "k", since=ran[0].due_at, until=ran[1].due_at))[0].ok
        await until(lambda: sum(task.key != "k" for task in ran) == 3, "the backfill")
        assert await until(lambda: steering(app.recurring.resume("t", "k")), "the resumption")
        count = len(ran)
        await until(lambda: len(ran) > count, "an occurrence after the pause")
        assert (await app.recurring.remove("t", "k")).ok
        assert [task async for task in app.recurring.find("t")] == []
    planned = [task for task in ran if task.key == "k"]
    assert len({task.id for task in planned}) == len({task.occurrence for task in planned}) == len(planned)
    assert {task.group for task in planned} == {"g"}


async def steering(verb: Awaitable[Answer]) -> bool:
    return (await verb).result is Result.REPLACED


@virtual
async def test_a_paused_task_that_is_fired_by_hand_runs_once_and_is_paused_again(world: World) -> None:
    app = world.app()
    runs = Runs(world, app)
    async with app, app.worker():
        await app.recurring.add("t", Every("1m"))
        await app.recurring.pause("t")
        await app.fire_now("t", "t")
        await world.pause(3 * MINUTE)
        assert len(runs.tasks) == 1
        [task] = [one async for one in app.recurring.find()]
        assert task.recurrence is not None
        assert task.recurrence.paused
        assert task.record.due_at == LAST_INSTANT


async def test_a_clock_that_is_set_back_by_an_hour_repeats_no_occurrence() -> None:
    app = Bide("memory:")
    ran: list[Any] = []

    @app.every("10m", topic="tick")
    async def tick(task: Task[Any]) -> None:
        ran.append(task.occurrence)

    async with TimeMachine(app) as time:
        await time.advance("25m")
        time._clock.turn_back(3_600_000)
        await time.advance("64m")
        assert len(ran) == 2, "the third is due at its instant, which is an hour away again"
        await time.advance("2m")
        assert len(ran) == len(set(ran)) == 3


async def test_the_verbs_join_the_callers_transaction(tmp_path: Path) -> None:
    app = Bide(f"sqlite:///{tmp_path}/a.db")
    async with app:
        await app.schedule("other", key="makes the file", delay="1h")
        with closing(sqlite3.connect(tmp_path / "a.db", isolation_level=None)) as connection:
            for ends, left in (("ROLLBACK", 0), ("COMMIT", 1)):
                connection.execute("BEGIN IMMEDIATE")
                async with app.using(connection):
                    assert (await app.recurring.add("t", Cron("0 8 * * *"), key="k")).result == "created"
                    assert (await app.recurring.add("t", Cron("0 9 * * *"), key="k")).result == "replaced"
                    assert (await app.recurring.pause("t", "k")).result == "replaced"
                connection.execute(ends)
                assert len([task async for task in app.recurring.find()]) == left


def test_synchronous_code_has_the_same_verbs(tmp_path: Path) -> None:
    app = Bide(f"sqlite:///{tmp_path}/a.db")
    verbs = app.sync.recurring
    assert verbs.add("t", Every("1h"), key="k").result == "created"
    assert [task.key for task in verbs.find("t")] == ["k"]
    assert len(verbs.next("t", "k")) == 5
    assert verbs.pause("t", "k").result == "replaced"
    with closing(sqlite3.connect(tmp_path / "a.db", isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        with app.sync.using(connection) as joined:
            assert joined.recurring.resume("t", "k").result == "replaced"
        connection.execute("COMMIT")
    assert verbs.skip_next("t", "k").result == "moved"
    hours = verbs.backfill("t", "k", since="2026-01-01T00:00Z", until="2026-01-01T01:00Z")
    assert [answer.result for answer in hours] == ["created", "created"]
    assert verbs.remove("t", "k").result == "cancelled"
    app.sync.close()


async def test_a_worker_of_a_remote_store_runs_a_rule(tmp_path: Path) -> None:
    with running(f"sqlite:///{tmp_path}/a.db") as service:
        app, ran = Bide(service.url), list[Task[Any]]()

        @app.every("1s", topic="t", payload={"n": 1})
        async def handle(task: Task[Any]) -> Outcome | None:
            ran.append(task)
            return Dead("broken") if len(ran) == 2 else None

        async with app, app.worker():
            await until(lambda: len(ran) >= 3, "three occurrences, the second of which died")
            assert {task.payload["n"] for task in ran} == {1}
            assert "dead" in [event.kind for event in await app.events()]
            await until(lambda: steering(app.recurring.pause("t")), "the pause")
            await app.recurring.run_now("t")
            await until(lambda: "@" in ran[-1].key, "the run beside the plan")


def recurs(world: World, length: str, *, takes: float, **settings: Any) -> tuple[Bide, Runs]:
    """A version of a program that declares `Every(length)`."""
    app = world.app(**settings)
    runs = Runs(world, app, takes=takes)
    app.every(length)(runs.handler)
    return app, runs


@pytest.mark.parametrize("keep_cancelled", ["1h", "0s"])
@virtual
async def test_a_removal_is_not_undone_by_an_add_or_a_declaration_that_waits_for_a_run(
    world: World, keep_cancelled: str
) -> None:
    old, runs = recurs(world, "1m", takes=20 * MINUTE, keep_cancelled=keep_cancelled)
    new, new_runs = recurs(world, "2m", takes=0, keep_cancelled=keep_cancelled)
    async with old, old.worker():
        await world.pause(MINUTE + 1)
        async with new, new.worker():
            await world.pause(10)
            adding = asyncio.create_task(old.recurring.add("t", Every("3m")))
            await world.pause(0.5)
            assert (await old.recurring.remove("t")).result == "cancelled_while_leased"
            assert (await adding).result == ("not_found" if keep_cancelled == "0s" else "finished")
            await world.pause(30 * MINUTE)
            task = await old.get("t", "t")
            assert task is None or task.state == "cancelled"
    assert runs.minutes + new_runs.minutes == [1]


@pytest.mark.parametrize(("sent", "answer"), [(119.0, "kept"), (120.2, "kept"), (178.0, "kept"), (181.0, "finished")])
@virtual
async def test_the_last_occurrence_of_a_rule_is_not_repeated_by_the_same_rule_once_more(
    world: World, sent: float, answer: str
) -> None:
    """It was made before the last instant, and is sent before it, while the occurrence runs, or after its end."""
    app = world.app()
    runs = Runs(world, app, takes=MINUTE - 0.5)
    rule = Every("1m", until=as_datetime(world.start + 120_000))
    async with app, app.worker():
        await app.recurring.add("t", rule)
        wanted = app.recurring.new("t", rule)
        await world.pause(sent)
        assert (await app.recurring.add_many([wanted]))[0].result == answer
        await world.pause(10 * MINUTE)
        assert runs.minutes == [1, 2]
        assert [task.state async for task in app.find()] == ["done"]


@virtual
async def test_a_rule_that_ended_during_the_wait_is_replaced_by_another_rule(world: World) -> None:
    app = world.app()
    runs = Runs(world, app, takes=1)
    async with app, app.worker():
        await app.recurring.add("t", At(as_datetime(world.start + 60_000)))
        await world.pause(MINUTE + 0.5)
        assert (await app.recurring.add("t", Every("5m"))).result == "replaced"
        await world.pause(5 * MINUTE)
        assert runs.minutes == [1, 5]


@virtual
async def test_the_same_rule_again_is_kept_at_once_while_an_occurrence_runs_or_waits_for_its_retry(
    world: World,
) -> None:
    app, runs = recurs(world, "1m", takes=20)

    @app.handler("fails", retry=Ladder("1h", "1h"))
    async def fails(task: Task[Any]) -> None:
        raise ValueError

    async with app, app.worker():
        await app.recurring.add("fails", Every("1m"))
        await world.pause(MINUTE + 5)
        before = world.elapsed
        assert (await app.recurring.add("t", Every("1m"), retry=None, declared=True)).result == "kept"
        assert (await app.recurring.add("fails", Every("1m"))).result == "kept"
        assert world.elapsed == before, "no wait"
        assert (await app.recurring.add("fails", Every("2m"))).result == "under_way"
        assert await app.recurring.declare(dict.fromkeys(app.declared.values(), False)) == ({}, []), (
            "nothing is left to be tried again"
        )
        assert runs.minutes == [1]


@virtual
async def test_a_declaration_revives_no_task_that_died_unless_the_declaration_has_changed(world: World) -> None:
    def version(payload: str) -> tuple[Bide, Runs]:
        app = world.app()
        runs = Runs(world, app)
        runs.outcomes = {1: Dead("broken")}
        app.every("1m", end_when_dead=True, payload=payload)(runs.handler)
        return app, runs

    for payload, state, minutes in (("a", "dead", [1]), ("a", "dead", []), ("b", "waiting", [5, 6])):
        app, runs = version(payload)
        async with app, app.worker():
            await world.pause(2.25 * MINUTE)
            assert runs.minutes == minutes
            assert (await task_of(app, "t", "t")).state == state


@virtual
async def test_a_retry_that_waits_is_neither_skipped_nor_paused(world: World) -> None:
    app = world.app()
    ran: list[tuple[float, str, int]] = []

    @app.handler("t", retry=Ladder("10m"))
    async def handle(task: Task[Any]) -> None:
        ran.append((world.elapsed / 60_000, task.id, task.attempt))
        if len(ran) == 1:
            raise ValueError

    async with app, app.worker():
        await app.recurring.add("t", Every("1h"))
        await world.pause(65 * MINUTE)
        for verb in (app.recurring.skip_next, app.recurring.pause):
            assert (await verb("t")).result == "under_way"
        await world.pause(60 * MINUTE)
    assert [(minute, attempt) for minute, _, attempt in ran] == [(60, 1), (70, 2), (120, 1)]
    assert ran[0][1] == ran[1][1] != ran[2][1]


@virtual
async def test_a_rule_that_ended_during_its_pause_is_finished_and_leaves_nothing(world: World) -> None:
    app = world.app()
    async with app:
        await app.recurring.add("t", At(as_datetime(world.start + 60_000)))
        await app.recurring.pause("t")
        await world.pause(2 * MINUTE)
        assert (await app.recurring.pause("t")).result == "kept"
        assert (await app.recurring.resume("t")).result == "finished"
        assert (await task_of(app, "t", "t")).state == "cancelled"
        for verb in (app.recurring.resume, app.recurring.skip_next, app.recurring.run_now):
            assert (await verb("t")).result == "finished"


@virtual
async def test_a_rule_of_a_zone_that_is_not_known_here_can_be_listed_and_replaced(world: World) -> None:
    app = world.app()
    async with app:
        new = app.recurring.new("t", Cron("0 8 * * *"))
        recurrence = recurrence_of(new.options)
        assert recurrence is not None
        there = replace(recurrence, rule=replace(recurrence.rule, zone="Mars/Base"))
        await app.schedule_new(replace(new, options=with_recurrence(new.options, there)))
        assert await app.recurring.next("t") == []
        assert (await app.recurring.add("t", Cron("0 9 * * *"))).result == "replaced"


@virtual
async def test_an_empty_key_is_refused_and_means_no_other_task(world: World) -> None:
    app = world.app()
    async with app:
        await app.recurring.add("t", Every("1m"))
        for verb in (app.recurring.remove, app.recurring.pause, app.recurring.next):
            with pytest.raises(BadInput, match="key"):
                await verb("t", "")
        with pytest.raises(BadInput, match="key"):
            await app.recurring.add("t", Every("2m"), key="")
        with pytest.raises(BadInput, match="n: '3'"):
            await app.recurring.next("t", n="3")  # type: ignore[arg-type]
        with pytest.raises(BadInput, match="key"):
            app.every("1m", key="")(app.handler("t")(nothing))
        assert (await app.recurring.add("t", Every("1m"))).result == "kept"
        await app.schedule("t", key="plain", delay="1h")
        assert (await app.recurring.remove("t", "plain")).result == "not_found"


@stores("memory", "sqlite", "redis", "postgres", "mysql")
async def test_a_repeated_backfill_runs_no_occurrence_again_that_was_cancelled(store_url: str) -> None:
    app = Bide(store_url)
    async with app:
        await app.recurring.add("t", Every("1h"))
        period = {"since": "2030-01-01T00:00Z", "until": "2030-01-01T01:00Z"}
        made = await app.recurring.backfill("t", **period)
        assert [answer.result for answer in made] == ["created", "created"]
        assert made[0].task is not None
        assert (await app.cancel("t", made[0].task.key)).result == "cancelled"
        again = await app.recurring.backfill("t", **period)
        assert [answer.result for answer in again] == ["kept", "kept"]
        assert [answer.record and answer.record.state for answer in again] == ["cancelled", "waiting"]


@pytest.mark.parametrize(("ended", "lease"), [("cancelled", 60_000), ("dead", 60_000), ("done", 5_000)])
@virtual
async def test_a_repeated_start_after_a_crash_runs_no_own_occurrence_again_that_ended(
    world: World, ended: str, lease: Millis
) -> None:
    app = world.app(keep_done="0s")
    runs = Runs(world, app)
    async with app:
        own = await started_and_died(world, app, lease)
        if ended == "cancelled":
            await app.cancel("t", own.key)
        runs.outcomes = {1: Dead("broken")} if ended == "dead" else {}
        async with app.worker():
            await world.pause(90)
        assert runs.minutes == ([2] if ended == "cancelled" else [1, 2])
        task = await app.get("t", own.key)
        assert (task.state if task else "done") == ended


@virtual
async def test_each_call_of_run_now_runs_once_until_the_rule_has_ended(world: World) -> None:
    app = world.app()
    runs = Runs(world, app)
    async with app, app.worker():
        await app.recurring.add("t", Every("1h"))
        assert [(await app.recurring.run_now("t")).result for _ in range(3)] == ["created"] * 3
        await world.pause(1)
        assert len(runs.tasks) == 3
        await app.recurring.remove("t")
        assert (await app.recurring.run_now("t")).result == "finished"


@pytest.mark.parametrize(
    ("how", "ran"),
    [
        ({"catch_up": "none"}, [185, 192]),
        ({"catch_up": "latest", "window": "1m"}, [185, 192]),
        ({"catch_up": "latest"}, [180, 185, 192]),
        ({"catch_up": "all", "most": 2}, [150, 185, 192]),
    ],
)
@virtual
async def test_a_change_after_an_outage_keeps_an_occurrence_that_still_runs_and_no_future_one(
    world: World, how: dict[str, Any], ran: list[float]
) -> None:
    app = world.app()
    async with app:
        await app.recurring.add("t", Every("30m", start=as_datetime(world.start)), **how)
        await world.pause(184 * MINUTE)
        changed = At([as_datetime(world.start + 60_000 * n) for n in (185, 192)])
        assert (await app.recurring.add("t", changed, **how)).result == "replaced"
        runs = Runs(world, app)
        async with app.worker():
            await world.pause(20 * MINUTE)
    assert runs.minutes == ran


@pytest.mark.parametrize("changed", ["payload", "rule"])
@virtual
async def test_a_change_undoes_no_deferral(world: World, changed: str) -> None:
    app = world.app()
    runs = Runs(world, app)
    runs.outcomes = {60: Defer("30m")}
    async with app, app.worker():
        await app.recurring.add("t", Every("1h"), "old")
        await world.pause(65 * MINUTE)
        rule, payload = (Every("2h"), "old") if changed == "rule" else (Every("1h"), "new")
        assert (await app.recurring.add("t", rule, payload)).result == "replaced"
        await world.pause(60 * MINUTE)
    assert [at / 60_000 for at in runs.started] == [60, 90, 120]
    assert [task.payload for task in runs.tasks] == ["old", payload, payload]


@pytest.mark.parametrize(
    ("how", "ahead", "ran"),
    [
        ({}, [180, 240], [240]),
        ({"catch_up": "none"}, [240, 300], [300]),
        ({"catch_up": "all"}, [60, 120], [120, 180, 240]),
        ({"overlap": "queue"}, [180, 240], [240]),
    ],
)
@virtual
async def test_what_is_next_and_is_skipped_of_an_overdue_task_is_what_would_run(
    world: World, how: dict[str, Any], ahead: list[int], ran: list[int]
) -> None:
    app = world.app()
    async with app:
        await app.recurring.add("t", Every("1h"), **how)
        await world.pause(185 * MINUTE)
        assert await app.recurring.next("t", n=2) == [as_datetime(world.start + 60_000 * n) for n in ahead]
        assert (await app.recurring.skip_next("t")).result == "moved"
        runs = Runs(world, app)
        async with app.worker():
            await world.pause((ran[-1] + 1 - 185) * MINUTE)
        assert runs.minutes == ran


@virtual
async def test_a_skip_after_the_last_instant_ends_the_rule_where_all_are_too_old(world: World) -> None:
    app = world.app()
    async with app:
        await app.recurring.add("t", At(as_datetime(world.start + 60_000)), catch_up="none")
        await world.pause(10 * MINUTE)
        assert await app.recurring.next("t") == []
        assert (await app.recurring.skip_next("t")).result == "cancelled"


async def test_a_change_in_the_callers_transaction_waits_for_no_running_occurrence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wait would hold the lock for which the end of that occurrence waits."""
    monkeypatch.setattr("bide.engine.recurring._PAUSES", (0.0, 1e6))
    app = Bide(f"sqlite:///{tmp_path}/a.db")
    async with asyncio.timeout(60), app:
        await app.recurring.add("t", Every("1h"))
        await app.fire_now("t", "t")
        now = app.clock.now()
        assert (await app.store.lease({"t": 1}, now=now, until=now + 3_600_000, holder="w")).tasks
        with closing(sqlite3.connect(tmp_path / "a.db", isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            async with app.using(connection):
                assert (await app.recurring.pause("t")).result == "under_way"
                assert (await app.recurring.add("t", Every("2h"))).result == "under_way"
            connection.execute("ROLLBACK")
