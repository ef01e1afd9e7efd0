"""A look at the store that many share: taken when somebody asks, not again before it is worth it.

What costs something may be asked for by a page that is open all day, in many browsers. So a look is taken at most every
so often, and the dearer it was the seldomer: at most a small share of one processor goes into it, however many ask.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")
SHARE = 0.003
"""Of one processor that a look may take, while somebody asks all the time."""


class Look(Generic[T]):
    """`ask` is called at most every `every` seconds, and at most for `share` of the time. Belongs to one event loop.

    `of`: of so many last looks the cheapest says what the next may cost. With two, one that stumbled, or the first with
    everything cold, does not keep numbers old for half a minute. `lasting`: whether a look goes on when nobody waits
    for it any more.
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
        self._loop = asyncio.get_running_loop()
        self._value: T
        self._again_at = float("-inf")
        self._taken_at = float("-inf")
        self._looks: asyncio.Task[None] | None = None

    @property
    def age(self) -> float:
        """Seconds since the last look began; infinite before the first."""
        return self._loop.time() - self._taken_at

    async def get(self) -> T:
        """What was seen: just now, or as long ago as the terms allow. Raises what `ask` raises.

        A caller that stops waiting does not stop the look for others that wait.
        """
        if self._loop.time() >= self._again_at:
            if self._looks is None or self._looks.done():
                self._looks = self._loop.create_task(self._look(), name="bide look")
                self._looks.add_done_callback(self._over)
            looks = self._looks
            self._waiting += 1
            try:
                await asyncio.shield(looks)
            finally:
                self._waiting -= 1
                if not self._waiting and not self._lasting and not looks.done():
                    looks.cancel()
                    self._looks = None  # who comes next begins another
        return self._value

    async def fresh(self) -> T:
        """What there is to be seen now: for whoever has just changed something."""
        if self._looks is not None:  # it may have begun before that
            await asyncio.wait([self._looks])
        self._again_at = float("-inf")
        return await self.get()

    async def _look(self) -> None:
        began = self._loop.time()
        self._value = await self._ask()
        ended = self._loop.time()
        self._taken_at = began
        self._took.append(ended - began)
        self._again_at = began + max(self._every, min(self._took) / self._share)

    def _over(self, looks: asyncio.Task[None]) -> None:
        if self._looks is looks:
            self._looks = None
        if not looks.cancelled():
            looks.exception()  # whoever waited has it

    async def close(self) -> None:
        """Let a look that is under way end."""
        if self._looks is not None:
            self._looks.cancel()
            await asyncio.wait([self._looks])
