"""What a benchmark does to a MySQL or MariaDB server by itself: it leaves nothing, and measures what it says."""

from __future__ import annotations

import asyncio
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from tests.servers.mariadb_server import ask
from tests.waiting import wait_until

from bide.app import Bide
from bide.cli.bench import processes
from bide.cli.bench.limits import limit_of
from bide.cli.bench.mysql_server import MysqlServer, RawMysql
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


def test_a_database_with_others_tables_is_not_touched(mysql_url: str, mysql_schema: str) -> None:
    ask(mysql_url, f"CREATE DATABASE {mysql_schema}")
    ask(mysql_url, f"CREATE TABLE {mysql_schema}.orders (number integer)")
    with place_of(f"{mysql_url}?schema={mysql_schema}") as place:
        assert not place.owned
        with pytest.raises(StoreMismatch, match="bide migrate"):
            asyncio.run(MySqlStore(place.url).open())
    assert ask(mysql_url, f"SELECT count(*) FROM {mysql_schema}.orders")[0][0] == 0


def test_the_raw_limit_is_measured_and_leaves_nothing(mysql_url: str) -> None:
    with place_of(mysql_url) as place:
        assert (place.kind, place.shared, place.owned) == ("mysql", True, True)
        assert place.size() > 0
        own = parse_qs(urlsplit(place.url).query)["schema"][0]
        with limit_of(Plan(place=place, limit=True)) as limit:
            raw, size = limit._raw, place.size()
            assert isinstance(raw, RawMysql)
            limit.measure(2)
            rows = ask(
                mysql_url, f"SELECT count(*), count(DISTINCT name), max(length(payload)) FROM {raw._schema}.task"
            )
            assert tuple(rows[0]) == (2_000, 2_000, 100)
            assert place.size() == size, "it grows in a place of its own"
            assert limit.fields({})["limit_per_s"] > 0
            assert {own, raw._schema} <= databases(mysql_url)
        assert raw._schema not in databases(mysql_url)
    assert own not in databases(mysql_url)


def test_the_server_tells_what_it_did_and_what_an_operation_cost(mysql_url: str) -> None:
    async def cost(url: str, watch: ProcessorWatch) -> float:
        async with Bide(url) as app:
            await app.schedule("bench.t", b"", delay="1h")
            watch.start()
            await app.schedule_many([app.new("bench.t", b"", delay="1h") for _ in range(200)])
            return watch.stop()

    with place_of(mysql_url) as place:
        server = server_at(place.server)
        watch, load = server.watch(), server.load()
        assert isinstance(watch, ProcessorWatch)
        assert asyncio.run(cost(place.url, watch)) > 0

        def worked() -> bool:
            ask(mysql_url, "SELECT BENCHMARK(100000, SHA2('bide', 256))")
            cpu = server.load().cpu
            assert cpu is not None
            return load.cpu is not None and cpu > load.cpu

        wait_until(worked, "a tick of the processor's time")
        assert server.load().requests > load.requests
        assert set(server.health()) == {"bytes", "history"}
        assert server.health()["bytes"] > 0


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
        assert watch.stop() > 0


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
