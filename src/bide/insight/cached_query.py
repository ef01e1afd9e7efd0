"""A query whose answer many viewers share: it runs on demand, at a limited rate.

A page that is open all day in many browsers may need an expensive query. So the query has a minimum interval, which
grows with its cost: it takes at most a small share of one processor, however many viewers need it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")
SHARE = 0.003
"""The share of one processor that a query may take while its answer is in constant demand."""


def _time() -> float:
    return asyncio.get_running_loop().time()


class CachedQuery(Generic[T]):
    """Calls `ask` at most every `every` seconds, and at most for `share` of the time. Belongs to one event loop.

    The cheapest of the last `of` answers decides how soon the next query may run. With two, a single slow query, such
    as the first with cold caches, does not delay fresh numbers by half a minute. Unless `lasting`, a query is cancelled
    when the last viewer stops waiting.
    """

    def __init__(
        self, ask: Callable[[], Awaitable[T]], *, every: float, share: float = SHARE, of: int = 1, lasting: bool = True
    ) -> None:
        self._ask = ask
        self._every = every
        self._share = share
        self._lasting = lasting
        self._waiting = 0
        self._took = deque([0.0], maxlen=of)
        self._value: T
        self._again_at = float("-inf")
        self._asked_at = float("-inf")
        self._running: asyncio.Task[None] | None = None

    @property
    def age(self) -> float:
        """Seconds since the last answered query began; infinite before the first."""
        return _time() - self._asked_at

    async def get(self) -> T:
        """A new answer, or the last one if it is too soon for another query. Raises the errors of `ask`.

        A caller that stops waiting does not stop the query for other waiting callers.
        """
        if _time() >= self._again_at:
            if self._running is None or self._running.done():
                self._running = asyncio.get_running_loop().create_task(self._refresh(), name="bide query")
                self._running.add_done_callback(self._over)
            running = self._running
            self._waiting += 1
            try:
                await asyncio.shield(running)
            finally:
                self._waiting -= 1
                if not self._waiting and not self._lasting and not running.done():
                    running.cancel()
                    self._running = None  # the next caller begins another query
        return self._value

    async def fresh(self) -> T:
        """An answer from a query that begins now, for a caller that has just made a change."""
        if self._running is not None:  # this query may have begun before the change
            await asyncio.wait([self._running])
        self._again_at = float("-inf")
        return await self.get()

    async def close(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])

    async def _refresh(self) -> None:
        began = _time()
        self._value = await self._ask()
        self._asked_at = began
        self._took.append(_time() - began)
        self._again_at = began + max(self._every, min(self._took) / self._share)

    def _over(self, running: asyncio.Task[None]) -> None:
        if self._running is running:
            self._running = None
        if not running.cancelled():
            running.exception()  # the waiting callers have received it
