"""Results as a run would have written them, for tests of what is made of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bide_lab.figures import SHARES, Figures, Result

MACHINE = {"cpus": 2, "python": "3.11.7", "system": "Linux"}


def late(median: float, most: float) -> list[float]:
    """A curve from nothing over the median to the most."""
    return [median * share * 2 if share <= 0.5 else median + (most - median) * (share * 2 - 1) for share in SHARES]


def made(**figures: Any) -> Figures:
    """Figures of 100 tasks of which all went well, but for what is given."""
    whole = {"scheduled": 100, "expected": 100, "fired": 100, "lost": 0, "duplicated": 0, "early": 0, "revived": 0}
    return Figures(**{**whole, **figures})


def result(strategy: str, workload: str, figures: Figures | None = None, **more: Any) -> Result:
    """One line of a results file."""
    whole: Mapping[str, Any] = {
        "quick": True, "minute": 1.0, "version": "0.1.0", "at": "2026-01-02T03:04:05+00:00", "seconds": 4.2,
        "machine": MACHINE,
    }  # fmt: skip
    return Result(strategy=strategy, workload=workload, figures=figures, **{**whole, **more})


def some_results() -> list[Result]:
    """Sorted sets and timers beside bide, with losses, repetitions, curves, and one that could not be measured."""
    cost = {str(10**power): 100.0 * power for power in (3, 4, 5)}
    return [
        result("S4-A", "steady", made(late=late(50, 110))),
        result("S4-A", "two", made(late=late(50, 110), duplicated=40)),
        result("S4-B", "killed", made(late=late(150, 300), fired=35, lost=65)),
        result("S4-A", "idle", made(expected=0, fired=0, client_cpu_pct=0.5, server_cpu_pct=0.2,
                                    client_bytes_per_task=400.0, server_bytes_per_task=150.0, idle_trips_per_s=10.0)),
        result("S12", "steady", made(late=late(0.05, 0.4))),
        result("S12", "cost", Figures(curve={"insert_ns": cost, "bytes": cost})),
        result("S12", "restarted", made(fired=0, lost=100)),
        result("S3", "steady", why_not="not measured here: no postgres server was given"),
        result("bide-redis", "steady", made(late=late(0.5, 2))),
        result("bide-redis", "two", made(late=late(0.5, 2))),
        result("bide-redis", "killed", made(late=late(0.5, 9_000), duplicated=3)),
        result("bide-redis", "idle", made(expected=0, fired=0, client_cpu_pct=0.15, server_cpu_pct=0.17,
                                          client_bytes_per_task=480.0, server_bytes_per_task=250.0)),
        result("bide-redis", "burst", made(late=late(10, 20), schedules_per_s=9_000.0)),
        result("bide-memory", "steady", made(late=late(0.1, 1))),
    ]  # fmt: skip
