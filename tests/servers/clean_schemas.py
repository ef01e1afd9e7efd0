"""Schemas with bide's tables, made once and emptied after each use: to make them costs a hundred times as much."""

from __future__ import annotations

import asyncio
import secrets
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import parse_qs, urlsplit

import psycopg
from tests.waiting import PATIENCE

from bide.stores.mysql.schema import SCHEMA as MYSQL_SCHEMA
from bide.stores.postgres.schema import SCHEMA as POSTGRES_SCHEMA
from bide_proofs.servers.mariadb import connect


class CleanSchemas(ABC):
    """On one server, for one process; not for threads. `close` drops them.

    A test that failed may leave a transaction open, so that no lock is waited for without end.
    """

    def __init__(self, url: str, migrate: Callable[[str], Awaitable[Any]]) -> None:
        self._url = url
        self._migrate = migrate
        self._prefix = "t" + secrets.token_hex(5)
        self._made = 0
        self._free: list[str] = []

    def take(self) -> str:
        """The URL of one with empty tables, nobody else's until it is given back."""
        if self._free:
            return self._free.pop()
        self._made += 1
        url = f"{self._url}?schema={self._prefix}_{self._made}"
        with ThreadPoolExecutor(1) as thread:  # since the caller may be on a loop
            thread.submit(lambda: asyncio.run(_finished(self._migrate(url)))).result()
        return url

    def give_back(self, url: str) -> None:
        """After whoever used it has closed its connections. Tables that he made there stay, empty."""
        self._empty(parse_qs(urlsplit(url).query)["schema"][0])
        self._free.append(url)

    def close(self) -> None:
        """Drop them all, also those that were not given back."""
        for number in range(1, self._made + 1):
            self._drop(f"{self._prefix}_{number}")

    @abstractmethod
    def _empty(self, schema: str) -> None:
        """Delete every row, but for the record of migrations, and start the counter anew."""

    @abstractmethod
    def _drop(self, schema: str) -> None: ...


async def _finished(work: Awaitable[Any]) -> None:
    await work


class PostgresSchemas(CleanSchemas):
    def __init__(self, url: str) -> None:
        super().__init__(url, POSTGRES_SCHEMA.migrate)
        self._connection = psycopg.connect(url, autocommit=True, options=f"-c lock_timeout={PATIENCE:.0f}s")

    def _empty(self, schema: str) -> None:
        self._connection.execute(f"""DO $$ DECLARE one record; BEGIN
            FOR one IN SELECT relname AS name, relkind AS kind FROM pg_class
                WHERE relnamespace = '{schema}'::regnamespace AND relkind IN ('r', 'S') AND relname !~ 'migration'
            LOOP
                IF one.kind = 'r' THEN EXECUTE format('DELETE FROM {schema}.%I', one.name);
                ELSE EXECUTE format('ALTER SEQUENCE {schema}.%I RESTART', one.name); END IF;
            END LOOP; END $$""")

    def _drop(self, schema: str) -> None:
        self._connection.execute(f"DROP SCHEMA IF EXISTS {schema} CASCADE")

    def close(self) -> None:
        super().close()
        self._connection.close()


class MySqlSchemas(CleanSchemas):
    def __init__(self, url: str) -> None:
        super().__init__(url, MYSQL_SCHEMA.migrate)
        self._connection = connect(url)

    def _empty(self, schema: str) -> None:
        with self._connection.cursor() as cursor:
            cursor.execute("BEGIN")
            cursor.execute(f"SHOW TABLES FROM {schema}")
            for (table,) in cursor.fetchall():
                if table.endswith("caller"):  # a row without a name is the counter
                    cursor.execute(f"DELETE FROM {schema}.{table} WHERE name <> ''")
                    cursor.execute(f"UPDATE {schema}.{table} SET number = 0, seen = 0, now = 0, micros = 0")
                elif not table.endswith("migration"):
                    cursor.execute(f"DELETE FROM {schema}.{table}")
            self._connection.commit()

    def _drop(self, schema: str) -> None:
        with self._connection.cursor() as cursor:
            cursor.execute(f"DROP DATABASE IF EXISTS {schema}")

    def close(self) -> None:
        super().close()
        self._connection.close()
