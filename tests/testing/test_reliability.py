"""The tables of docs/reliability.md: runs, the newest of each store, and none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from bide import BadInput
from bide_proofs.reliability import Results

TORTURED: dict[str, Any] = {
    "store": "redis", "about": {"version": "7.0.15"}, "seconds": 600, "processes": {"clients": 2, "workers": 3},
    "load": {
        "scheduled": 120_000, "verbs": {"cancel": {"cancelled": 900, "finished": 100}}, "deliveries": 118_000,
        "settled": {"done": 115_000},
    },
    "faults": {"kill": 40, "reset": 12}, "wrong": {"P1": 0, "P2": 0, "P3": 2, "P4": 0}, "delivered_again": 31,
    "lateness_ms": {"p50": 1.2, "p99": 80, "most": 3210.4}, "recovery_seconds": {"kill": {"p50": 0.0125, "most": 3.05}},
    "cannot": {"disk full": "no file system of its own"},
}  # fmt: skip
SLOPE = {
    "mean": 52_428_800.0, "first": 52_428_800.0, "last": 52_428_800.0, "per_minute": -2048.0, "low": -4096.0,
    "high": 1024.0, "percent_per_hour": -0.234, "allowed": 1_048_576.0, "verdict": "flat",
}  # fmt: skip
SOAKED: dict[str, Any] = {
    "store": "postgres", "seconds": 900, "maximum_per_s": 4000, "rate": 2000, "deliveries": 1_700_000, "lost": 0,
    "duplicated": 0, "early": 0, "load": {"schedule": {"created": 1_800_000}}, "wrong": {"left": 0}, "judged": True,
    "lateness_ms": {"p50": 2.5, "p99": 20, "most": 300}, "slopes": {"worker-1_resident": SLOPE},
}  # fmt: skip


def results(folder: Path, **lines: list[dict[str, Any]]) -> Results:
    for name, some in lines.items():
        (folder / f"{name}.jsonl").write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in some))
    return Results(folder)


def row(text: str, *begins: str) -> list[str]:
    """The cells of the line that begins with these."""
    start = f"| **{begins[0]}** |" + "".join(f" {one} |" for one in begins[1:])
    [found] = [line for line in text.splitlines() if line.startswith(start)]
    return [cell.strip() for cell in found.strip("|").split("|")]


def test_without_results_every_store_is_there_and_not_run(tmp_path: Path) -> None:
    none = Results(tmp_path)
    for store in ("SQLite", "Redis", "Redis Cluster", "Redis Sentinel", "PostgreSQL", "MariaDB", "HTTP"):
        assert row(none.torture(), store)[1] == "not run yet"
    assert row(none.soak(), "MariaDB")[1] == "not run yet"
    assert none.cannot() == "Nothing was noted so far.\n"


def test_a_run_under_faults(tmp_path: Path) -> None:
    text = results(tmp_path, torture=[TORTURED]).torture()
    assert row(text, "Redis", "7.0.15")[2:] == [
        "10", "2 clients, 3 workers", "120,000 scheduled, 1,000 verbs, 115,000 settled", "118,000", "0", "31", "0", "0",
        "2", "2", "3,210",
    ]  # fmt: skip
    assert row(text, "Redis", "kill")[2:] == ["40", "12.5", "3,050"]
    assert row(text, "Redis", "reset")[2:] == ["12", "", ""]
    assert row(text, "SQLite")[1] == "not run yet"


def test_the_newest_line_counts_and_one_cut_off_does_not(tmp_path: Path) -> None:
    newer = {**TORTURED, "wrong": {"lost": 5, "P4": 1}, "lateness_ms": {}}
    results(tmp_path, torture=[TORTURED, newer, {**TORTURED, "store": "redis+cluster"}])
    with (tmp_path / "torture.jsonl").open("ab") as file:
        file.write(b'{"store": "redis", "lost": 9')
    text = Results(tmp_path).torture()
    assert row(text, "Redis", "7.0.15")[6:] == ["5", "31", "0", "1", "0", "6", ""]
    assert row(text, "redis+cluster", "7.0.15")[2] == "10"


def test_what_could_not_be_done_is_said_once(tmp_path: Path) -> None:
    cannot = results(tmp_path, torture=[TORTURED, {**TORTURED, "store": "sqlite"}]).cannot()
    assert cannot == "- disk full (SQLite, Redis): no file system of its own\n"


def test_a_soak_and_its_slopes(tmp_path: Path) -> None:
    text = results(tmp_path, soak=[SOAKED]).soak()
    assert row(text, "PostgreSQL")[1:] == [
        "15", "4,000", "2,000", "1,800,000", "1,700,000", "0", "0", "0", "0", "2.5", "20", "300",
    ]  # fmt: skip
    assert "### PostgreSQL\n\nNothing grows.\n" in text
    assert row(text, "worker 1: resident memory")[1:] == [
        "50 MiB", "-2 KiB", "-4 KiB to 1 KiB", "-0.234", "1 MiB", "flat",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"judged": False}, "too short"),
        ({"slopes": {"late_p99_ms": {**SLOPE, "verdict": "grows"}}}, "Growing: lateness p99."),
    ],
)
def test_what_the_slopes_come_to(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    assert said in results(tmp_path, soak=[{**SOAKED, **changed}]).soak()


def test_a_line_that_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"soak.jsonl, line 2"):
        results(tmp_path, soak=[SOAKED, {"store": "redis"}])
