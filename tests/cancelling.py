"""A caller that is cancelled at each of its awaits in turn: nothing may be left half done, whichever it was.

    for point in each_await():
        connection = await connect()
        await point.cancel(verb(connection))
        assert not connection.in_transaction, point

The first coroutine is cancelled at its first suspension, the second at its second, and so on, until one comes to its
end untouched: that is the last. A suspension has two moments, and each is a point of its own:

- EARLY: what it waits for is still under way, and is cancelled with it.
- LATE: what it waited for has come, and the coroutine is cancelled before it goes on. So it never sees the answer.

It is `Task.cancel` that does it, so that drivers, timeouts and locks act as they do for a caller in real life. What
the coroutine has others do, in tasks of theirs, is not cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator, Iterator
from enum import StrEnum
from types import coroutine
from typing import Any

MOST = 1000
"""Suspensions of one coroutine; one that has more is taken for endless."""


class Moment(StrEnum):
    EARLY = "early"
    LATE = "late"


class Point:
    """The suspension at which a coroutine is to be cancelled: the first is 1."""

    def __init__(self, at: int, moment: Moment) -> None:
        self.at = at
        self.moment = moment
        self.reached = False
        """Whether the coroutine came to it at all."""

    def __str__(self) -> str:
        return f"cancelled at await {self.at}, {self.moment}"

    async def cancel(self, work: Coroutine[Any, Any, Any]) -> Any:
        """What `work` comes to: what it gives, the CancelledError, or the Exception that it raised in its place."""
        task = asyncio.get_running_loop().create_task(self._run(work), name=f"{self}")
        await asyncio.wait([task])
        if task.cancelled():
            return asyncio.CancelledError()
        error = task.exception()
        if error is None:
            return task.result()
        if isinstance(error, Exception):
            return error
        raise error

    async def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return await self._drive(work)

    @coroutine
    def _drive(self, work: Coroutine[Any, Any, Any]) -> Generator[Any, Any, Any]:
        """As a task does, and count."""
        task = asyncio.current_task()
        assert task is not None
        error: BaseException | None = None
        count = 0
        while True:
            try:
                awaited = work.send(None) if error is None else work.throw(error)
            except StopIteration as ended:
                return ended.value
            count += 1
            if count == self.at:
                self.reached = True
                if self.moment is Moment.LATE and awaited is not None:
                    awaited.add_done_callback(lambda _: task.cancel())  # before that one wakes the task
                else:
                    task.cancel()
            error = None
            try:
                yield awaited
            except BaseException as thrown:  # noqa: BLE001 - it is for the coroutine that is driven
                error = thrown


def each_await(*moments: Moment) -> Iterator[Point]:
    """The points of a coroutine, until one is not reached. `moments`: both, unless said."""
    for moment in moments or tuple(Moment):
        for at in range(1, MOST):
            point = Point(at, moment)
            yield point
            if not point.reached:
                break
        else:
            raise AssertionError(f"it was not over after {MOST} awaits")
