"""Tasks that somebody keeps locked: they are tried again beside, so that nobody waits for them but who asked.

An open transaction of the application's that has changed a task keeps its row locked for as long as it lasts. Batches
go on past such rows, and what was passed over comes here: it is tried again on a connection of its own, which waits for
nobody, until it is let go or patience is over.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from bide.core.errors import PartlyFailed, StoreError, StoreUnavailable

_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.2
Ask = Callable[[Any, Sequence[Any]], Awaitable[list[Any]]]
"""A call on a connection of the store, with a part of a batch."""


class RowLocked(StoreUnavailable):
    """Not done: an open transaction of somebody else's keeps the task locked."""


class LockedRows:
    """Waits for locked rows, and tries again. Belongs to one event loop."""

    def __init__(self, connection: Any, where: str) -> None:
        self._connection = connection
        self._where = where
        self._waiting: set[asyncio.Task[None]] = set()

    def answers(self, asked: Sequence[Any], answers: list[Any], ask: Ask, *, patience: float) -> list[Any]:
        """`answers` with a future in the place of each that says RowLocked; `ask` is what is tried again."""
        if is_among(RowLocked, answers):
            places = [place for place, answer in enumerate(answers) if type(answer) is RowLocked]
            loop = asyncio.get_running_loop()
            futures = [loop.create_future() for _ in places]
            for place, future in zip(places, futures, strict=True):
                answers[place] = future
            again = self._again([asked[place] for place in places], futures, ask, patience)
            task = loop.create_task(again, name="bide held")
            self._waiting.add(task)
            task.add_done_callback(self._waiting.discard)
        return answers

    async def _again(self, asked: list[Any], futures: list[asyncio.Future[Any]], ask: Ask, patience: float) -> None:
        ends, pause = time.monotonic() + patience, _FIRST_PAUSE
        try:
            while asked:
                await asyncio.sleep(pause)
                pause = min(pause * 2, _LONGEST_PAUSE)
                try:
                    answers = await ask(self._connection, asked)
                except PartlyFailed as error:
                    answers = list(error.answers)
                except StoreError as error:
                    answers = [error] * len(asked)
                if time.monotonic() >= ends:
                    over = StoreUnavailable(
                        f"{self._where}: an open transaction of somebody else's keeps the task locked; nothing was done"
                    )
                    answers = [over if type(answer) is RowLocked else answer for answer in answers]
                left = []
                for one, future, answer in zip(asked, futures, answers, strict=True):
                    if type(answer) is RowLocked:
                        left.append((one, future))
                    elif not future.done():
                        future.set_exception(answer) if isinstance(answer, Exception) else future.set_result(answer)
                asked, futures = [one for one, _ in left], [future for _, future in left]
        finally:
            for future in futures:
                if not future.done():
                    future.set_exception(StoreUnavailable(f"{self._where}: the store was closed; nothing was done"))

    async def close(self) -> None:
        for task in self._waiting:
            task.cancel()
        await asyncio.gather(*self._waiting, return_exceptions=True)


def is_among(kind: type, answers: Sequence[Any]) -> bool:
    """Tell whether one of many answers is of this kind: they are mostly of the same, so kinds are looked at once."""
    return any(issubclass(one, kind) for one in set(map(type, answers)))


async def together(answers: list[Any]) -> list[Any]:
    """All of them, those that come later waited for. Raises PartlyFailed."""
    if not is_among(asyncio.Future, answers):
        return answers
    later = {place: answer for place, answer in enumerate(answers) if isinstance(answer, asyncio.Future)}
    await asyncio.wait(later.values())
    for place, future in later.items():
        answers[place] = future.exception() or future.result()
    if any(isinstance(answer, StoreError) for answer in answers):
        raise PartlyFailed(answers)
    return answers
