"""Group commit: concurrent single calls become one plural call.

While one batch is in flight, the next one gathers, so no call waits for a timer. A single call goes out at the end of
the current turn of the event loop; a thousand concurrent calls go out together. As the load grows, batches get larger
and each call gets cheaper. This is the group commit of databases, with coroutines as committers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, TypeVar

from msgspec import Struct, field

from bide.core.errors import PartlyFailed
from bide.core.payloads import fitting, payload_sizes
from bide.ports import Pending

Asked = TypeVar("Asked")
Got = TypeVar("Got")


class Batcher(Struct, Generic[Asked, Got], eq=False):
    """Combines `ask(x)` calls into `send([x, ...])`, which answers in the same order. One batch is in flight.

    A batch has at most `limit` calls, and `core.payloads.TOGETHER` bytes of payloads.
    """

    send: Callable[[Sequence[Asked]], Awaitable[Sequence[Got | Pending[Got]]]]
    limit: int = 1000
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _asked: list[Asked] = []
    _futures: list[asyncio.Future[Got]] = []
    _task: asyncio.Task[None] | None = None
    _waiting: set[Pending[Any]] = set()

    def ask(self, asked: Asked) -> asyncio.Future[Got]:
        """Return a future for the answer. A caller that stops waiting does not stop the call: it may still be done."""
        future: asyncio.Future[Got] = self._loop.create_future()
        self._asked.append(asked)
        self._futures.append(future)
        if self._task is None:
            self._start()
        return future

    def _start(self) -> None:
        self._task = self._loop.create_task(self._flush(), name="bide batcher")
        self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Send the calls that came meanwhile, however the batch ended (it may have been cancelled before it began)."""
        self._task = None
        if self._asked:
            self._start()

    async def _flush(self) -> None:
        count = 1 if len(self._asked) == 1 else fitting(payload_sizes(self._asked[: self.limit]))
        asked, futures = self._asked[:count], self._futures[:count]
        del self._asked[:count], self._futures[:count]
        try:
            got = await self.send(asked)
            if len(got) != len(asked):
                raise RuntimeError(f"{len(got)} answers to {len(asked)} calls")
        except PartlyFailed as partly:
            self._tell(futures, partly.answers)
        except Exception as error:  # noqa: BLE001 - passed to every caller of the batch
            self._tell(futures, [error] * len(futures))
        except BaseException:
            for future in futures:
                future.cancel()
            raise
        else:
            self._tell(futures, got)

    def _tell(self, futures: Sequence[asyncio.Future[Any]], answers: Sequence[object]) -> None:
        for future, answer in zip(futures, answers, strict=True):
            if future.done():
                continue
            if isinstance(answer, Pending):
                self._later(future, answer)
            elif isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)

    def _later(self, future: asyncio.Future[Any], answer: Pending[Any]) -> None:
        """Pass on a delayed answer when it arrives; the next batch does not wait for it."""
        self._waiting.add(answer)

        def told(answer: asyncio.Future[Any]) -> None:
            self._waiting.discard(answer)
            if answer.cancelled():
                future.cancel()
            else:
                self._tell([future], [answer.exception() or answer.result()])

        answer.add_done_callback(told)

    async def drain(self) -> None:
        """Wait until everything asked so far has been answered."""
        while self._task is not None:
            await asyncio.wait([self._task])
        if self._waiting:
            await asyncio.wait(self._waiting)
