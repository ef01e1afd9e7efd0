"""The operations of clients, on a store or in an open transaction."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from bide.core.answers import Answer
from bide.core.errors import PartlyFailed, StoreError
from bide.core.events import Event
from bide.core.instants import Millis
from bide.core.records import Change, Filter, Found, NewTask, Page, Record, Ref, Settlement

Got = TypeVar("Got")


class Pending(asyncio.Future[Got]):
    """A pending answer, because another transaction has locked the task. Awaiting it may raise StoreError.

    Only a store that locks tasks returns it in place of an answer, so that the rest of the batch does not wait.
    """


async def all_answers(answers: Sequence[Got | Pending[Got]]) -> list[Got]:
    """The answers of a batch, once none is pending. Raises PartlyFailed if a pending answer has failed."""
    each: list[Any] = list(answers)
    if Pending in set(map(type, each)):
        await asyncio.wait([one for one in each if isinstance(one, Pending)])
        each = [one.exception() or one.result() if isinstance(one, Pending) else one for one in each]
        if any(isinstance(one, StoreError) for one in each):
            raise PartlyFailed(each)
    return each


def run_at_once(steps: Coroutine[Any, Any, Got], waits: Exception) -> Got:
    """Run a coroutine that never waits to its end in this thread, without an event loop. Raises `waits` if it does."""
    try:
        steps.send(None)
    except StopIteration as ended:
        answer: Got = ended.value
        return answer
    steps.close()
    raise waits


class Verbs(Protocol):
    """The operations that clients use; a joined transaction has them too."""

    async def add(self, tasks: Sequence[NewTask], *, now: Millis) -> Sequence[Answer | Pending[Answer]]:
        """Schedule each task by its own `on_conflict`. Durable once answered. A repeated key is applied in order."""
        ...

    async def change(self, changes: Sequence[Change], *, now: Millis) -> Sequence[Answer | Pending[Answer]]:
        """Move, cancel or redrive. Each is one atomic transition, or is answered with the reason why not."""
        ...

    async def get(self, refs: Sequence[Ref]) -> list[Record | None]:
        """The current tasks, including ended ones while they are kept."""
        ...

    async def find(self, where: Filter, page: Page) -> Found:
        """One page of tasks, read from an index. Unchanged tasks are neither skipped nor repeated across pages.

        Without a topic or a group, bide's own topics (`core.names.RESERVED_TOPICS`) are skipped at almost no cost,
        since they may hold more entries than there are tasks.

        Order: with a group by (topic, key); with a state or a wake range by topic, then `wake_at` (live) or
        `finished_at` (ended); otherwise by topic, and within it in any order. Raises BadInput for a foreign cursor.
        """
        ...

    async def settle(self, outcomes: Sequence[Settlement], *, now: Millis) -> Sequence[bool | Pending[bool]]:
        """Record the outcomes of leases; False, and no change, for a token that is not that of the live lease."""
        ...


class Joined(Verbs, Protocol):
    """The verbs in one open transaction; their effect commits or rolls back with it. No answer is pending."""

    async def add(self, tasks: Sequence[NewTask], *, now: Millis) -> Sequence[Answer]: ...

    async def change(self, changes: Sequence[Change], *, now: Millis) -> Sequence[Answer]: ...

    async def settle(self, outcomes: Sequence[Settlement], *, now: Millis) -> Sequence[bool]: ...

    async def record(self, events: Sequence[Event]) -> None:
        """Append to the event log, if the store has one."""
        ...

    @property
    def connection(self) -> Any:
        """The driver's own connection, for the handler's statements."""
        ...
