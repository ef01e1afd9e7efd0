"""The operations of clients: on a store, or within an open transaction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from bide.core.answers import Answer
from bide.core.instants import Millis
from bide.core.records import Change, Filter, Found, NewTask, Page, Record, Ref, Settlement


class Verbs(Protocol):
    """The operations that clients use; also what a joined transaction offers."""

    async def add(self, tasks: Sequence[NewTask], *, now: Millis) -> list[Answer]:
        """Schedule, each by its own `on_conflict`. Durable once answered. One key may come twice: in order."""
        ...

    async def change(self, changes: Sequence[Change], *, now: Millis) -> list[Answer]:
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

    async def settle(self, outcomes: Sequence[Settlement], *, now: Millis) -> list[bool]:
        """Record how leases ended; false where the token is not that of the live lease, and nothing changed."""
        ...


class Joined(Verbs, Protocol):
    """The verbs on one open transaction: they take part in it, and end with it."""

    @property
    def connection(self) -> Any:
        """The driver's own connection, for the handler's statements."""
        ...
