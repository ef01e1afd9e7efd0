"""Runs a coroutine to its end, on the standard event loop or on uvloop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from bide.core.errors import MissingExtra


def run_loop(working: Coroutine[Any, Any, None], *, uvloop: bool) -> None:
    """Raises MissingExtra, and what `working` raises."""
    if not uvloop:
        asyncio.run(working)
        return
    try:
        from uvloop import new_event_loop
    except ImportError:
        working.close()
        raise MissingExtra("uvloop", "--uvloop") from None
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(working)
