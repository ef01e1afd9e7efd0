"""The contract of a store, kept by a service over a real socket: all of it over memory, parts of it over SQLite."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest_asyncio
from tests.conformance.test_sqlite import TestSqlite as _Sqlite
from tests.stores.http.serving import Service

from bide.core.records import Ref
from bide.ports import Store
from bide.stores.http import HttpStore
from bide.stores.memory import MemoryStore
from bide.stores.sqlite import SqliteStore
from bide.testing.store_machine import play
from bide.testing.store_suite import StoreSuite
from bide.testing.store_suite.base import SuiteBase
from bide.testing.store_suite.calls import Batches, OddInput
from bide.testing.store_suite.capabilities import Listening, Opening, Remembering


class Binding(SuiteBase):
    """One service for each place, begun when it is first needed."""

    durable: ClassVar[bool] = True

    races: ClassVar[int] = 50
    """They are run in the service's own store, which has been through all of them."""

    @pytest_asyncio.fixture(autouse=True)
    async def _own_services(self, tmp_path: Path) -> Any:  # so that its directory outlives them
        self.services: dict[Path, Service] = {}
        yield
        for service in self.services.values():
            await service.stop()

    async def make_store(self, tmp_path: Path) -> HttpStore:
        service = self.services.get(tmp_path)
        if service is None:
            service = self.services[tmp_path] = Service(self.behind(tmp_path), trusting=True)
            await service.start()
        return HttpStore(service.url, clock="caller")

    def behind(self, place: Path) -> Callable[[], Store]:
        """What makes the service's own store."""
        raise NotImplementedError


class TestHttpOverMemory(Binding, StoreSuite):
    def behind(self, place: Path) -> Callable[[], Store]:
        return MemoryStore


class TestHttpOverSqlite(Binding, Batches, OddInput, Opening, Listening, Remembering):
    """What depends on the store behind the service: what it finds damaged or odd, keeps, and tells of."""

    def behind(self, place: Path) -> Callable[[], Store]:
        return lambda: SqliteStore(str(place / "tasks.db"))

    async def damage(self, tmp_path: Path, ref: Ref) -> None:
        await _Sqlite().damage(tmp_path, ref)


class PlayedStore(HttpStore):
    """A store with a service of its own, begun and ended with it."""

    def __init__(self, make_store: Callable[[], Store]) -> None:
        self._service = Service(make_store, trusting=True)
        super().__init__("http://127.0.0.1:1", clock="caller")

    async def open(self) -> None:
        await self._service.start()
        super().__init__(self._service.url, clock="caller")
        await super().open()

    async def close(self) -> None:
        await super().close()
        await self._service.stop()


def test_a_service_answers_as_it_must() -> None:
    assert play(lambda: PlayedStore(MemoryStore), games=25, moves=100) >= 1_600
