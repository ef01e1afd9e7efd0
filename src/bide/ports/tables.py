"""Tables of the caller's own, to be watched."""

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
    """The columns that the source asks for, the id among them."""


class Head(Struct, frozen=True):
    """The earliest row of a watched table."""

    due: Millis | None
    """None: there is none."""
    now: Millis
    """The database's time: rows that are due by then can be taken."""
    id: Hashable = None


class Taken(Struct, frozen=True):
    """Rows that an open transaction has locked and changed."""

    rows: Sequence[DueRow]
    connection: Any
    """The driver's own connection, for the handler's statements."""
    joined: Joined | None
    """The verbs on that transaction, where the table `joins`."""


class RowRefused(Exception):
    """The changes could not be made, or left the row due: rolled back. `rows`: those that may be to blame."""

    def __init__(self, rows: Sequence[DueRow], why: str) -> None:
        self.rows = rows
        super().__init__(why)


class Raced(Exception):
    """The server rolled it back in favour of a concurrent transaction. Nothing is wrong: query again at once."""


class Table(Protocol):
    """A table that is watched. `skip`: ids of rows that are left out, any number. Raises StoreError, Raced.

    An error of rows that can be named is RowRefused; any other error concerns all rows of the call.
    """

    async def open(self) -> list[Finding]:
        """Connect, and check that table, columns and index are there. Raises SetupError."""
        ...

    async def close(self) -> None: ...

    def clock(self) -> Clock | None:
        """The clock of its database; None if it goes by its caller's."""
        ...

    async def head(self, *, now: Millis, skip: Collection[Hashable], beyond: bool = False) -> Head:
        """The earliest row that fulfils the condition; with `beyond`, the earliest that is not due yet. O(log n).

        Raises RowRefused for a row whose time cannot be read.
        """
        ...

    @property
    def joins(self) -> bool:
        """True if the app's tasks are in the same database, so that `fire` can add one for each row."""
        ...

    async def fire(
        self, *, now: Millis, limit: int, skip: Collection[Hashable], new_task: Callable[[DueRow], NewTask] | None
    ) -> list[Hashable]:
        """In one transaction lock up to `limit` due rows, the earliest first, change them as the source says, and add
        `new_task` of each; their ids. Rows that another transaction has locked are passed over. Raises RowRefused.
        """
        ...

    async def bury(self, identity: Hashable, *, now: Millis) -> bool:
        """Make the source's `dead` changes in this row; false if it is not due any more, or locked by another
        transaction. Raises RowRefused.
        """
        ...

    def take(self, *, now: Millis, limit: int, skip: Collection[Hashable]) -> AbstractAsyncContextManager[Taken]:
        """As `fire`, for a handler that runs inside: the rows stay locked and changed until it is left.

        Committed on leaving without an error, else rolled back. Raises RowRefused.
        """
        ...

    def listen(self, on_change: Callable[[], None]) -> Callable[[], None] | None:
        """Call `on_change`, on the running loop, when the table may have changed; the function that ends that.

        None: the database sends no notifications.
        """
        ...


class WatchesTables(Protocol):
    """Tables of the caller's own in the store's database."""

    def tables(self, source: TableSource, *, connections: int) -> Sequence[Table]:
        """The tables of a source, not opened yet. `connections`: open transactions on all of them at once, at most."""
        ...
