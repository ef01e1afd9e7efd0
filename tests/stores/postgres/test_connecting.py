"""A new connection: what the driver asks about types, it asks once in a process."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import asyncpg
import pytest

from bide.stores.postgres.address import address_of
from bide.stores.postgres.dialect import connect

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
