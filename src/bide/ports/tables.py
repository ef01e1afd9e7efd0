"""Tables of the caller's own, to be watched."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
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

    id: Any
    due: Millis
    columns: Mapping[str, Any]
    """Those that the source asks for, the id among them."""


class Head(Struct, frozen=True):
    """The earliest row of a watched table."""

    due: Millis | None
    """None: there is none."""
    now: Millis
    """The time there: rows that are due by then can be taken."""
    id: Any = None


class Taken(Struct, frozen=True):
    """Rows that are ours, and changed, in an open transaction."""

    rows: Sequence[DueRow]
    connection: Any
    """The driver's own, for the handler's statements."""
    joined: Joined | None
    """The verbs on that transaction, where the table `joins`."""


class RowRefused(Exception):
    """The changes could not be made, or left the row due: rolled back. `rows`: those that may be to blame."""

    def __init__(self, rows: Sequence[DueRow], why: str) -> None:
        self.rows = rows
        super().__init__(why)


class Raced(Exception):
    """The server undid it for what others did at the same moment. Nothing is wrong: look again at once."""


class Table(Protocol):
    """A table that is watched. `skip`: ids of rows that are left out, however many. Raises StoreError, Raced.

    Whatever goes wrong with rows that can be named is RowRefused; any other error is of the rows that were asked for.
    """

    async def open(self) -> list[Finding]:
        """Connect, and look whether table, columns and index are there. Raises SetupError."""
        ...

    async def close(self) -> None: ...

    def clock(self) -> Clock | None:
        """The clock of its database; None where that goes by the caller's."""
        ...

    async def head(self, *, now: Millis, skip: Collection[Any], beyond: bool = False) -> Head:
        """The earliest row that fulfils the condition; with `beyond`, the earliest that is not due yet. O(log n).

        Raises RowRefused for a row whose time cannot be read.
        """
        ...

    @property
    def joins(self) -> bool:
        """True if the app's tasks are in the same database, so that `fire` can add one for each row."""
        ...

    async def fire(
        self, *, now: Millis, limit: int, skip: Collection[Any], new_task: Callable[[DueRow], NewTask] | None
    ) -> list[Any]:
        """In one transaction take up to `limit` due rows, the earliest first, that nobody else holds, change them as
        the source says, and add a task for each if so asked; their ids. Raises RowRefused.
        """
        ...

    async def bury(self, identity: Any, *, now: Millis) -> bool:
        """Make the source's `dead` changes in this row, if it is due still and nobody else holds it; whether they were
        made. Raises RowRefused.
        """
        ...

    def take(self, *, now: Millis, limit: int, skip: Collection[Any]) -> AbstractAsyncContextManager[Taken]:
        """The same for a handler, which is called in between: the rows are locked and changed while it is open.

        Committed on leaving without an error, else rolled back. Raises RowRefused.
        """
        ...

    def listen(self, heard: Callable[[], None]) -> Callable[[], None] | None:
        """Call `heard`, on the running loop, when the table may have changed; what ends that. None: nobody tells."""
        ...


class WatchesTables(Protocol):
    """A store in whose database there may be tables of the caller's own."""

    def tables(self, source: TableSource, *, connections: int) -> Sequence[Table]:
        """The tables of a source in that database, not opened yet; so many transactions may be open on all at once."""
        ...
