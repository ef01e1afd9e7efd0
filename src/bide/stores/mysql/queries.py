"""The queries of `queries.sql` by name, rendered with values; and conversion between a Record and its row.

The driver sends text, so values are rendered here: numbers unchanged, text and bytes quoted. On our own connections all
quoted text is bytes (`SET NAMES binary`), so only quotes and backslashes in a payload are escaped. On a caller's
connection values are hexadecimal, which means the same in every character set and SQL mode.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from bide.core.names import storable
from bide.core.records import Record, State, Topic
from bide.stores.named_queries import queries_beside
from bide.stores.sql.operations import CODES, ENDED, STATES

DUE = (
    "`row`, `key`, id, group_name, due_at, at, attempt, failures, losses, token, payload, options, deadline, error, "
    "created_at"
)
"""The columns to read of a waiting task of a known topic; more would cost time on both sides."""
COLUMNS = f"{DUE}, topic, state, planned_at, holder, wake_at, keep_until"
"""The columns of any task. See `record_of`."""

TABLES = ("task", "lease", "grouped", "kept", "caller", "worker", "event", "migration")
_TEMPLATES = dict(queries_beside(__file__, "queries.sql"))
_TEMPLATES["replace_tasks"] = _TEMPLATES["put_tasks"] + _TEMPLATES["replace_tasks"]
_GIVEN = re.compile(r"VALUES\((\w+)\)")
_OR_UPDATE = re.compile(r"\s+ON DUPLICATE KEY")
_RETURNING = " RETURNING token"
_PART = re.compile(r"\{(\w+)\}")

THERE = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', SYSDATE(6))"
"""The server's clock at the moment of evaluation, on our own connections, whose time zone is UTC."""
THERE_ANYWHERE = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"
"""The server's clock at the start of the statement, in any time zone of the connection."""

_PLACE = re.compile(r"(?<![:\w]):([a-z_]+)")


class Code(bytes):
    """A part of a statement that is SQL, not a value."""

    __slots__ = ()


def quoted(data: bytes) -> bytes:
    """A value for a connection whose character set is `binary` and whose SQL mode allows backslash escapes."""
    if b"'" in data or b"\\" in data:
        data = data.replace(b"\\", b"\\\\").replace(b"'", b"''")
    return b"'" + data + b"'"


def in_hexadecimal(data: bytes) -> bytes:
    """A value for any connection."""
    return b"x'" + data.hex().encode() + b"'"


Quote = Callable[[bytes], bytes]


def literal(value: Any, quote: Quote = quoted) -> bytes:
    """A number, text, bytes, None, or Code."""
    kind = type(value)  # exact types first, which is faster: a batch has thousands of values
    if kind is str:
        return quote(value.encode("utf-8", "surrogateescape"))
    if kind is int:
        return b"%d" % value
    if value is None:
        return b"NULL"
    if kind is bytes:
        return quote(value)
    if kind is Code:
        return bytes(value)
    if isinstance(value, str):
        return quote(value.encode("utf-8", "surrogateescape"))
    assert isinstance(value, int), kind
    return b"%d" % value


def listed(values: Iterable[Any], quote: Quote = quoted) -> Code:
    """The values in the form for the parentheses of IN."""
    return Code(b", ".join([literal(value, quote) for value in values]))


def tuples(values: Iterable[Sequence[Any]], quote: Quote = quoted) -> Code:
    """The rows in the form that follows VALUES, or as tuples for the parentheses of IN."""
    return Code(b", ".join([b"(" + b", ".join([literal(one, quote) for one in row]) + b")" for row in values]))


_RUN = 4
"""A run of more consecutive numbers than this is written as a range."""
_LEASE = 32
"""The number of rows with one token from which the token is written once for all of them."""


def these(numbers: Sequence[int]) -> Code:
    """An SQL condition: `row` is one of these numbers, which must be ascending.

    Tasks that were scheduled together are due together and lie together. The server makes one seek for a range, but
    plans and makes one seek for each number of a list. It reads a range up to and including the row after it, and locks
    that row too. So the last number of a run goes into the list: the row after the range is then again one of these, if
    all of them exist.
    """
    ranges: list[bytes] = []
    alone: list[int] = []
    count, first = len(numbers), 0
    while first < count:
        low, last = numbers[first], first
        while last + 1 < count and numbers[last + 1] == low + last + 1 - first:
            last += 1
        if last - first >= _RUN:
            ranges.append(b"`row` BETWEEN %d AND %d" % (low, numbers[last] - 1))
            first = last
        alone += numbers[first : last + 1]
        first = last + 1
    ranges.append(b"`row` IN (%s)" % listed(alone))
    return Code(b"(%s)" % b" OR ".join(ranges))


def held(rows: Iterable[tuple[int, int]]) -> Code:
    """An SQL condition: (`row`, token) is one of these pairs, whose rows must be ascending.

    All tasks of one lease have the same token. The pairs of small leases form one list, so that no row is compared with
    one lease after the other.
    """
    leases: dict[int, list[int]] = {}
    for row, token in rows:
        leases.setdefault(token, []).append(row)
    parts = [b"(%s AND token = %d)" % (these(lease), token) for token, lease in leases.items() if len(lease) >= _LEASE]
    rest = sorted((row, token) for token, lease in leases.items() if len(lease) < _LEASE for row in lease)
    if rest:
        pairs = b", ".join([b"(%d, %d)" % pair for pair in rest])
        parts.append(b"(%s AND (`row`, token) IN (%s))" % (these([row for row, _ in rest]), pairs))
    return Code(b"(%s)" % b" OR ".join(parts))


def table_of_pairs(values: Iterable[tuple[int, int]]) -> Code:
    """A query that returns these pairs as the columns `first` and `second`."""
    pair, *more = values
    return Code(
        b" UNION ALL ".join([b"SELECT %d AS first, %d AS second" % pair, *[b"SELECT %d, %d" % one for one in more]])
    )


class Template:
    """A statement with places for values, each written `:name`."""

    __slots__ = ("_names", "_pieces", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        pieces = _PLACE.split(text)
        self._pieces = [piece.encode() for piece in pieces[::2]]
        self._names = pieces[1::2]

    def write(self, quote: Quote = quoted, /, **values: Any) -> bytes:
        """The statement with these values in their places."""
        parts = [self._pieces[0]]
        for name, piece in zip(self._names, self._pieces[1:], strict=True):
            parts.append(literal(values[name], quote))
            parts.append(piece)
        return b"".join(parts)


class Names:
    """The names of the database objects in one database, with one prefix."""

    def __init__(self, schema: str, prefix: str) -> None:
        self.lock = f"bide_migrates_{zlib.crc32(f'{schema}.{prefix}'.encode()):08x}"
        """The advisory lock for migrations."""
        self.parts = {
            "record": COLUMNS, "due": DUE, "there": THERE,
            **{table: f"`{schema}`.`{prefix}{table}`" for table in TABLES},
        }  # fmt: skip

    def write(self, template: str) -> str:
        """`template` with each {name} replaced."""
        return _PART.sub(lambda found: self.parts[found[1]], template)


@lru_cache(maxsize=256)
def queries_of(schema: str, prefix: str, *, mariadb: bool = True) -> Mapping[str, Template]:
    """Every statement, for tables with these names, in the dialect of the server."""
    names = Names(schema, prefix)
    return MappingProxyType(
        {name: Template(names.write(text if mariadb else _for_mysql(text))) for name, text in _TEMPLATES.items()}
    )


def returns_tokens(insert: Template) -> bool:
    """Tell whether this INSERT also returns the tokens."""
    return insert.text.endswith(_RETURNING)


def _for_mysql(text: str) -> str:
    """Replace what MariaDB writes differently, as VALUES(column), the inserted value, about which MySQL warns."""
    text = text.removesuffix(_RETURNING).replace("Innodb_lsn_current", "Innodb_redo_log_current_lsn")
    if _GIVEN.search(text) is None:
        return text
    return _OR_UPDATE.sub(" AS given ON DUPLICATE KEY", _GIVEN.sub(r"given.\1", text))


# --- a Record and its row

ROW, AT, TOKEN, STATE, WAKE = 0, 5, 9, 16, 19
"""Positions in a row. A waiting task wakes at `at`; a leased one woke then, and its lease expires at `wake_at`."""
_WIDTH = 48
"""The minimum length of a holder in its row, in bytes."""
_FILLER = b"\0"


def record_of(row: Sequence[Any]) -> Record:
    """The record in `row`. Names that are not UTF-8, written by another program, are decoded so as to stay distinct."""
    (_, key, identity, group, due_at, at, attempt, failures, losses, token, payload, options, deadline, error,
     created_at, topic, state, planned_at, holder, wake_at, keep_until) = row  # fmt: skip
    return Record(
        topic.decode("utf-8", "surrogateescape"), key.decode("utf-8", "surrogateescape"),
        identity.decode("utf-8", "replace"), None if group is None else group.decode("utf-8", "replace"),
        STATES[state], due_at, wake_at if state else at, planned_at, attempt, failures,
        losses, token, holder.rstrip(_FILLER).decode("utf-8", "replace") or None, payload, options, deadline,
        None if error is None else error.decode("utf-8", "replace"), created_at, at if state >= ENDED else None,
        keep_until,
    )  # fmt: skip


def rest_of_waiting(topic: Topic) -> tuple[Any, ...]:
    """The columns of a waiting task that are not read: the known topic, and others without meaning while it waits."""
    return topic.encode("utf-8", "surrogateescape"), CODES[State.WAITING], 0, b"", 0, None


def settled_values(row: int, record: Record) -> tuple[Any, ...]:
    """The values of a row for the query `put_tasks`, in its order, without those that a transition keeps.

    The task is waiting or has ended: leases are not written task by task.
    """
    at, wake_at, ended = record.wake_at, 0, 0
    if record.finished_at is not None:
        at, wake_at, ended = record.finished_at, record.wake_at, CODES[record.state]
    return (
        row, record.topic, record.key, record.id, CODES[record.state], ended, record.due_at, at, record.planned_at,
        record.attempt, record.failures, record.losses, record.token, filled(record.holder), record.deadline,
        record.error and storable(record.error), record.created_at, wake_at, record.keep_until,
    )  # fmt: skip


def filled(holder: str | None) -> bytes:
    """A holder padded to the usual width, so that a lease does not change the length of the row."""
    return (holder or "").encode("utf-8", "surrogateescape").ljust(_WIDTH, _FILLER)
