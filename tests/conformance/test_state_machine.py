"""Every store against the memory store: the same calls, the same answers."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
from tests.servers.fixtures import Borrowed

from bide.ports import Store, Timer
from bide.stores.memory import MemoryStore
from bide.stores.mysql import MySqlStore
from bide.stores.postgres import PostgresStore
from bide.stores.redis import RedisStore
from bide.stores.sqlite import SqliteStore
from bide.testing.store_machine import play
from bide.timers import HashedWheel, HeapTimer, HierarchicalWheel

GAMES = int(os.environ.get("GAMES", "1"))
"""How many times the games of `make test` are played; `make races` plays them twenty times over."""

TIMERS: dict[str, Callable[[int], Timer[str]]] = {
    "heap": lambda now: HeapTimer(start=now),
    "hashed wheel": lambda now: HashedWheel(slots=64, start=now),
    "hierarchical wheel": lambda now: HierarchicalWheel(start=now),
}


@pytest.fixture
def fast_place() -> Iterator[Path]:
    """A directory in memory where there is one: the game is about answers, not about the disk."""
    memory = Path("/dev/shm")
    place = Path(tempfile.mkdtemp(prefix="bide-", dir=memory if memory.is_dir() else None))
    yield place
    shutil.rmtree(place)


@pytest.mark.parametrize("timer", TIMERS)
def test_memory_answers_the_same_over_every_timer(timer: str) -> None:
    def subject() -> Store:
        return MemoryStore(timer=TIMERS[timer])

    assert play(subject, games=25 * GAMES, moves=100, exact_wakes=timer == "heap") >= 1_600 * GAMES


def test_sqlite_answers_as_memory_does(fast_place: Path) -> None:
    files = count()

    def subject() -> Store:
        return SqliteStore(str(fast_place / f"{next(files)}.db"), synchronous="normal")

    assert play(subject, games=65 * GAMES, moves=100) >= 5_000 * GAMES


@pytest.mark.parametrize("shards", [1, 16])
def test_redis_answers_as_memory_does(redis_url: str, redis_namespace: str, shards: int) -> None:
    assert play_redis(redis_url, redis_namespace, shards, games=60 * GAMES) >= 4_000 * GAMES


def test_a_redis_cluster_answers_as_memory_does(redis_cluster_url: str, redis_namespace: str) -> None:
    assert play_redis(redis_cluster_url, redis_namespace, 16, games=25 * GAMES) >= 1_600 * GAMES


def test_redis_under_sentinel_answers_as_memory_does(redis_sentinel_url: str, redis_namespace: str) -> None:
    assert play_redis(redis_sentinel_url, redis_namespace, 16, games=25 * GAMES) >= 1_600 * GAMES


class BorrowingPostgres(PostgresStore):
    """In a schema that the next game gets empty."""

    def __init__(self, schemas: Borrowed) -> None:
        self._schemas = schemas
        super().__init__(schemas.url(self), clock="caller")

    async def close(self) -> None:
        await super().close()
        self._schemas.give_back(self)


def test_postgres_answers_as_memory_does(postgres_schemas: Borrowed) -> None:
    assert play(lambda: BorrowingPostgres(postgres_schemas), games=30 * GAMES, moves=100) >= 2_000 * GAMES


class BorrowingMySql(MySqlStore):
    """The same."""

    def __init__(self, schemas: Borrowed) -> None:
        self._schemas = schemas
        super().__init__(schemas.url(self), clock="caller")

    async def close(self) -> None:
        await super().close()
        self._schemas.give_back(self)


def test_mysql_answers_as_memory_does(mysql_schemas: Borrowed) -> None:
    assert play(lambda: BorrowingMySql(mysql_schemas), games=30 * GAMES, moves=100, exact_ends=False) >= 2_000 * GAMES


def play_redis(url: str, namespace: str, shards: int, *, games: int) -> int:
    """Each game in a namespace of its own."""
    played = count()

    def subject() -> Store:
        return RedisStore(f"{url}?namespace={namespace}-{next(played)}&shards={shards}", clock="caller")

    return play(subject, games=games, moves=100, exact_order=shards == 1)
