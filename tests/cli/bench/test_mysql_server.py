"""What a benchmark does to a MySQL or MariaDB server by itself: it leaves nothing, and measures what it says."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.servers.mariadb_server import ask

from bide.app import Bide
from bide.cli.bench import processes
from bide.cli.bench.limits import limit_of
from bide.cli.bench.mysql_server import MysqlServer
from bide.cli.bench.place import place_of
from bide.cli.bench.plan import Plan
from bide.cli.bench.processes import ProcessorWatch
from bide.cli.bench.server import LessRoundTrip
from bide.core.errors import BadInput, StoreMismatch, StoreUnavailable
from bide.stores.mysql import MySqlStore


def databases(url: str) -> set[str]:
    return {str(row[0]) for row in ask(url, "SHOW DATABASES LIKE 'bench%'")}


def server_at(place_server: object) -> MysqlServer:
    assert isinstance(place_server, MysqlServer)
    return place_server


def test_a_database_of_its_own_is_gone_afterwards(mysql_url: str) -> None:
    before = databases(mysql_url)
    with place_of(mysql_url) as place:
        assert (place.kind, place.shared, place.owned) == ("mysql", True, True)
        assert len(databases(mysql_url) - before) == 1
        assert place.size() > 0
    assert databases(mysql_url) == before


def test_a_database_with_others_tables_is_not_touched(mysql_url: str, mysql_schema: str) -> None:
    ask(mysql_url, f"CREATE DATABASE {mysql_schema}")
    ask(mysql_url, f"CREATE TABLE {mysql_schema}.orders (number integer)")
    with place_of(f"{mysql_url}?schema={mysql_schema}") as place:
        assert not place.owned
        with pytest.raises(StoreMismatch, match="bide migrate"):
            asyncio.run(MySqlStore(place.url).open())
    assert ask(mysql_url, f"SELECT count(*) FROM {mysql_schema}.orders")[0][0] == 0


def test_the_raw_limit_is_measured_and_leaves_nothing(mysql_url: str) -> None:
    before = databases(mysql_url)
    with place_of(mysql_url) as place:
        ours = databases(mysql_url)
        with limit_of(Plan(place=place, limit=True)) as limit:
            size = place.size()
            limit.measure(2)
            [made] = databases(mysql_url) - ours
            rows = ask(mysql_url, f"SELECT count(*), count(DISTINCT name), max(length(payload)) FROM {made}.task")
            assert tuple(rows[0]) == (2_000, 2_000, 100)
            assert place.size() == size, "it grows in a place of its own"
            assert limit.fields({})["limit_per_s"] > 0
        assert databases(mysql_url) == ours
    assert databases(mysql_url) == before


def test_the_server_tells_what_it_did(mysql_url: str) -> None:
    with place_of(mysql_url) as place:
        server = server_at(place.server)
        load = server.load()
        ask(mysql_url, "SELECT BENCHMARK(3000000, SHA2('bide', 256))")
        after = server.load()
        assert load.cpu is not None
        assert after.cpu is not None
        assert 0.05 < after.cpu - load.cpu < (after.at - load.at) * 3
        assert after.requests > load.requests
        assert set(server.health()) == {"bytes", "history"}
        assert server.health()["bytes"] > 0


def test_one_operation_costs_those_who_serve_it(mysql_url: str) -> None:
    async def measured() -> tuple[float, float]:
        with place_of(mysql_url) as place:
            watch = server_at(place.server).watch()
            assert isinstance(watch, ProcessorWatch)
            async with Bide(place.url) as app:
                await app.schedule("bench.t", b"", delay="1h")
                watch.start()
                await asyncio.sleep(0.05)
                nothing = watch.stop()
                watch.start()
                await app.schedule_many([app.new("bench.t", b"", delay="1h") for _ in range(1000)])
                return nothing, watch.stop()

    nothing, something = asyncio.run(measured())
    assert something > 1_000
    assert something > 2 * nothing


def test_of_a_server_elsewhere_the_stopwatch_is_read_less_a_round_trip(
    mysql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_PROC", Path("/nowhere"))
    with place_of(mysql_url) as place:
        server = server_at(place.server)
        assert server.load().cpu is None
        watch = server.watch()
        assert isinstance(watch, LessRoundTrip)
        watch.start()
        server._rows("SELECT SLEEP(0.05)")
        assert 45_000 < watch.stop() < 1_000_000


def test_a_snapshot_is_held_and_let_go(mysql_url: str) -> None:
    held = "SELECT count(*) FROM information_schema.innodb_trx WHERE trx_isolation_level = 'REPEATABLE READ'"
    with place_of(mysql_url) as place:
        server = server_at(place.server)
        with server.snapshot():
            assert ask(mysql_url, held)[0][0] >= 1


def test_what_goes_wrong_is_an_error_of_bide(mysql_url: str) -> None:
    with pytest.raises(StoreUnavailable, match="benchmark"), place_of("mysql://bide@127.0.0.1:1/b"):
        pass
    with pytest.raises(StoreUnavailable, match="benchmark"), place_of(mysql_url) as place:
        server_at(place.server)._rows("SELECT nonsense")
    with pytest.raises(BadInput), place_of("mysql://host/db?prefix=1"):
        pass
