"""What a benchmark does to a PostgreSQL server by itself: it leaves nothing, and measures what it says it measures."""

from __future__ import annotations

import asyncio
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from asyncpg import InsufficientPrivilegeError
from click.testing import CliRunner
from tests.servers.postgres_server import ask
from tests.waiting import wait_until

from bide.app import Bide
from bide.cli.bench import bench, processes
from bide.cli.bench.limits import limit_of
from bide.cli.bench.place import place_of
from bide.cli.bench.plan import Plan
from bide.cli.bench.postgres_server import PostgresServer, RawPostgres
from bide.cli.bench.processes import ProcessorWatch
from bide.cli.bench.server import LessRoundTrip
from bide.core.errors import BadInput, StoreMismatch, StoreUnavailable
from bide.stores.postgres import PostgresStore


def schemas(url: str) -> set[str]:
    return {row[0] for row in ask(url, "SELECT nspname FROM pg_namespace WHERE nspname LIKE 'bench%'")}


def server_at(place_server: object) -> PostgresServer:
    assert isinstance(place_server, PostgresServer)
    return place_server


def test_a_schema_that_was_not_there_is_made_and_dropped(postgres_url: str, postgres_schema: str) -> None:
    with place_of(f"{postgres_url}?schema={postgres_schema}&prefix=a_") as place:
        assert place.owned
        assert ask(postgres_url, f"SELECT count(*) FROM {postgres_schema}.a_task")[0][0] == 0
    assert ask(postgres_url, f"SELECT FROM pg_namespace WHERE nspname = '{postgres_schema}'") == []


def test_a_schema_with_others_tables_is_not_touched(postgres_url: str, postgres_schema: str) -> None:
    ask(postgres_url, f"CREATE SCHEMA {postgres_schema}")
    ask(postgres_url, f"CREATE TABLE {postgres_schema}.orders (number integer)")
    url = f"{postgres_url}?schema={postgres_schema}"
    with place_of(url) as place:
        assert not place.owned
        with pytest.raises(StoreMismatch, match="bide migrate"):
            asyncio.run(PostgresStore(place.url).open())
    assert ask(postgres_url, f"SELECT count(*) FROM {postgres_schema}.orders")[0][0] == 0


def test_what_was_filled_in_is_written_down_before_anything_is_measured(postgres_url: str) -> None:
    with place_of(postgres_url) as place:
        [[filled]] = ask(postgres_url, "SELECT pg_current_wal_insert_lsn()::text")
        place.flush()
    assert ask(postgres_url, f"SELECT checkpoint_lsn >= '{filled}'::pg_lsn FROM pg_control_checkpoint()")[0][0]


def test_who_may_not_ask_for_a_checkpoint_measures_without_one(postgres_url: str, postgres_schema: str) -> None:
    ask(postgres_url, f"CREATE ROLE {postgres_schema} LOGIN")
    ask(postgres_url, f"CREATE SCHEMA {postgres_schema} AUTHORIZATION {postgres_schema}")
    url = f"{postgres_url.replace('//bide@', f'//{postgres_schema}@')}?schema={postgres_schema}"
    try:
        with pytest.raises(InsufficientPrivilegeError):
            ask(url.partition("?")[0], "CHECKPOINT")
        with place_of(url) as place:
            place.flush()
            assert not place.owned
    finally:
        ask(postgres_url, f"DROP OWNED BY {postgres_schema} CASCADE")
        ask(postgres_url, f"DROP ROLE {postgres_schema}")


@pytest.mark.parametrize("workload", ["schedule", "change"])
def test_a_schema_of_somebody_else_keeps_what_was_in_it(workload: str, postgres_url: str, postgres_schema: str) -> None:
    url = f"{postgres_url}?schema={postgres_schema}"
    asyncio.run(PostgresStore(url).migrate())

    async def topics() -> list[str]:
        async with Bide(url) as app:
            await app.schedule("shop", b"x", key="order", delay="1h")
            return [topic for topic, _ in (await app.tally()).counts]

    asyncio.run(topics())
    ended = CliRunner().invoke(bench, [url, "--workload", workload, "--n", "30", "--limit"])
    assert ended.exit_code == 0, ended.output
    assert asyncio.run(topics()) == ["shop"]


def test_the_raw_limit_is_measured_and_leaves_nothing(postgres_url: str) -> None:
    with place_of(postgres_url) as place:
        assert (place.kind, place.shared, place.owned) == ("postgres", True, True)
        assert place.size() > 0
        own = parse_qs(urlsplit(place.url).query)["schema"][0]
        with limit_of(Plan(place=place, limit=True)) as limit:
            raw, size = limit._raw, place.size()
            assert isinstance(raw, RawPostgres)
            limit.measure(2)
            found = ask(postgres_url, f"SELECT count(*), count(DISTINCT key) FROM {raw._schema}.task")[0]
            assert found == (2_000, 2_000)
            assert place.size() == size, "it grows in a place of its own"
            assert limit.fields({})["limit_per_s"] > 0
            assert {own, raw._schema} <= schemas(postgres_url)
        assert raw._schema not in schemas(postgres_url)
    assert own not in schemas(postgres_url)


def test_the_server_tells_what_it_did_and_what_an_operation_cost(postgres_url: str) -> None:
    async def cost(url: str, watch: ProcessorWatch) -> float:
        async with Bide(url) as app:
            await app.schedule("bench.t", b"", delay="1h")
            watch.start()
            await app.schedule_many([app.new("bench.t", b"", delay="1h") for _ in range(200)])
            return watch.stop()

    with place_of(postgres_url) as place:
        server = server_at(place.server)
        watch, load = server.watch(), server.load()
        assert isinstance(watch, ProcessorWatch)
        assert asyncio.run(cost(place.url, watch)) > 0

        def worked() -> bool:
            ask(postgres_url, "SELECT count(*) FROM generate_series(1, 100000)")
            cpu = server.load().cpu
            assert cpu is not None
            return load.cpu is not None and cpu > load.cpu

        wait_until(worked, "a tick of the processor's time")
        assert server.load().requests > load.requests
        assert set(server.health()) == {"live_rows", "dead_rows", "table_bytes", "index_bytes", "vacuums"}


def test_of_a_server_elsewhere_the_stopwatch_is_read_less_a_round_trip(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_PROC", Path("/nowhere"))
    with place_of(postgres_url) as place:
        server = server_at(place.server)
        assert server.postmaster is None
        assert server.load().cpu is None
        watch = server.watch()
        assert isinstance(watch, LessRoundTrip)
        watch.start()
        assert watch.stop() > 0


def test_a_snapshot_holds_vacuum_back_and_is_let_go(postgres_url: str) -> None:
    held = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'bide bench' AND backend_xmin IS NOT NULL"
    with place_of(postgres_url) as place:
        server = server_at(place.server)
        with server.snapshot():
            assert ask(postgres_url, held)[0][0] >= 1
            [[waits]] = ask(postgres_url, "SELECT count(*) FROM pg_stat_activity WHERE state = 'idle in transaction'")
            assert waits >= 1


def test_what_goes_wrong_is_an_error_of_bide(postgres_url: str) -> None:
    with pytest.raises(StoreUnavailable, match="benchmark"), place_of("postgresql://bide@127.0.0.1:1/postgres"):
        pass
    with pytest.raises(StoreUnavailable, match="benchmark"), place_of(postgres_url) as place:
        server_at(place.server)._rows("SELECT nonsense")


@pytest.mark.parametrize("query", ["schema=Upper", "prefix=1", "pooler=x"])
def test_a_url_that_cannot_be_read_is_refused(query: str) -> None:
    with pytest.raises(BadInput), place_of(f"postgresql://host/db?{query}"):
        pass
