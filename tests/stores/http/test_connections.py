"""How many connections a client keeps: as many as it needs now, and not as many as it once needed."""

from __future__ import annotations

import asyncio

import pytest
from tests.stores.http.serving import Service
from tests.waiting import until

from bide.core.records import Ref
from bide.stores.http import HttpStore, calls

AT_ONCE = 20


def connections(service: Service) -> int:
    assert service._server is not None
    return len(service._server.server_state.connections)


async def test_connections_of_a_busy_moment_end_though_calls_go_on(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would be kept for ever if each call took the one that has rested for longest."""
    monkeypatch.setattr(calls, "_IDLE", 0.1)
    together = asyncio.Event()

    async def wait(operation: str) -> None:
        await together.wait()

    store = HttpStore(service.url, clock="caller")
    await store.open()
    try:
        service.before = wait
        gets = [asyncio.create_task(store.get([Ref("t", "k")])) for _ in range(AT_ONCE)]
        await until(lambda: connections(service) >= AT_ONCE, "all are under way")
        together.set()
        await asyncio.gather(*gets)

        async def few_after_a_call() -> bool:
            await store.get([Ref("t", "k")])
            return connections(service) <= 2

        ended: bool = await until(few_after_a_call, "the others to end")
        assert ended
    finally:
        await store.close()
