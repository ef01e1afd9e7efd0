"""Metrics and readiness on each real store: what is timed is counted once, and nothing is taken from the store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import asdict
from prometheus_client.parser import text_string_to_metric_families
from tests.waiting import PATIENCE, until

from bide import Bide, Task
from bide.ports import Store
from bide.service.health import Health, Level
from bide.service.metrics import Metrics


def abilities(store: Store) -> list[str]:
    """The names of its features."""
    return [name for name, feature in asdict(store.features).items() if feature is not None]


@pytest.fixture(params=["sqlite", "redis", "postgres", "mysql"])
async def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Of a store that is nobody else's, with its schema made."""
    kind = request.param
    if kind == "sqlite":
        return f"sqlite:///{tmp_path}/every.db"
    server: str = request.getfixturevalue(f"{kind}_url")
    if kind == "redis":
        return f"{server}?namespace={request.getfixturevalue('redis_namespace')}"
    found = f"{server}?schema={request.getfixturevalue(f'{kind}_schema')}"
    if kind == "postgres":
        from bide.stores.postgres.schema import SCHEMA as POSTGRES

        await POSTGRES.migrate(found)
    else:
        from bide.stores.mysql.schema import SCHEMA as MYSQL

        await MYSQL.migrate(found)
    return found


async def exposed(metrics: Metrics) -> dict[str, float]:
    """What Prometheus would read, by name and labels."""
    text, _ = await metrics.exposition()
    return {
        f"{sample.name}{sorted(sample.labels.values())}": sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


async def test_each_store_is_timed_and_can_do_what_it_could(url: str) -> None:
    async with Bide(url) as plain:
        could = abilities(plain.store)

    app = Bide(url)
    metrics = Metrics(app, tally_every=0, patience=PATIENCE)
    health = Health(app, every=0, patience=PATIENCE)

    async def well() -> bool:  # a machine that stands still between the two clocks makes them differ
        return {check.level for check in (await health.ready()).checks} == {Level.OK}

    @app.handler("post")
    async def post(task: Task[Any]) -> None:
        """Nothing to do."""

    async with app:
        assert abilities(app.store) == could
        _: bool = await until(well, "all to be well")
        before = await exposed(metrics)
        await post.schedule(None, key="later", delay="1h")
        await app.schedule_many([post.new(None, key="soon", delay="0s")])
        await app.fire_now("post", "later")
        read: dict[str, float] = {}

        async def counted() -> bool:  # a count that took long is not begun anew at once
            read.update(await exposed(metrics))
            return read.get("bide_tasks['post', 'waiting']") == 2

        _ = await until(counted, "both to be counted")
        assert read["bide_tasks_due['post']"] == 2
        assert read["bide_counts_at_limit[]"] == 0
        assert ("bide_clock_skew_seconds[]" in read) is (app.store.features.clock is not None)
        for operation, calls in (("add", 2), ("change", 1)):
            name = f"bide_store_call_seconds_count['{operation}']"
            assert read[name] - before[name] == calls, f"{operation}: each call once"

        async with app.worker() as worker:
            await worker.until_empty()
        read = await exposed(metrics)
        assert read["bide_outcomes_total['done', 'post']"] == 2
        assert read["bide_lateness_seconds_count['post']"] == 2
        for operation in ("lease", "settle"):
            assert read[f"bide_store_call_seconds_count['{operation}']"] >= 1
        assert not [name for name, value in read.items() if name.startswith("bide_store_errors_total") and value]
