"""A block on a connection that the caller opened: all of it is done or nothing, also where it is cancelled.

It is in a savepoint of the caller's transaction; where there is none, in a transaction of its own. Its beginning and
its end are not given up half-way, so that it is always known how far it came. What is in between may be cancelled at
every await, and is undone then. Where that fails the connection is closed: nobody may commit a half of it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import nullcontext, suppress
from types import TracebackType
from typing import Any, Self, TypeVar

from bide.stores.driver_adapters import Driver, on_a_loop, pause

T = TypeVar("T")
_LONGEST = 10.0
"""Seconds that who is cancelled waits for the end of what is not given up; then the connection is closed."""
_NAME = "bide_verb"


class Known:
    """The state of a caller's connection, kept for as long as that is there."""

    def __init__(self, *, asynchronous: bool = True) -> None:
        self.turn: asyncio.Lock | ThreadTurn = asyncio.Lock() if asynchronous else ThreadTurn()
        """Verbs side by side go one after another: a connection does one thing at a time."""
        self.ours = False
        """True once it was found to be to this very database."""
        self.gone = False
        """True while the server has undone the caller's transaction, and the caller has not yet rolled it back."""


class ThreadTurn:
    """A lock for a synchronous connection, which threads may share, and which never lets go of its thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    async def __aenter__(self) -> None:
        while not self._lock.acquire(blocking=False):
            await pause(0.001)

    async def __aexit__(self, *exc_info: object) -> None:
        self._lock.release()


class Whole:
    """The block of one verb. `committing` says whether its end was a commit of its own, and was sent."""

    def __init__(
        self,
        driver: Driver,
        first: Sequence[str] = (),
        last: Sequence[str] = (),
        *,
        gone: Callable[[Exception], Awaitable[bool]] | None = None,
    ) -> None:
        """`first`: what is set within it; `last`: what takes that back, in a transaction of the caller's.

        `gone`: whether it cannot be undone since the server has undone all of the transaction, and what to do then.
        """
        self._driver = driver
        self._gone = gone
        self._alone = driver.alone
        self._first = first
        self._last = last
        self._begun = False
        self.committing = False

    async def __aenter__(self) -> Self:
        try:
            await self._carried(self._begin())
        except BaseException:
            await self._carried(self._undo())
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is None:
                await self._carried(self._end())
        finally:
            if self._begun:
                await self._carried(self._undo())

    async def _begin(self) -> None:
        await self._driver.command("BEGIN" if self._alone else f"SAVEPOINT {_NAME}", *self._first)
        self._begun = True

    async def _end(self) -> None:
        self.committing = self._alone
        await self._driver.command(*(("COMMIT",) if self._alone else (*self._last, f"RELEASE SAVEPOINT {_NAME}")))
        self._begun = False

    async def _undo(self) -> None:
        if self._driver.closed:
            return
        try:
            async with asyncio.timeout(_LONGEST) if on_a_loop() else nullcontext():
                if self._alone and (self._begun or self._driver.in_transaction):
                    await self._driver.command("ROLLBACK")
                elif self._begun:
                    await self._driver.command(f"ROLLBACK TO {_NAME}", f"RELEASE SAVEPOINT {_NAME}")
            self._begun = False
        except BaseException as error:
            usable = False
            try:
                usable = isinstance(error, Exception) and self._gone is not None and await self._gone(error)
            finally:
                if not usable:
                    await self._driver.close()
            if not isinstance(error, Exception):
                raise

    async def _carried(self, step: Coroutine[Any, Any, None]) -> None:
        if self._driver.asynchronous and on_a_loop():
            await to_its_end(step, within=_LONGEST)
        else:  # it never lets go of its thread
            await step


async def to_its_end(step: Coroutine[Any, Any, T], *, within: float | None = None) -> T:
    """The result of `step`, which is not given up half-way: a cancellation is passed on when it is done.

    `within`: so many seconds after it, `step` is cancelled all the same.
    """
    loop = asyncio.get_running_loop()
    task = loop.create_task(step, name="bide to its end")
    ended: asyncio.Future[None] = loop.create_future()  # `asyncio.wait` would take three times as long
    task.add_done_callback(lambda _: None if ended.done() else ended.set_result(None))
    try:
        await ended
    except asyncio.CancelledError as error:
        cancelled = error
    else:
        return task.result()
    while not task.done():
        try:
            await asyncio.wait([task], timeout=within)
        except asyncio.CancelledError as error:
            cancelled = error
        else:
            if not task.done():
                task.cancel()
    with suppress(asyncio.CancelledError):
        task.exception()
    raise cancelled
