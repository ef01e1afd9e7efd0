"""The queries of `queries.sql` by name, written out with values; and between a Record and its row, both ways.

The driver sends text, so values are written out here: numbers as they are, text and bytes quoted. On our own
connections everything between quotes is bytes (`SET NAMES binary`), so a payload passes as it is but for quotes and
backslashes; on a caller's connection, of whatever character set and SQL mode, it is hexadecimal, the same in all.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bide.core.names import storable
from bide.core.records import Record, State, Topic
from bide.stores.named_queries import read_queries
from bide.stores.sql.rows import CODES, ENDED, STATES

DUE = (
    "`row`, `key`, id, group_name, due_at, at, attempt, failures, losses, token, payload, options, deadline, error, "
    "created_at"
)
"""The columns of a task that waits, if its topic is known: each costs both sides."""
COLUMNS = f"{DUE}, topic, state, planned_at, holder, wake_at, keep_until"
"""The columns of any task. See `record_of`."""

TABLES = ("task", "lease", "grouped", "kept", "caller", "worker", "event", "migration")
_HERE = Path(__file__).parent
_TEMPLATES = read_queries((_HERE / "queries.sql").read_text("utf-8"))
_GIVEN = re.compile(r"VALUES\((\w+)\)")
_OR_UPDATE = re.compile(r"\s+ON DUPLICATE KEY")
_RETURNING = " RETURNING token"
_PART = re.compile(r"\{(\w+)\}")

THERE = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', SYSDATE(6))"
"""The server's clock at the very moment, on our own connections, whose time zone is UTC."""
THERE_ANYWHERE = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"
"""The server's clock when the statement began, whatever the time zone of the connection."""


_PLACE = re.compile(r"(?<![:\w]):([a-z_]+)")


class Code(bytes):
    """A part of a statement that is no value."""

    __slots__ = ()


def quoted(data: bytes) -> bytes:
    """A value for a connection whose character set is `binary` and whose SQL mode knows backslashes."""
    return b"'" + escaped(data) + b"'"


def escaped(data: bytes) -> bytes:
    """The bytes as they stand between quotes."""
    return data.replace(b"\\", b"\\\\").replace(b"'", b"''") if b"'" in data or b"\\" in data else data


def in_hexadecimal(data: bytes) -> bytes:
    """A value for any connection."""
    return b"x'" + data.hex().encode() + b"'"


Quote = Callable[[bytes], bytes]


def literal(value: Any, quote: Quote = quoted) -> bytes:
    """A number, text, bytes, None, or Code."""
    kind = type(value)  # compared first: a batch has thousands of values
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
    """The values as they stand between the parentheses of IN."""
    return Code(b", ".join([literal(value, quote) for value in values]))


def tuples(values: Iterable[Sequence[Any]], quote: Quote = quoted) -> Code:
    """The rows as they follow VALUES, or tuples as they stand between the parentheses of IN."""
    return Code(b", ".join([b"(" + b", ".join([literal(one, quote) for one in row]) + b")" for row in values]))


_RUN = 4
"""With more consecutive numbers than these they are written as a range."""
_LEASE = 32
"""Rows of one token from which on it is written once for all of them."""


def these(numbers: Sequence[int]) -> Code:
    """The condition that `row` is one of these, which rise.

    What was scheduled together is due together and lies together. The server seeks a range once, and of a list each
    number, for which it also plans. A range is read up to the row behind it, which is locked for that: so its last
    number is in the list, and the row behind it is again one of these, as long as all of them are there.
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
    """The condition that (`row`, token) is one of these, whose rows rise.

    What one lease gave out has one token. Those of small leases are sought among all pairs, so that no row is
    compared with one lease after the other.
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
    """A query that gives these, one by one, as `first` and `second`."""
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
    """The names of things in one database, with one prefix."""

    def __init__(self, schema: str, prefix: str) -> None:
        self.schema = schema
        self.prefix = prefix
        self.lock = f"bide_migrates_{zlib.crc32(f'{schema}.{prefix}'.encode()):08x}"
        """The advisory lock of the client that migrates."""
        self.parts = {
            "record": COLUMNS, "due": DUE, "there": THERE,
            **{table: f"`{schema}`.`{prefix}{table}`" for table in TABLES},
        }  # fmt: skip

    def write(self, template: str) -> str:
        """`template` with {name} replaced."""
        return _PART.sub(lambda found: self.parts[found[1]], template)


@lru_cache(maxsize=256)
def queries_of(schema: str, prefix: str, *, mariadb: bool = True) -> Mapping[str, Template]:
    """Every statement for tables of that name, as the server understands it."""
    names = Names(schema, prefix)
    return MappingProxyType(
        {name: Template(names.write(text if mariadb else _for_mysql(text))) for name, text in _TEMPLATES.items()}
    )


def returns_tokens(insert: Template) -> bool:
    """Tell whether that inserts and answers with the tokens at once."""
    return insert.text.endswith(_RETURNING)


def _for_mysql(text: str) -> str:
    """MySQL warns of VALUES(column), which is the one way that MariaDB has to name what would be inserted."""
    text = text.removesuffix(_RETURNING)
    if _GIVEN.search(text) is None:
        return text
    return _OR_UPDATE.sub(" AS given ON DUPLICATE KEY", _GIVEN.sub(r"given.\1", text))


# --- a Record and its row

ROW, AT, TOKEN, STATE, WAKE = 0, 5, 9, 16, 19
"""Places in a row: what waits wakes `at`, and what is leased woke then and is lost at its `wake_at`."""
_WIDTH = 48
"""Bytes of a holder in its row, if it has no more."""
_FILLER = b"\0"


def record_of(row: Sequence[Any]) -> Record:
    """The record in `row`. What is no UTF-8, by another program's doing, is shown so that it still names the task."""
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
    """The columns that are not read of a task that waits: its topic is known, and the others mean nothing."""
    return topic.encode("utf-8", "surrogateescape"), CODES[State.WAITING], 0, b"", 0, None


def settled_values(row: int, record: Record) -> tuple[Any, ...]:
    """The values of a row for the query `put_tasks`, in its order, but for what a transition leaves as it is.

    Of what waits or has ended: leases are not written task by task.
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
    """A holder as wide as most are, so that its row stays as long as it is."""
    return (holder or "").encode("utf-8", "surrogateescape").ljust(_WIDTH, _FILLER)
