"""A watched table: how its due rows are found, locked, changed and checked, in any SQL database.

Rows are taken in one transaction, whose effects are invisible to others until the commit:

    lock      the earliest due rows that no other transaction has locked
    change    them as the source says
    check     that each was changed exactly once and is no longer due; otherwise roll back

Each database adds its statements (`watched_table.sql` in its folder), the comparison of its due column with a clock,
and the meaning of its errors. `server_table` is for databases on a server, `sqlite.watched_table` for a file. Nothing
here needs bide's own tables. `TableTimes` reads the due column on a server, and compares it with the server's clock
within a statement.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from functools import partial
from typing import Any, ClassVar, NamedTuple

from bide.core.errors import SetupError
from bide.core.instants import LAST_INSTANT, Millis, as_datetime
from bide.core.table_source import DueIs, Sql, TableSource, zone_of
from bide.ports import DueRow, Finding, Raced, RowRefused
from bide.stores.naive_times import Stretch, instant_of, stretch

Rows = Sequence[Sequence[Any]]
_STILL_DUE = (
    "still due after the changes, so it would be fired again and again: let them end what `where` asks for, or move "
    "the due time ahead"
)
_NOT_CHANGED = "the row did not change: a trigger or a policy of the table keeps it unchanged"
Give = Callable[..., str]
"""Adds a value to a statement's values, with its type if needed; returns the placeholder for it."""


class Plan(NamedTuple):
    """How the database finds the due rows, and whether their ids are unique."""

    served: bool
    """True if an index leads to the due rows."""
    unique: bool
    making: str
    """The statement that creates such an index."""


class _Parts(dict[str, str]):
    """The texts for a statement's braces. Each is made when it is reached, so that the values are in order."""

    def __init__(self, known: Mapping[str, str], made: Mapping[str, Callable[[], str]]) -> None:
        super().__init__(known)
        self._made = made

    def __missing__(self, name: str) -> str:
        text = self[name] = self._made[name]()
        return text


class WatchedTable(ABC):
    """The part of a watched table that all databases share; see `ports.Table`."""

    _queries: ClassVar[Mapping[str, str]]
    _refused: ClassVar[tuple[type[Exception], ...]]
    """Errors in the trial of a statement: the program's own SQL is at fault."""
    _refusals: ClassVar[tuple[type[Exception], ...]]
    """Errors of a change that a row may have caused."""
    _any, _beyond = "{due} IS NOT NULL", "{due} > {cutoff}"
    """The conditions for a row with a due time, and for one that is not due yet."""

    def __init__(self, source: TableSource) -> None:
        self._source = source
        self._times: Any = None
        """Converts times from and to the form of the due column. None: the table has to be examined (again)."""
        ids = ", ".join(map(self._quoted, source.ids))
        self._id = f"({ids})" if len(source.ids) > 1 else ids
        self._has_id = "".join(f" AND {self._quoted(column)} IS NOT NULL" for column in source.ids)
        self._names = {
            "table": ".".join(self._quoted(part) for part in source.table.split(".")),
            "id": ids,
            "due": self._quoted(source.due),
            "where": self._text(source.where),
            "columns": "".join(f", {self._quoted(column)}" for column in source.loaded),
        }

    # --- the database's part

    @property
    @abstractmethod
    def _where(self) -> str:
        """The server or file, for messages about the table."""

    @abstractmethod
    async def _ask(self, connection: Any, text: str, values: Sequence[Any] = ()) -> Rows:
        """The rows of a statement."""

    @abstractmethod
    def _ours(self) -> AbstractContextManager[None]:
        """Raise the errors of our statements as bide's own."""

    @abstractmethod
    def _is_of_rows(self, error: Exception) -> bool:
        """Tell whether its rows made a change fail, and not a temporary error or a defect of the table."""

    @abstractmethod
    def _give(self, values: list[Any], value: Any, kind: str = "") -> str:
        """See `Give`."""

    @abstractmethod
    def _one_of(self, ids: Collection[Any], give: Give, *, out: bool = False) -> str:
        """An SQL condition: a row has one of these ids or, with `out`, none of them."""

    @abstractmethod
    def _compared(self, query: str, now: Millis, give: Give) -> Mapping[str, Callable[[], str]]:
        """The parts of a statement that compare times; `written`: the present in the form of the due column."""

    @abstractmethod
    async def _types(self, connection: Any) -> Mapping[str, str]:
        """The types of the table's columns; none if the table does not exist."""

    @abstractmethod
    async def _is_view(self, connection: Any) -> bool: ...
    @abstractmethod
    async def _prepare(self, connection: Any, kind: str) -> Millis:
        """Set `_times` for a due column of this type; return the present."""

    @abstractmethod
    async def _plan(self, connection: Any, now: Millis, types: Mapping[str, str]) -> Plan:
        """Try the statements without executing them. Raises the database's errors, SetupError."""

    @staticmethod
    def _quoted(name: str) -> str:
        return '"' + name.replace('"', '""') + '"'

    @staticmethod
    def _text(expression: str) -> str:
        """The program's own SQL, escaped for a statement that has values."""
        return expression

    def _column(self, name: str) -> str:
        """The name of a column as the catalog spells it."""
        return name

    # --- statements

    def _write(
        self,
        query: str,
        now: Millis,
        *,
        skip: Collection[Any] = (),
        ids: Collection[Any] = (),
        limit: int = 0,
        changes: Mapping[str, Any] | None = None,
        beyond: bool = False,
    ) -> tuple[str, list[Any]]:
        """A statement and its values. `beyond`: only rows that are not due yet."""
        values: list[Any] = []
        give = partial(self._give, values)

        def changed(value: Any) -> str:
            return self._text(value.written(lambda: parts["written"])) if isinstance(value, Sql) else give(value)

        parts = _Parts(
            self._names,
            {
                **self._compared(query, now, give),
                "any": lambda: (self._beyond if beyond else self._any).format_map(parts),
                "limit": lambda: give(limit, "bigint"),
                "found": lambda: self._one_of(ids, give),
                "skip": lambda: self._has_id + (f" AND {self._one_of(skip, give, out=True)}" if skip else ""),
                "changes": lambda: ", ".join(
                    f"{self._quoted(column)} = {changed(value)}"
                    for column, value in (self._source.changes if changes is None else changes).items()
                ),
            },
        )
        return self._queries[query].format_map(parts), values

    @property
    def _known(self) -> Any:
        if self._times is None:
            raise Raced("the table has to be examined again")
        return self._times

    def _identity(self, values: Sequence[Any]) -> Any:
        return values[0] if len(self._source.ids) == 1 else tuple(values)

    def _row(self, found: Sequence[Any]) -> DueRow:
        """The DueRow of an id, a due time and any loaded columns. Raises RowRefused for an unreadable time."""
        width = len(self._source.ids)
        identity = self._identity(found[:width])
        try:
            due = self._known.instant_of(found[width])
        except ValueError as error:
            raise RowRefused([DueRow(identity, 0, {})], f"its due time cannot be read: {error}") from error
        return DueRow(identity, due, dict(zip(self._source.loaded, found[width + 1 :], strict=False)))

    # --- take

    async def _take(
        self, connection: Any, now: Millis, limit: int, skip: Collection[Any], dead: Any = None
    ) -> list[DueRow]:
        """Lock, change and check up to `limit` due rows, or the one whose id is `dead`."""
        with self._ours():
            found = await self._lock(connection, now, limit, skip, dead)
        rows = [self._row(row) for row in found]
        if rows:
            changes = self._source.changes if dead is None else self._source.dead
            with self._ours(), self._refusing(rows):
                changed = await self._change(connection, now, [row.id for row in rows], changes)
            _check(rows, changed)
        return rows

    async def _lock(self, connection: Any, now: Millis, limit: int, skip: Collection[Any], dead: Any) -> Rows:
        if dead is None:
            return await self._ask(connection, *self._write("take", now, skip=skip, limit=limit))
        return await self._ask(connection, *self._write("take_these", now, ids=[dead]))

    async def _change(
        self, connection: Any, now: Millis, ids: Sequence[Any], changes: Mapping[str, Any] | None
    ) -> Sequence[tuple[Any, bool]]:
        """The ids of the changed rows, each with whether it is still due."""
        changed = await self._ask(connection, *self._write("change", now, ids=ids, changes=changes))
        return [(self._identity(row[:-1]), bool(row[-1])) for row in changed]

    @contextmanager
    def _refusing(self, rows: Sequence[DueRow]) -> Iterator[None]:
        """Raise RowRefused for an error that the rows caused."""
        try:
            yield
        except self._refusals as error:
            if not rows or not self._is_of_rows(error):
                raise
            raise RowRefused(rows, f"the database refuses the changes: {error}") from error

    # --- examine

    async def _examine(self, connection: Any) -> list[Finding]:
        """Check that the table exists and matches the source. Raises SetupError."""
        source, where = self._source, self._where
        types = await self._types(connection)
        if not types:
            raise SetupError(f"{where}: there is no table {source.table} (write names as in the catalog)")
        for column, field in source.named.items():
            if self._column(column) not in types:
                there = ", ".join(types)
                raise SetupError(f"{where}: {source.table} has no column {column!r} ({field}); it has {there}")
        if await self._is_view(connection):
            raise SetupError(f"{where}: {source.table} is a view; name its table, whose rows can be locked")
        now = await self._prepare(connection, types[self._column(source.due)])
        try:
            plan = await self._plan(connection, now, types)
        except BaseException as error:
            self._times = None
            if not isinstance(error, self._refused):
                raise
            raise SetupError(f"{where}: {source.table}: `where` or `changes` is refused: {error}") from error
        index = f"{source.table}: {'an index leads' if plan.served else 'no index leads'} to the due rows"
        make_it = f"each poll reads rows that are not due; run: {plan.making}"
        unique = f"{source.table}: {', '.join(source.ids)} {'is' if plan.unique else 'is not known to be'} unique"
        name_all = "rows with the same id are not fired; make a unique index on it, or name all its columns"
        return [Finding(plan.served, index, make_it), Finding(plan.unique, unique, name_all)]


def _check(rows: Sequence[DueRow], changed: Sequence[tuple[Any, bool]]) -> None:
    """Raise RowRefused unless each row was changed exactly once and is no longer due.

    `changed`: the ids of the changed rows, each with whether it is still due.
    """
    still = {identity for identity, due in changed if due}
    if still:
        raise RowRefused([row for row in rows if row.id in still], _STILL_DUE)
    there = {identity for identity, _ in changed}
    if len(changed) > len(rows) or len({row.id for row in rows}) < len(rows):
        raise RowRefused(rows, "the id is not unique: more rows than were taken would have been changed")
    if len(there) < len(rows):
        raise RowRefused([row for row in rows if row.id not in there], _NOT_CHANGED)


# --- the due column on a server

_EPOCH = as_datetime(0)
_MILLISECOND = timedelta(milliseconds=1)
_BEHIND: Millis = 10
"""A zone's offset is read for this long before the present, since our estimate of the server's clock may be ahead."""


class TableTimes(ABC):
    """The due column of one source, of the type `kind`. Raises SetupError if that type cannot hold these times."""

    zoned: ClassVar[str]
    """The server's type of instants; `naive`: its type of local times."""
    naive: ClassVar[str]
    whole: ClassVar[Collection[str]]
    """Its types of whole numbers; `fractions`: its other numeric types with millisecond precision."""
    fractions: ClassVar[Collection[str]]
    coarse: ClassVar[str]
    """Its numeric type without that precision; `finer`: the type to use instead."""
    finer: ClassVar[str]
    called: ClassVar[str]
    """Its word for times, for error messages."""

    def __init__(self, source: TableSource, kind: str) -> None:
        self._is = DueIs(source.due_is)
        self._kind = kind
        self._after = source.after_ms
        self._zone = zone_of(source.zone)
        what = f"{source.table}.{source.due} is of type {kind}"
        if self._is is DueIs.TIMESTAMP:
            if kind not in (self.zoned, self.naive):
                raise SetupError(f'{what}; for numbers give due_is="seconds" or "milliseconds"')
            if kind == self.zoned:
                self._zone = UTC
        elif kind == self.coarse:
            raise SetupError(f"{what}, which holds such times only to two minutes; make it {self.finer}")
        elif kind not in self.whole and kind not in self.fractions:
            raise SetupError(f"{what}, which holds no {self._is}; leave out due_is= for {self.called}")

    def cutoff(self, now: str, about: Millis, give: Give) -> str:
        """The latest value of the column that is due at `now`, an expression; `about`: our estimate of it."""
        if self._after:  # leave the column unchanged, so that an index on it can be used
            now, about = f"({now} - {self._length(self._after)})", about - self._after
        return self.shown_at(now, about, give)

    def shown_at(self, now: str, about: Millis, give: Give) -> str:
        """`now` in the form of the column."""
        if self._is is not DueIs.TIMESTAMP:
            return self._number(now, "" if self._is is DueIs.SECONDS else " * 1000", whole=self._kind in self.whole)
        if self._kind == self.zoned:
            return now
        return self._in_zone(now, stretch(max(about - _BEHIND, 0), self._zone), give)

    def instant_of(self, value: Any) -> Millis:
        """The instant at which a row with this value is due, rounded up. Raises ValueError for 0000-00-00."""
        if isinstance(value, datetime):
            millis = instant_of(value, self._zone) if value.tzinfo is None else -((_EPOCH - value) // _MILLISECOND)
        elif self._is is DueIs.TIMESTAMP:
            raise ValueError(f"no date: {value!r}")
        elif not math.isfinite(value):  # the server sorts NaN after all other numbers
            millis = 0 if float(value) < 0 else LAST_INSTANT
        else:
            millis = math.ceil(Fraction(value) * (1000 if self._is is DueIs.SECONDS else 1))
        return max(0, min(millis + self._after, LAST_INSTANT))

    # --- the server's part

    @abstractmethod
    def _length(self, millis: Millis) -> str:
        """A duration within a statement."""

    @abstractmethod
    def _number(self, now: str, factor: str, *, whole: bool) -> str:
        """`now` in seconds, times a factor; rounded down if the column has whole numbers."""

    @abstractmethod
    def _in_zone(self, now: str, held: Stretch, give: Give) -> str:
        """`now` as local time in the source's zone."""
