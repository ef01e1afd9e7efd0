"""Statements as bytes: templates, and values written into them.

The driver sends text, so values are written out here: numbers as they are, text and bytes quoted. On our own
connections everything between quotes is bytes (`SET NAMES binary`), so a payload passes as it is but for quotes and
backslashes; on a connection of somebody else's, of whatever character set and SQL mode, it is hexadecimal, which is the
same in all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

_PLACE = re.compile(r"(?<![:\w]):([a-z_]+)")


class Code(bytes):
    """A part of a statement that is no value."""

    __slots__ = ()


def quoted(data: bytes) -> bytes:
    """For a connection whose character set is `binary` and whose SQL mode knows backslashes."""
    return b"'" + escaped(data) + b"'"


def escaped(data: bytes) -> bytes:
    """What stands between the quotes there."""
    return data.replace(b"\\", b"\\\\").replace(b"'", b"''") if b"'" in data or b"\\" in data else data


def in_hexadecimal(data: bytes) -> bytes:
    """For every connection."""
    return b"x'" + data.hex().encode() + b"'"


Quote = Callable[[bytes], bytes]


def literal(value: Any, quote: Quote = quoted) -> bytes:
    """A number, text, bytes, None, or Code."""
    kind = type(value)
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
    """What stands between the parentheses of IN."""
    return Code(b", ".join([literal(value, quote) for value in values]))


def rows(values: Iterable[Sequence[Any]], quote: Quote = quoted) -> Code:
    """What follows VALUES, or tuples between the parentheses of IN."""
    return Code(b", ".join([b"(" + b", ".join([literal(one, quote) for one in row]) + b")" for row in values]))


_RUN = 4
"""With more consecutive numbers than these they are written as a range."""
_LEASE = 32
"""Rows of one token from which on it is written once for all of them."""


def these(numbers: Sequence[int]) -> Code:
    """The condition that `row` is one of these, which rise.

    What was scheduled together is due together and lies together. The server looks up a range once, and of a list each
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

    What one lease gave out has one token. Those of small leases are looked up among all pairs, so that no row is
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
