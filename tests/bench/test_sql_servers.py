"""What a benchmark does to a PostgreSQL or MySQL server by itself: it leaves nothing, and measures what it says."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from uuid import uuid4

import pytest
from psycopg.errors import InsufficientPrivilege
from tests.waiting import until

from bide.app import Bide
from bide.core.errors import StoreMismatch, StoreUnavailable
from bide_bench import processes, sql_server
from bide_bench.plan import Plan, limit_of, open_target
from bide_bench.sql_server import SqlServer
from bide_proofs.servers import mariadb
from bide_proofs.servers.postgres import ask


class Kind(NamedTuple):
    """What differs between the two."""

    ask: Callable[[str, str], Any]
    schemas: str
    works: str
    held: str
    """How many hold a snapshot."""
    health: set[str]


KINDS = {
    "postgres": Kind(
        ask, "SELECT nspname FROM pg_namespace", "SELECT count(*) FROM generate_series(1, 100000)",
        "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'bide bench' AND backend_xmin IS NOT NULL "
        "AND state = 'idle in transaction'",
        {"live_rows", "dead_rows", "table_bytes", "index_bytes", "vacuums"},
    ),
    "mysql": Kind(
        mariadb.ask, "SHOW DATABASES", "SELECT BENCHMARK(100000, SHA2('bide', 256))",
        "SELECT count(*) FROM information_schema.innodb_trx WHERE trx_isolation_level = 'REPEATABLE READ'",
        {"bytes", "history"},
    ),
}  # fmt: skip


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def url(kind: str, request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(f"{kind}_url"))


def schemas(kind: str, url: str) -> set[str]:
    return {str(row[0]) for row in KINDS[kind].ask(url, KINDS[kind].schemas)}


def server_at(target: object) -> SqlServer:
    assert isinstance(target, SqlServer)
    return target


async def open_and_close(url: str) -> None:
    async with Bide(url):
        pass


async def test_a_schema_that_was_not_there_is_made_and_dropped(postgres_url: str, postgres_schema: str) -> None:
    async with open_target(f"{postgres_url}?schema={postgres_schema}&prefix=a_") as target:
        assert target.owned
        assert ask(postgres_url, f"SELECT count(*) FROM {postgres_schema}.a_task")[0][0] == 0
    assert postgres_schema not in schemas("postgres", postgres_url)


async def test_a_schema_with_others_tables_is_not_touched(kind: str, url: str, request: pytest.FixtureRequest) -> None:
    schema = request.getfixturevalue(f"{kind}_schema")
    KINDS[kind].ask(url, f"CREATE SCHEMA {schema}")
    KINDS[kind].ask(url, f"CREATE TABLE {schema}.orders (number integer)")
    async with open_target(f"{url}?schema={schema}") as target:
        assert not target.owned
        with pytest.raises(StoreMismatch, match="bide migrate"):
            await open_and_close(target.url)
    assert KINDS[kind].ask(url, f"SELECT count(*) FROM {schema}.orders")[0][0] == 0


async def test_what_was_filled_in_is_written_down_before_anything_is_measured(postgres_url: str) -> None:
    async with open_target(postgres_url) as target:
        [[filled]] = ask(postgres_url, "SELECT pg_current_wal_insert_lsn()::text")
        await target.flush()
    assert ask(postgres_url, f"SELECT checkpoint_lsn >= '{filled}'::pg_lsn FROM pg_control_checkpoint()")[0][0]


async def test_who_may_not_ask_for_a_checkpoint_measures_without_one(postgres_url: str, postgres_schema: str) -> None:
    ask(postgres_url, f"CREATE ROLE {postgres_schema} LOGIN")
    ask(postgres_url, f"CREATE SCHEMA {postgres_schema} AUTHORIZATION {postgres_schema}")
    url = f"{postgres_url.replace('//bide@', f'//{postgres_schema}@')}?schema={postgres_schema}"
    try:
        with pytest.raises(InsufficientPrivilege):
            ask(url.partition("?")[0], "CHECKPOINT")
        async with open_target(url) as target:
            await target.flush()
            assert not target.owned
    finally:
        ask(postgres_url, f"DROP OWNED BY {postgres_schema} CASCADE")
        ask(postgres_url, f"DROP ROLE {postgres_schema}")


async def test_the_raw_limit_is_measured_and_leaves_nothing(
    kind: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = uuid4()
    monkeypatch.setattr(sql_server, "uuid4", lambda: name)
    own, raw = f"bench_{name.hex}", f"bench_limit_{name.hex}"
    async with open_target(url) as target:
        assert (target.kind, target.shared, target.owned) == (kind, True, True)
        assert await target.size() > 0
        async with limit_of(Plan(target=target, limit=True)) as limit:
            size = await target.size()
            await limit.measure(2)
            counted = "count(*), count(DISTINCT name), max(length(payload))"
            assert tuple(KINDS[kind].ask(url, f"SELECT {counted} FROM {raw}.task")[0]) == (2_000, 2_000, 100)
            assert await target.size() == size, "it grows in a place of its own"
            assert (await limit.fields({}))["limit_per_s"] > 0
            assert {own, raw} <= schemas(kind, url)
        assert raw not in schemas(kind, url)
    assert own not in schemas(kind, url)


async def test_the_server_tells_what_it_did_and_what_an_operation_cost(kind: str, url: str) -> None:
    async with open_target(url) as target:
        server = server_at(target)
        load = await server.load()
        async with Bide(target.url) as app:
            await app.schedule("bench.t", b"", delay="1h")
            stop = await server.measure()
            await app.schedule_many([app.new("bench.t", b"", delay="1h") for _ in range(200)])
            assert stop() > 0

        async def worked() -> bool:
            KINDS[kind].ask(url, KINDS[kind].works)
            return (await server.load()).cpu > load.cpu

        await until(worked, "a tick of the processor's time")
        assert (await server.load()).requests > load.requests
        assert set(await server.health()) == KINDS[kind].health


async def test_of_a_server_elsewhere_the_stopwatch_is_read_less_a_round_trip(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_PROC", Path("/nowhere"))
    async with open_target(url) as target:
        far = server_at(target)
        assert math.isnan((await far.load()).cpu)
        stop = await far.measure()
        assert stop() >= 1


async def test_a_snapshot_is_held_and_let_go(kind: str, url: str) -> None:
    async with open_target(url) as target, server_at(target).snapshot():
        assert KINDS[kind].ask(url, KINDS[kind].held)[0][0] >= 1


async def test_what_goes_wrong_is_an_error_of_bide(url: str) -> None:
    nobody = urlsplit(url)._replace(netloc="bide@127.0.0.1:1").geturl()
    with pytest.raises(StoreUnavailable, match="benchmark"):
        async with open_target(nobody):
            pass
    with pytest.raises(StoreUnavailable, match="benchmark"):
        async with open_target(url) as target:
            await server_at(target).rows("SELECT nonsense")
