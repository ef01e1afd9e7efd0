"""A service in memory, a way to it that fails on purpose, and a store at the end of that way."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from tests.stores.http.serving import HOST, Service, connected, serving
from tests.waiting import PATIENCE

from bide.ports import remote
from bide.stores.http import HttpStore, calls
from bide.stores.memory import MemoryStore
from bide.testing.proxy import FaultProxy


@pytest.fixture(autouse=True)
def patient_opening(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_AT_FIRST", PATIENCE)


@pytest_asyncio.fixture
async def memory() -> MemoryStore:
    """What the service rests on; it outlives a restart of the service, as a database would."""
    return MemoryStore()


@pytest_asyncio.fixture
async def service(memory: MemoryStore) -> AsyncIterator[Service]:
    async with serving(Service(lambda: memory, trusting=True)) as service:
        yield service


@pytest_asyncio.fixture
async def way(service: Service) -> AsyncIterator[FaultProxy]:
    async with FaultProxy(HOST, service.port) as proxy:
        yield proxy


@pytest_asyncio.fixture
async def store(way: FaultProxy) -> AsyncIterator[HttpStore]:
    """Open; it goes by the test's clock, and soon asks again."""
    url = f"http://{HOST}:{way.port}"
    async with connected(url, clock="caller", patience=remote.CALL_LASTS, silence=0.25) as store:
        yield store
