"""Every workload at a small size: the fields are those that were promised, and a wrong result is not hidden."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from bide import Bide
from bide.core.errors import BadInput
from bide_bench import deliver, pending, shapes, verbs, workers
from bide_bench.command import bench
from bide_bench.worker import Settled, Start

ABOUT = {"store", "version", "python", "loop", "cpus"}
DELIVERED = {"lost", "duplicated"}
LATENESS = {
    "p50_ms", "p99_ms", "p999_ms", "max_ms", "after_wake_p50_ms", "after_wake_p99_ms", "early", "lost", "duplicated",
    "call_at_p50_ms", "call_at_p99_ms",
}  # fmt: skip
FIELDS: dict[str, set[str]] = {
    "schedule": {"single_per_s", "concurrent_per_s", "bulk_per_s", "bytes_per_task"},
    "lateness": LATENESS,
    "burst": {"first_ms", "last_ms", "completed_per_s"} | DELIVERED,
    "throughput": {"completed_per_s"} | DELIVERED,
    "recurring": {"added_per_s", "step_us", "step_shared_us", "once_per_s", "recurring_per_s", "recurring_to_once"}
    | DELIVERED,
    "change": {"move_per_s", "cancel_per_s", "bulk_move_per_s", "bulk_cancel_per_s", "shift_ms", "left_behind"},
    "idle": {"worker_cpu_pct", "server_cpu_pct", "worker_rss_mb", "calls_per_s"},
    "scale": {"us", "growth"},
    "topics": {"topics", "growth"},
    "workers": {"workers", "growth"},
    "payload": {"bytes", "growth"},
    "timers": {"ns"},
}
RATIOS = {
    "schedule": {"ratio_single", "ratio_concurrent", "ratio_bulk"},
    "burst": {"ratio_completed"},
    "throughput": {"ratio_completed"},
    "recurring": {"ratio_added", "ratio_once", "ratio_recurring"},
    "change": {"ratio_move", "ratio_cancel", "ratio_bulk_move", "ratio_bulk_cancel"},
}
SERVERS = {"redis:": "redis_url", "postgres:": "postgres_url", "mysql:": "mysql_url"}
"""By the store: the fixture that knows where one is."""


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a benchmark waits for, and repeats, only makes its figures better."""
    monkeypatch.setattr(pending, "SECONDS", 0.2)
    monkeypatch.setattr(pending, "SETTLING", 0.1)
    monkeypatch.setattr(pending, "REPETITIONS", 3)
    monkeypatch.setattr(deliver, "ROUNDS", 1)
    monkeypatch.setattr(deliver, "LEAD", 1_000)
    monkeypatch.setattr(verbs, "SOON", (100, 600))
    for name, small in {"TASKS": 8, "SETTLING": 0.1, "IDLE": 0.1, "BUSY": 100, "LEAD": 0.4}.items():
        monkeypatch.setattr(shapes, name, small)
    monkeypatch.setattr(deliver, "AHEAD", {**deliver.AHEAD, "2s": "300ms"})


@pytest.fixture
def url(store: str, request: pytest.FixtureRequest) -> str:
    """What to give for `store`: of a server its address."""
    return str(request.getfixturevalue(SERVERS[store])) if store in SERVERS else store


def run(*arguments: str) -> Result:
    return CliRunner().invoke(bench, arguments)


def figures(*arguments: str) -> dict[str, object]:
    ended = run(*arguments, "--json")
    assert ended.exit_code == 0, ended.output
    found: dict[str, object] = json.loads(ended.stdout)
    return found


@pytest.mark.parametrize(
    ("workload", "store"),
    [*((workload, "sqlite:") for workload in FIELDS), ("throughput", "memory:"), *(("idle", one) for one in SERVERS)],
)
def test_the_fields_are_those_that_were_promised(workload: str, store: str, url: str) -> None:
    found = figures(url, "--workload", workload, "--n", "10" if workload == "workers" else "40", "--limit")
    assert set(found) == FIELDS[workload] | ABOUT | {"limit_per_s"} | RATIOS.get(workload, set())
    assert found["store"] == store.removesuffix(":")


def test_all_ways_of_being_late_have_their_own_fields() -> None:
    found = figures("sqlite:", "--workload", "lateness", "--n", "5", "--ahead", "all", "--pending", "5", "--flood", "5")
    assert set(found) == {f"{name}{suffix}" for name in LATENESS for suffix in ("", "_20ms", "_0", "_fire")} | ABOUT


CHURN = {"course", "growth", "lost", "duplicated", "early", "left_behind"}
OF_SERVERS = {
    "redis:": {"used_bytes"},
    "mysql:": {"bytes", "history"},
    "postgres:": {"live_rows", "dead_rows", "table_bytes", "index_bytes", "vacuums"},
}
"""What each says of its health."""


@pytest.mark.parametrize("store", ["sqlite:", *SERVERS])
def test_churn_says_how_it_goes_and_compares_the_end_with_the_start(store: str, url: str) -> None:
    snapshot = ["--snapshot"] if store == "postgres:" else []
    ended = run(
        url, "--workload", "churn", "--n", "60", "--rate", "50", "--seconds", "1", "--limit", "--json", *snapshot
    )
    assert ended.exit_code == 0, ended.output
    *lines, found = [json.loads(line) for line in ended.stdout.splitlines()]
    assert set(found) == CHURN | ABOUT | {"limit_per_s"}
    assert {frozenset(line) for line in lines} == {
        frozenset({"seconds", "scheduled_per_s", "completed_per_s", "lease_p50_ms", "lease_p99_ms", "late_p50_ms",
                   "late_p99_ms", "snapshot"} | OF_SERVERS.get(store, {"bytes"}))
    }  # fmt: skip
    assert found["course"]["start"] == lines[0]
    assert found["course"]["end"] == lines[-1]
    assert ("held" in found["course"]) is any(line["snapshot"] for line in lines)


def test_what_has_no_snapshots_says_so(redis_url: str) -> None:
    for url in (redis_url, "sqlite:"):
        ended = run(url, "--workload", "churn", "--n", "10", "--seconds", "1", "--snapshot")
        assert isinstance(ended.exception, BadInput)
        assert "PostgreSQL" in str(ended.exception)


def test_a_crash_loses_nothing() -> None:
    found = figures("sqlite:", "--workload", "crash", "--n", "300")
    assert set(found) == {"lost", "duplicated", "redelivered", "recovered_ms"} | ABOUT
    for workload in ("crash", "workers"):
        ended = run("memory:", "--workload", workload)
        assert ended.exit_code == 1
        assert "give another store" in ended.output


def test_timers_with_fewer_items_than_rounds() -> None:
    found = figures("memory:", "--workload", "timers", "--n", "2")["ns"]
    assert isinstance(found, dict)
    assert {*found["heap"]} == {"insert", "cancel", "advance"}
    refused = run("memory:", "--workload", "timers", "--n", "1")
    assert "--n: 1 is not accepted" in f"{refused.output}{refused.exception}"


def test_people_get_a_table() -> None:
    ended = run("memory:", "--workload", "scale", "--n", "20")
    assert (ended.exit_code, "next_wake" in ended.output) == (0, True)


def test_several_processes_share_the_work_on_the_event_loop_that_was_chosen() -> None:
    found = figures("sqlite:", "--workload", "throughput", "--n", "50", "--processes", "2", "--loop", "uvloop")
    assert (found["lost"], found["duplicated"], found["loop"]) == (0, 0, "uvloop")


@pytest.mark.parametrize(("store", "part"), [("http://localhost", "memory:"), ("sqlite://host/a.db", "memory:")])
def test_another_store_is_refused(store: str, part: str) -> None:
    ended = run(store, "--workload", "timers", "--n", "10")
    assert ended.exit_code != 0
    assert part in f"{ended.output}{ended.exception}"


# --- the self-check


def examine(starts: Sequence[Start], settles: Sequence[Settled]) -> workers.Findings:
    return workers.examine({"a": 10_000_000, "b": 10_000_000}, [*starts, *settles])


def start(key: str, at: float, planned_at: int = 10) -> Start:
    return Start(key, planned_at, round(at * 1_000_000))


def settle(key: str, at: float) -> Settled:
    return Settled(key, round(at * 1_000_000))


def test_a_good_run_has_nothing_to_report() -> None:
    found = examine([start("b", 12.5, planned_at=12), start("a", 11)], [settle("a", 13), settle("b", 14)])
    assert list(found.lateness) == [1.0, 2.5]
    assert (found.first_start, found.last_start, found.last_settled) == (11_000_000, 12_500_000, 14_000_000)
    assert (found.lost, found.faults()) == (0, [])


def test_what_begins_again_after_its_settle_is_duplicated_and_before_it_redelivered() -> None:
    settles = [settle("a", 13), settle("b", 13)]
    twice = [start("a", 11), start("b", 11)]
    assert examine([*twice, start("a", 13.1)], settles).duplicated == 1
    redelivered = examine([*twice, start("a", 12)], settles)
    assert (redelivered.duplicated, redelivered.redelivered) == (0, 1)
    assert redelivered.faults()
    assert not redelivered.faults(crash=True)


@pytest.mark.parametrize(("store", "broken"), [("memory:", "lost"), ("memory:", "duplicated"), ("sqlite:", "early")])
def test_a_broken_result_ends_with_1(store: str, broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(entries: list[Start | Settled]) -> list[Start | Settled]:
        first, last = entries[0], entries[-1]
        assert isinstance(first, Start)
        if broken == "lost":
            return entries[:-1]
        if broken == "duplicated":
            return [*entries, msgspec.structs.replace(first, at=last.at + 1)]
        return [msgspec.structs.replace(first, at=first.planned_at * 1_000_000 - 1), *entries[1:]]

    local, processes = workers.LocalWorkers.log, workers.ProcessGroup.log
    monkeypatch.setattr(workers.LocalWorkers, "log", lambda self: spoil(local(self)))
    monkeypatch.setattr(workers.ProcessGroup, "log", lambda self: spoil(processes(self)))
    ended = run(store, "--workload", "throughput", "--n", "20", "--json")
    assert ended.exit_code == 1
    assert broken in ended.output


# --- what is left afterwards


@pytest.fixture
def place(store: str, tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """The URL of a place that is somebody else's: a file, a namespace or a schema."""
    if store == "sqlite:":
        return f"sqlite:///{tmp_path}/shop.db"
    if store == "redis:":
        return f"{request.getfixturevalue('redis_url')}?namespace={request.getfixturevalue('redis_namespace')}"
    return str(request.getfixturevalue(f"{store[:-1]}_schemas").url())


@pytest.mark.parametrize(
    ("workload", "store"), [*product(["schedule", "change"], ["sqlite:", *SERVERS]), ("scale", "sqlite:")]
)
def test_a_place_of_somebody_else_keeps_what_was_in_it(workload: str, store: str, place: str, tmp_path: Path) -> None:
    async def topics() -> list[str]:
        async with Bide(place) as app:
            await app.schedule("shop", b"x", key="order", delay="1h")
            return [topic for topic, _ in (await app.tally()).counts]

    asyncio.run(topics())
    figures(place, "--workload", workload, "--n", "30", "--limit")
    assert asyncio.run(topics()) == ["shop"]
    assert {one.name for one in tmp_path.iterdir()} <= {"shop.db"}


def test_a_file_that_was_not_there_is_gone_again(tmp_path: Path) -> None:
    figures(f"sqlite:///{tmp_path}/new.db", "--workload", "throughput", "--n", "10", "--limit")
    assert list(tmp_path.iterdir()) == []
