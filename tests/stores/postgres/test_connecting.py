"""A new connection: the driver asks about types once in a process; one that is given up is closed."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Collection
from typing import Any

import asyncpg
import pytest
from tests.waiting import until

from bide.core.names import new_id
from bide.stores.postgres.connection import address_of, connect

_VALUES = [[1 << 40, None], [b"\xff"], ["text"], [1, -1], [True, None], [-3]]
_SELECT = "SELECT $1::bigint[], $2::bytea[], $3::text[], $4::integer[], $5::boolean[], $6::smallint[]"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """The types that the driver asks a server about."""
    asked: list[set[int]] = []
    ask = asyncpg.Connection._introspect_types

    async def counted(self: Any, typeoids: Collection[int], timeout: float | None) -> Any:
        asked.append(set(typeoids))
        return await ask(self, typeoids, timeout)

    monkeypatch.setattr(asyncpg.Connection, "_introspect_types", counted)
    return asked


async def test_arrays_are_asked_about_once(url: str, asked: list[set[int]]) -> None:
    for place in range(3):
        connection = await connect(address_of(url), within=10)
        try:
            if place == 1:
                asked.clear()
            assert [*await connection.fetchrow(_SELECT, *_VALUES)] == _VALUES
        finally:
            await connection.close()
    assert asked == []


async def test_types_of_somebodys_own_are_asked_about_each_time(url: str, asked: list[set[int]]) -> None:
    """Another database may have others under the same number."""
    for _ in range(2):
        connection = await connect(address_of(url), within=10)
        try:
            await connection.fetchrow(_SELECT, *_VALUES)
            asked.clear()
            await connection.execute("CREATE TYPE pg_temp.mood AS ENUM ('glad')")
            assert await connection.fetchval("SELECT ARRAY['glad']::pg_temp.mood[]") == ["glad"]
            assert len(asked) == 1
        finally:
            await connection.close()


async def test_a_connection_that_is_given_up_while_it_gets_its_settings_is_closed(url: str) -> None:
    """One that is left open is told of when it is collected, as a ResourceWarning, and those are errors here."""
    address, name = address_of(url), f"slow {new_id()}"
    watching = await asyncpg.connect(address.dsn)
    try:
        slow = {"application_name": f"'{name}'; SELECT pg_sleep(600)"}
        connecting = asyncio.create_task(connect(address, within=60, session=slow))
        sleeping = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep' AND query ~ $1"
        await until(lambda: watching.fetchval(sleeping, name), "the settings to take long")
        assert not connecting.done()
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting
        del connecting
        gc.collect()
        await watching.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = $1", name
        )
    finally:
        await watching.close()
