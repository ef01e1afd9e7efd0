"""The pytest plugin for users: `bide_time` moves time and shows what fires.

    @pytest.fixture
    def bide_app():
        return app                                   # your Bide, with its handlers

    async def test_order_closes_after_15_minutes(bide_time):
        await close.schedule(Order(42), key="42", delay="15m")
        assert await bide_time.advance("14m59s") == []
        fired = await bide_time.advance("1s")
        assert [task.ref for task in fired] == [("order.close", "42")]

The tests themselves need an async plugin such as pytest-asyncio (`asyncio_mode = "auto"`) or anyio.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from bide import Bide
    from bide.testing.time_machine import TimeMachine

async_fixture: Any
try:
    from pytest_asyncio import fixture as async_fixture
except ImportError:  # with anyio's plugin a plain fixture may be asynchronous
    async_fixture = pytest.fixture


@pytest.fixture
def bide_app() -> Bide:
    """The app whose time `bide_time` moves: define a fixture of this name in your conftest.py."""
    raise pytest.UsageError(
        "define a fixture `bide_app` that returns your Bide app, so that bide_time can move its time"
    )


@async_fixture  # type: ignore[untyped-decorator]
async def bide_time(bide_app: Bide) -> AsyncIterator[TimeMachine]:
    """Move the time of `bide_app`, which uses a memory store during the test."""
    from bide.testing.time_machine import TimeMachine

    async with TimeMachine(bide_app) as machine:
        yield machine
