"""The payload of a task, and the lines that a worker writes about it.

Imported by every contestant's worker, in whatever virtual environment that lives: the standard library alone.
"""

from __future__ import annotations

import asyncio
import os
import time

PAYLOAD = 100
"""Bytes that every task carries."""
WARM_UP = 0
"""The number of a task that only shows that a worker is there. Those that count begin with 1."""

_SECONDS = float(os.environ.get("BENCH_SECONDS", "0"))
_log: int | None = None


def text(number: int, due: int) -> str:
    """The payload of task `number`, due at `due` (milliseconds since the epoch).

    >>> text(7, 1700000000000)[:24], len(text(7, 1700000000000))
    ('0000007:1700000000000:xx', 100)
    """
    return f"{number:07d}:{due:013d}:".ljust(PAYLOAD, "x")


def _started(payload: str) -> None:
    """The first line of a handler. Written at once, so that it survives `kill -9`; the same cost for all."""
    at = time.time_ns()
    os.write(_file(), f"start {payload[:7]} {payload[8:21]} {at}\n".encode())


def _pause(payload: str) -> float:
    """Seconds that the handler is to sleep; 0: it does nothing."""
    return _SECONDS if int(payload[:7]) != WARM_UP else 0.0


def _ended(payload: str) -> None:
    """The last line of a handler that sleeps; one that does nothing has ended when it has started."""
    at = time.time_ns()
    os.write(_file(), f"end {payload[:7]} {payload[8:21]} {at}\n".encode())


def _file() -> int:
    global _log
    if _log is None:
        _log = os.open(os.environ["BENCH_LOG"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    return _log


def handle(payload: str) -> None:
    """The handler of a library that runs it in a thread."""
    _started(payload)
    if seconds := _pause(payload):
        time.sleep(seconds)
        _ended(payload)


async def handle_async(payload: str) -> None:
    """The same on an event loop."""
    _started(payload)
    if seconds := _pause(payload):
        await asyncio.sleep(seconds)
        _ended(payload)
