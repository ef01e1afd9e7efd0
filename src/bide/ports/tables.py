"""The port for watching the caller's own tables."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from msgspec import Struct

from bide.core.instants import Millis
from bide.core.records import NewTask
from bide.core.table_source import TableSource
from bide.ports.diagnosis import Finding
from bide.ports.time import Clock
from bide.ports.verbs import Joined


class DueRow(Struct, frozen=True):
    """One row of a watched table, as it was when it came due."""

    id: Hashable
    due: Millis
    columns: Mapping[str, object]
    """The columns that the source selects, including the id."""


class Head(Struct, frozen=True):
    """The earliest row of a watched table."""

    due: Millis | None
    """None: there is no such row."""
    now: Millis
    """The database's time; rows due by then can be taken."""
    id: Hashable = None


class Taken(Struct, frozen=True):
    """The rows that an open transaction has locked and changed."""

    rows: Sequence[DueRow]
    connection: Any
    """The driver's own connection, for the handler's statements."""
    joined: Joined | None
    """The verbs on that transaction, if the table `joins`."""


class RowRefused(Exception):
    """The changes failed, or left a row due, and were rolled back. `rows`: the possible causes."""

    def __init__(self, rows: Sequence[DueRow], why: str) -> None:
        self.rows = rows
        super().__init__(why)


class Raced(Exception):
    """The server rolled back in favour of a concurrent transaction. This is normal: query again at once."""


class Table(Protocol):
    """A watched table. `skip`: any number of ids of rows to leave out. Raises StoreError, Raced.

    An error of identifiable rows is RowRefused; any other error concerns all rows of the call.
    """

    async def open(self) -> list[Finding]:
        """Connect, and check that table, columns and index exist. Raises SetupError."""
        ...

    async def close(self) -> None: ...

    def clock(self) -> Clock | None:
        """The clock of its database; None if it uses its caller's."""
        ...

    async def head(self, *, now: Millis, skip: Collection[Hashable], beyond: bool = False) -> Head:
        """The earliest row that meets the condition; with `beyond`, the earliest that is not due yet. O(log n).

        Raises RowRefused for a row with an unreadable time.
        """
        ...

    @property
    def joins(self) -> bool:
        """True if the app's tasks are in the same database, so that `fire` can add one for each row."""
        ...

    async def fire(
        self, *, now: Millis, limit: int, skip: Collection[Hashable], new_task: Callable[[DueRow], NewTask] | None
    ) -> list[Hashable]:
        """In one transaction lock up to `limit` due rows, earliest first, make the source's changes, and add `new_task`
        of each. Returns their ids. Rows that another transaction has locked are skipped. Raises RowRefused.
        """
        ...

    async def bury(self, identity: Hashable, *, now: Millis) -> bool:
        """Make the source's `dead` changes in this row; False if it is not due, or is locked. Raises RowRefused."""
        ...

    def take(self, *, now: Millis, limit: int, skip: Collection[Hashable]) -> AbstractAsyncContextManager[Taken]:
        """Like `fire`, for a handler that runs inside: the rows stay locked and changed inside the block.

        Committed on leaving without an error, else rolled back. Raises RowRefused.
        """
        ...

    def listen(self, on_change: Callable[[], None]) -> Callable[[], None] | None:
        """Call `on_change` on the running loop when the table may have changed. Returns a function that ends this.

        None: the database sends no notifications.
        """
        ...


class WatchesTables(Protocol):
    """The caller's own tables in the store's database."""

    def tables(self, source: TableSource, *, connections: int) -> Sequence[Table]:
        """The tables of a source, not opened yet. `connections`: the most concurrent transactions over all of them."""
        ...
