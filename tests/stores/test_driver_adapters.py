"""What has to be awaited is not for synchronous verbs, however quickly it answers."""

from __future__ import annotations

import asyncio

import pytest

from bide import SetupError
from bide.engine.context import run_on_this_thread
from bide.stores.driver_adapters import awaited


async def answered_already() -> int:
    """A driver's call whose answer was there before it was waited for."""
    return 1


def test_a_thread_without_a_loop_is_refused_also_what_need_not_wait() -> None:
    with pytest.raises(SetupError, match="await"):
        run_on_this_thread(awaited(answered_already()))


async def test_the_same_of_a_coroutines_thread() -> None:
    assert await awaited(answered_already()) == 1
    with pytest.raises(SetupError, match="await"):
        await asyncio.to_thread(lambda: run_on_this_thread(awaited(answered_already())))
