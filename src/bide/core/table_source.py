"""An application's own table whose rows become due: its name, the due condition, and the changes when a row fires.

The table remains the source of truth, and nothing is copied out of it. A row is due while `where` holds and the time in
its `due` column has come. Firing a row makes the `changes`, after which it must no longer be due.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, tzinfo
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from msgspec import Struct
from msgspec.structs import force_setattr, replace

from bide.core.errors import BadInput
from bide.core.instants import Length, Millis, duration
from bide.core.recurrence.zones import zone_info

_LONGEST_LOOK: Millis = 3_600_000
_LONGEST_AFTER: Millis = 3_650 * 86_400_000
_LARGEST_PAGE = 10_000
_MOST_TABLES = 1_024
_PATTERN = re.compile(r"\{([0-9]{1,9})\.\.([0-9]{1,9})\}")
_NAME = re.compile(r"[^\x00-\x1f\x7f\"`\[\]\\.]{1,63}")
_QUOTED = re.compile(r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|`[^`]*`")
_REFUSED = re.compile(r"[;?$\\\x00\"'`]|--|/\*|(?<!:):(?=[A-Za-z_])")
_NOW = re.compile(r"(?<![:\w]):now\b")
_READS = "the URL of a replica, and then no `channel`, on which a replica cannot listen; or None"
_TABLE = (
    '"table" or "schema.table"; for many tables a name with one range of numbers, such as "order_{00..63}" or '
    f'"order_{{1..12}}", that goes up, by at most {_MOST_TABLES:,} numbers, all as long where one begins with 0'
)


class DueIs(StrEnum):
    """The kinds of due columns."""

    TIMESTAMP = "timestamp"
    """The database's timestamp type, with or without a zone; in SQLite ISO 8601 text, in one form for all rows."""
    SECONDS = "seconds"
    MILLISECONDS = "milliseconds"
    """Since the epoch."""


class Sql(Struct, frozen=True):
    """An SQL expression for a value that the database computes: `Sql("times + 1")`.

    In it, `:now` is the instant of firing, in the form of the due column. The expression is inserted into statements
    unchanged, so it must be part of the program and never come from outside.
    """

    text: str

    def __post_init__(self) -> None:
        check_expression("Sql", self.text, now=True)

    def written(self, now: Callable[[], str]) -> str:
        """The expression with each `:now` outside quotes replaced by the result of `now`."""
        return "".join(
            part if place % 2 else _NOW.sub(lambda _: now(), part)
            for place, part in enumerate(_around_quotes(self.text))
        )


class TableSource(Struct, frozen=True, kw_only=True):
    """A table to be watched. Raises BadInput for invalid arguments; a worker checks the table itself when it starts.

    - `table`: its name, with its schema if needed ("blog.posts"); "order_{00..63}" names 64 tables.
    - `due`: the column with the time at which a row is due.
    - `where`: a condition on the columns, in SQL, such as "status = 2"; only rows that meet it are due.
    - `changes`: the new values of columns when a row fires, or `Sql(...)`. They must make `where` false, or move `due`
      ahead.
    - `id`: a unique column, or several that are unique together.
    - `columns`: further columns that a handler gets.
    - `due_is`: how `due` holds a time: "timestamp", or "seconds" or "milliseconds" since the epoch.
    - `after`: how long after the time in `due` a row is due, such as "48h".
    - `zone`: the zone of times without one, such as "Europe/Rome".
    - `page`: how many rows are taken at once.
    - `look_every`: the longest time between two queries, at most an hour; other processes' writes send no notification.
    - `database`: the URL of the database, if it is not the app's store; bide then needs no tables of its own there.
    - `reads`: the URL of a replica to query instead of the database.
    - `channel`: in PostgreSQL, a channel to listen on; a notification there causes a query at once.
    - `tries`: the number of failures after which a row is given up; None: never.
    - `dead`: the new values of columns when a row is given up, such as {"status": 9}; they must make `where` false.
      Without it the row is unchanged, and this process leaves it out.
    """

    table: str
    due: str
    where: str
    changes: Mapping[str, Any]
    id: str | Sequence[str] = "id"
    columns: Sequence[str] = ()
    due_is: str = "timestamp"
    after: Length = "0s"
    zone: tzinfo | str = UTC
    page: int = 100
    look_every: Length = "1s"
    database: str | None = None
    reads: str | None = None
    channel: str | None = None
    tries: int | None = None
    dead: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for table in self.tables:
            if table.count(".") > 1:
                raise BadInput("table", self.table, _TABLE)
            for part in table.split("."):
                _check_name("table", part)
        if not isinstance(self.id, str | list | tuple) or not self.id:
            raise BadInput("id", self.id, "the name of a column, or a list of names")
        for column in self.ids:
            _check_name("id", column)
        _check_name("due", self.due)
        if not isinstance(self.columns, list | tuple):
            raise BadInput("columns", self.columns, "a list of columns' names")
        for column in self.columns:
            _check_name("columns", column)
        check_expression("where", self.where)
        self._check_changes("changes", self.changes, "when a row fires")
        if self.dead is not None:
            self._check_changes("dead", self.dead, "when a row is given up")
        if self.tries is not None and (type(self.tries) is not int or self.tries < 1):
            raise BadInput("tries", self.tries, "a whole number of tries, at least 1; or None, never to give up")
        if self.due_is not in list(DueIs):
            raise BadInput("due_is", self.due_is, f"one of {', '.join(DueIs)}")
        if self.after_ms > _LONGEST_AFTER:
            raise BadInput("after", self.after, "a length, at most 3,650 days")
        zone_of(self.zone)
        if type(self.page) is not int or not 1 <= self.page <= _LARGEST_PAGE:
            raise BadInput("page", self.page, f"a whole number from 1 to {_LARGEST_PAGE:,}")
        if not 0 < self.look_every_ms <= _LONGEST_LOOK:
            raise BadInput("look_every", self.look_every, "a length above zero, at most an hour")
        if self.database is not None and not _is_text(self.database):
            raise BadInput("database", self.database, "a URL, or None for the app's own store")
        if self.reads is not None and (not _is_text(self.reads) or self.channel is not None):
            raise BadInput("reads", "a URL" if _is_text(self.reads) else self.reads, _READS)
        if self.channel is not None:
            _check_name("channel", self.channel)
        force_setattr(self, "changes", MappingProxyType(dict(self.changes)))
        if self.dead is not None:
            force_setattr(self, "dead", MappingProxyType(dict(self.dead)))
        force_setattr(self, "columns", tuple(self.columns))

    def _check_changes(self, field: str, changes: Any, when: str) -> None:
        if not changes or not hasattr(changes, "items"):
            raise BadInput(field, changes, f'what is to change {when}, such as {{"status": 3}}')
        for column in changes:
            _check_name(field, column)
        if set(self.ids) & set(changes):
            raise BadInput(field, self.id, "columns other than the id, which has to stay")

    @property
    def tables(self) -> Sequence[str]:
        parts = _PATTERN.split(self.table) if _is_text(self.table) else ()
        if len(parts) == 1:
            return parts
        if len(parts) != 4:
            raise BadInput("table", self.table, _TABLE)
        before, first, last, after = parts
        padded = any(number[0] == "0" and len(number) > 1 for number in (first, last))
        if not 0 <= int(last) - int(first) < _MOST_TABLES or (padded and len(first) != len(last)):
            raise BadInput("table", self.table, _TABLE)
        return [f"{before}{number:0{len(first)}}{after}" for number in range(int(first), int(last) + 1)]

    def each(self) -> Sequence[TableSource]:
        return [replace(self, table=table) for table in self.tables]

    @property
    def look_every_ms(self) -> Millis:
        return duration(self.look_every, field="look_every")

    @property
    def after_ms(self) -> Millis:
        return duration(self.after, field="after")

    @property
    def loaded(self) -> Sequence[str]:
        """The columns that are read of a row: its id first, each once."""
        return tuple(dict.fromkeys((*self.ids, *self.columns)))

    @property
    def ids(self) -> Sequence[str]:
        return (self.id,) if isinstance(self.id, str) else tuple(self.id)

    @property
    def named(self) -> Mapping[str, str]:
        """Every named column, with the field that names it."""
        fields = {**dict.fromkeys(self.ids, "id"), self.due: "due"}
        fields |= {column: "changes" for column in self.changes if column not in fields}
        fields |= {column: "dead" for column in self.dead or () if column not in fields}
        return fields | {column: "columns" for column in self.columns if column not in fields}


def zone_of(zone: tzinfo | str) -> tzinfo:
    """Raises BadInput for the name of a zone that the time zone database does not know."""
    return zone if isinstance(zone, tzinfo) else zone_info(zone)


def check_expression(field: str, text: object, *, now: bool = False) -> None:
    """Raise BadInput for a `text` that is not valid inside brackets in a statement. O(length).

    It guards against mistakes, not against its author: an open bracket would enclose bide's own conditions.
    """
    accepted = (
        'an expression in SQL on the columns, such as "status = 2": brackets and quotes that match, no comment, '
        "semicolon, backslash or parameter"
    )
    if not isinstance(text, str) or not text.strip():
        raise BadInput(field, text, accepted)
    depth = 0
    for place, part in enumerate(_around_quotes(text)):
        if place % 2:
            continue
        plain = _NOW.sub("", part) if now else part
        if _REFUSED.search(plain):
            raise BadInput(field, text, accepted)
        for letter in plain:
            depth += (letter == "(") - (letter == ")")
            if depth < 0:
                raise BadInput(field, text, accepted)
    if depth or "\0" in text or "\\" in text:
        raise BadInput(field, text, accepted)


def _around_quotes(text: str) -> list[str]:
    """`text` split into parts; those at odd indexes are quoted."""
    parts, ended = [], 0
    for found in _QUOTED.finditer(text):
        parts += [text[ended : found.start()], found[0]]
        ended = found.end()
    return [*parts, text[ended:]]


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _check_name(field: str, name: object) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise BadInput(field, name, "a name as the database has it: up to 63 characters, no quotes, dots or brackets")
