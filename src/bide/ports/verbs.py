"""The operations of clients: on a store, or within an open transaction."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from bide.core.answers import Answer
from bide.core.errors import PartlyFailed, StoreError
from bide.core.instants import Millis
from bide.core.records import Change, Filter, Found, NewTask, Page, Record, Ref, Settlement

Got = TypeVar("Got")


class Pending(asyncio.Future[Got]):
    """An answer to come: another transaction keeps the task locked. Raises StoreError when it is awaited.

    Only a store that locks tasks gives one, in the place of the answer, so that the rest of a batch does not wait.
    """


async def all_answers(answers: Sequence[Got | Pending[Got]]) -> list[Got]:
    """The answers of a batch, once none is pending. Raises PartlyFailed if one of those that were has failed."""
    each: list[Any] = list(answers)
    if Pending in set(map(type, each)):
        await asyncio.wait([one for one in each if isinstance(one, Pending)])
        each = [one.exception() or one.result() if isinstance(one, Pending) else one for one in each]
        if any(isinstance(one, StoreError) for one in each):
            raise PartlyFailed(each)
    return each


class Verbs(Protocol):
    """The operations that clients use; also what a joined transaction offers."""

    async def add(self, tasks: Sequence[NewTask], *, now: Millis) -> Sequence[Answer | Pending[Answer]]:
        """Schedule, each by its own `on_conflict`. Durable once answered. One key may come twice: in order."""
        ...

    async def change(self, changes: Sequence[Change], *, now: Millis) -> Sequence[Answer | Pending[Answer]]:
        """Move, cancel or redrive: each one atomic transition, or an answer that says why not."""
        ...

    async def get(self, refs: Sequence[Ref]) -> list[Record | None]:
        """The tasks as they are, also finished ones while they are kept."""
        ...

    async def find(self, where: Filter, page: Page) -> Found:
        """One page of tasks, served by an index. Tasks that stay put are neither skipped nor repeated across pages.

        Without a topic or a group, what lies in bide's own topics (`core.names.RESERVED_TOPICS`) is passed over, and
        costs next to nothing: there may be more of it than tasks.

        Order: with a group by (topic, key); with a state or a wake range by topic, then `wake_at` (live) or
        `finished_at` (ended); otherwise by topic, and within it as the store likes. Raises BadInput for a cursor that
        is not from here.
        """
        ...

    async def settle(self, outcomes: Sequence[Settlement], *, now: Millis) -> Sequence[bool | Pending[bool]]:
        """Record how leases ended; false where the token is not that of the live lease, and nothing changed."""
        ...


class Joined(Verbs, Protocol):
    """The verbs on one open transaction: they take part in it, and end with it. No answer is pending."""

    async def add(self, tasks: Sequence[NewTask], *, now: Millis) -> Sequence[Answer]: ...

    async def change(self, changes: Sequence[Change], *, now: Millis) -> Sequence[Answer]: ...

    async def settle(self, outcomes: Sequence[Settlement], *, now: Millis) -> Sequence[bool]: ...

    @property
    def connection(self) -> Any:
        """The driver's own connection, for the handler's statements."""
        ...
