"""Every store against the lifecycle: the same calls, the same answers."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tests.servers.fixtures import Borrowed

from bide.core import lifecycle
from bide.core.records import OnConflict, Record, Ref
from bide.ports import Store, Timer
from bide.stores.memory import MemoryStore
from bide.stores.mysql import MySqlStore
from bide.stores.postgres import PostgresStore
from bide.stores.redis import RedisStore
from bide.stores.sqlite import SqliteStore
from bide.testing.store_machine import StoreMachine, play
from bide.timers import HashedWheel, HeapTimer, HierarchicalWheel

GAMES = int(os.environ.get("GAMES", "1"))
"""How many times the games of `make test` are played; `make races` plays them twenty times over."""

TIMERS: dict[str, Callable[[int], Timer[str]] | None] = {
    "none": None,
    "heap": lambda now: HeapTimer(start=now),
    "hashed wheel": lambda now: HashedWheel(slots=64, start=now),
    "hierarchical wheel": lambda now: HierarchicalWheel(start=now),
}


@pytest.mark.parametrize("timer", TIMERS)
def test_memory_answers_as_it_must_over_every_timer(timer: str) -> None:
    def subject() -> Store:
        return MemoryStore(timer=TIMERS[timer])

    assert play(subject, games=25 * GAMES, moves=100, exact_wakes=timer in ("none", "heap")) >= 1_600 * GAMES


@pytest.mark.parametrize("verb", ["schedule", "change", "lease", "settle", ""])
def test_a_new_version_with_the_token_of_the_one_before_is_found(monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    class Stale:
        def __getattr__(self, name: str) -> Any:
            right = getattr(lifecycle, name)

            def stale(*given: Any) -> Any:
                *rest, token = given
                return right(*rest, next((one.token for one in rest if isinstance(one, Record)), token))

            return stale if name == verb else right

    class Game(StoreMachine):
        def make_subject(self) -> Store:
            return MemoryStore()

    monkeypatch.setattr("bide.stores.memory.store.lifecycle", Stale())
    game, ref, now = Game(), Ref("a", "k"), (False, 0)
    with pytest.raises(AssertionError, match="has to rise") if verb else nullcontext():
        for _ in range(2):
            game.schedule([(ref, now, None, None, OnConflict.REPLACE, b"", None)])
        game.change([("move", ref, now, None, None)])
        game.lease({"a": 1}, 1_000)
        game.settle([(0, "retry", now, None, "it failed")])
    game.wait(game.store.close())
    game.runner.close()


def test_sqlite_answers_as_it_must(tmp_path: Path) -> None:
    files = count()

    def subject() -> Store:
        return SqliteStore(str(tmp_path / f"{next(files)}.db"), synchronous="normal")

    assert play(subject, games=40 * GAMES, moves=100) >= 2_600 * GAMES


class TestServers:
    """Apart, for another process than the games without a server."""

    @pytest.mark.parametrize(
        ("servers", "shards", "games", "least"),
        [("redis_url", 1, 40, 2_600), ("redis_url", 16, 40, 2_600), ("redis_cluster_url", 16, 25, 1_600)],
    )
    def test_redis_answers_as_it_must(
        self, request: pytest.FixtureRequest, redis_namespace: str, servers: str, shards: int, games: int, least: int
    ) -> None:
        """Each game in a namespace of its own. Sentinels only say where that one server is: the suite will do."""
        url: str = request.getfixturevalue(servers)
        played = count()

        def subject() -> Store:
            return RedisStore(f"{url}?namespace={redis_namespace}-{next(played)}&shards={shards}", clock="caller")

        assert play(subject, games=games * GAMES, moves=100, exact_order=shards == 1) >= least * GAMES

    @pytest.mark.parametrize(("kind", "exact_ends"), [("postgres", True), ("mysql", False)])
    def test_a_sql_server_answers_as_it_must(self, request: pytest.FixtureRequest, kind: str, exact_ends: bool) -> None:
        """Each game in a schema that the next gets empty."""
        schemas: Borrowed = request.getfixturevalue(f"{kind}_schemas")
        made: Any = {"postgres": PostgresStore, "mysql": MySqlStore}[kind]

        class Borrowing(made):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__(schemas.url(self), clock="caller")

            async def close(self) -> None:
                await super().close()
                schemas.give_back(self)

        assert play(Borrowing, games=30 * GAMES, moves=100, exact_ends=exact_ends) >= 2_000 * GAMES
