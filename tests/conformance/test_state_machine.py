"""Every store against the memory store: the same calls, the same answers."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from bide.ports import Store, Timer
from bide.stores.memory import MemoryStore
from bide.stores.redis import RedisStore
from bide.stores.sqlite import SqliteStore
from bide.testing.store_machine import play
from bide.timers import HashedWheel, HeapTimer, HierarchicalWheel

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

    assert play(subject, games=45, moves=100, exact_wakes=timer == "heap") >= 3_000


def test_sqlite_answers_as_memory_does(fast_place: Path) -> None:
    files = count()

    def subject() -> Store:
        return SqliteStore(str(fast_place / f"{next(files)}.db"), synchronous="normal")

    assert play(subject, games=260, moves=100) >= 20_000


@pytest.mark.parametrize("shards", [1, 16])
def test_redis_answers_as_memory_does(redis_url: str, redis_namespace: str, shards: int) -> None:
    games = count()

    def subject() -> Store:
        return RedisStore(f"{redis_url}?namespace={redis_namespace}-{next(games)}&shards={shards}", clock="caller")

    assert play(subject, games=120, moves=100, exact_order=shards == 1) >= 8_000
