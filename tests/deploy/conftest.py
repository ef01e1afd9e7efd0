"""What the tests of deploy/ share: the folder, and everything that a real `Metrics` exposes."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from msgspec import Struct
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from bide import Bide, Dead, Task
from bide.core.records import OutcomeKind
from bide.ports import Features, TableStats, Wakes
from bide.service.metrics import Metrics
from bide.stores.memory import MemoryStore


@pytest.fixture(scope="session")
def deploy(root: Path) -> Path:
    return root / "deploy"


class WithClock(MemoryStore):
    """A store with a clock of its own, so that there is a skew."""

    @property
    def features(self) -> Features:
        return replace(super().features, clock=self)

    async def time(self) -> int:
        return time.time_ns() // 1_000_000

    def clock(self) -> None:
        return None


class Result(Struct):
    topic: str
    status: int | None
    seconds: float
    outcome: str


class Exposed(NamedTuple):
    """What Prometheus would read."""

    families: set[str]
    """The names of bide's own."""
    samples: dict[str, list[dict[str, str]]]
    """The labels of each series, by the name that expressions use."""


@pytest.fixture(scope="session")
def exposed() -> Exposed:
    """All that there is once everything has happened."""
    app = Bide(WithClock())
    metrics = Metrics(app)

    @app.handler("post")
    async def post(task: Task[Any]) -> None:
        if task.key == "dead":
            raise Dead("no")

    async def story() -> bytes:
        async with app:
            await app.schedule_many([post.new(None, key=key, delay="0s") for key in ("done", "dead")])
            async with app.worker() as worker:
                await worker.until_empty()
            metrics.working(Wakes(heard_at=0.0))
            metrics.watching("orders", TableStats())
            metrics.dropped("post", "late", 1)
            for verdict in OutcomeKind:
                metrics.settled("post", verdict)
                for status in (204, 410, 500, None):
                    metrics.webhook(Result("post", status, 0.1, verdict.value))
            for status in (200, 404, 500):
                metrics.request("schedule", status, 0.1)
            await app.pause("post")
            text, _ = await metrics.exposition()
            return text

    samples: dict[str, list[dict[str, str]]] = {}
    for family in text_string_to_metric_families(asyncio.run(story()).decode()):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append(sample.labels)
    return Exposed({family.name for family in metrics.families}, samples)
