"""Leases that were given together: a row of `lease` is a batch, and says until when none of its tasks is lost.

A lease touches no index, so that what is leased, or lost, is not told apart from what waits by where it lies. It is
found by its batch. One is written with the lease itself, and deleted by the settlement of its last task. If it is still
there when its time has come, the worker that leases reads it: what is lost is leased anew, and what is still held
(because its lease was extended, or it is locked) is written as another batch. So an extension writes no
batch, as a timer need not be moved that checks, when it expires, whether it was put off.

A batch names each task by its row and the token of its lease. Once the task has another token, or is not leased, that
lease is over for good; whatever else becomes of it needs no batch to be read.

A lease that moves entries in an index instead is slower by 30 to 50 % with several workers.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import msgspec

from bide.core.instants import Millis
from bide.core.records import Record, Settlement, Token, Topic
from bide.stores.batches import slices
from bide.stores.mysql.connection import Call, Rows
from bide.stores.mysql.queries import Code, Quote, held, literal, tuples

_LARGEST = 1_000
"""Tasks in one batch: reading it is one packet."""
AT_ONCE = 32
"""Batches that one scan takes."""

_log = logging.getLogger("bide.mysql")
Pair = tuple[int, Token]
"""The number of a row, and the token of its lease."""
_encode = msgspec.msgpack.encode
decode_pairs = msgspec.msgpack.Decoder(list[Pair]).decode
_NO_ROW: Pair = (0, 0)
"""No task has this row."""


class BatchKey(NamedTuple):
    """The primary key of a batch. Row and token are those of its first task; `caller` is who wrote it, and when."""

    topic: Topic
    until: Millis
    row: int
    token: Token
    caller: str


class LeaseBatch:
    """One that this process has written: how many of its tasks it has not settled yet."""

    __slots__ = ("left", "name")

    def __init__(self, name: BatchKey, left: int) -> None:
        self.name = name
        self.left = left


class StillLeased(NamedTuple):
    """A task of a batch that is still leased by that lease: a row of the query `still_leased`."""

    wake: Millis
    row: int
    token: Token
    at: Millis


class Expired(NamedTuple):
    """Batches of one topic whose time has come."""

    names: list[BatchKey]
    pairs: list[Pair]


def read_expired(topic: Topic, found: Rows) -> Expired:
    """The rows of the query `expired_leases`."""
    names = [
        BatchKey(topic, until, row, token, caller.decode("utf-8", "surrogateescape"))
        for until, row, token, caller, _ in found
    ]
    return Expired(names, read_pairs(tasks for *_, tasks in found))


def read_pairs(batches: Iterable[bytes]) -> list[Pair]:
    """The pairs of all batches, by row. A batch that cannot be read, by another program's doing, holds up no other."""
    pairs: set[Pair] = set()
    for tasks in batches:
        try:
            pairs.update(decode_pairs(tasks))
        except msgspec.DecodeError as error:
            _log.error("a row of the leases cannot be read (%s): what is lost of its tasks stays leased", error)
    return sorted(pairs)


def write_batches(
    call: Call, topics: Mapping[Topic, Sequence[Pair]], until: Millis
) -> tuple[list[bytes], dict[int, LeaseBatch]]:
    """The statements that write down what was leased of each topic, and the batch of each row."""
    lines, batch_of = [], {}
    for topic, pairs in topics.items():
        for part in slices(pairs, _LARGEST):
            batch = LeaseBatch(BatchKey(topic, until, *part[0], _caller(call)), len(part))
            lines.append((*batch.name, _encode(part)))
            batch_of.update(dict.fromkeys([row for row, _ in part], batch))
    return _written(call, lines), batch_of


def rewrite_batches(call: Call, expired: Expired, left: Sequence[StillLeased], there: Millis) -> list[bytes]:
    """The statements that replace those batches by what is left of them, each batch until its first is lost."""
    left = sorted(left)
    if left and len(left) == len(expired.pairs) and left[0].wake <= there:
        return []
    topic, lines = expired.names[0].topic, []
    for part in slices(left, _LARGEST):
        name = BatchKey(topic, part[0].wake, part[0].row, part[0].token, _caller(call))
        lines.append((*name, _encode([(one.row, one.token) for one in part])))
    return [*delete_batches(call, expired.names), *_written(call, lines)]


def _caller(call: Call) -> str:
    """A task may be in two batches, and be the first in both: so what each call writes has a name of its own."""
    return f"{call.caller}:{call.number}"


def _written(call: Call, lines: Sequence[tuple[Any, ...]]) -> list[bytes]:
    return [call.write("insert_batches", rows=tuples(lines, call.quote))] if lines else []


def delete_batches(call: Call, names: Sequence[BatchKey]) -> list[bytes]:
    """The statements that take these batches away."""
    return [call.write("delete_batches", leases=these_batches(names, call.quote))] if names else []


def these_batches(names: Iterable[BatchKey], quote: Quote) -> Code:
    """The condition that a batch is one of these."""
    line = b"(topic = %b AND until = %d AND `row` = %d AND token = %d AND caller = %b)"
    return Code(
        b"(%b)"
        % b" OR ".join(
            [line % (literal(topic, quote), until, row, token, literal(caller, quote))
             for topic, until, row, token, caller in sorted(names)]
        )
    )  # fmt: skip


class Remains(NamedTuple):
    """The tasks of batches, as they are now."""

    held: list[StillLeased]
    """All that are leased still, the lost ones too."""
    lost: Rows


async def read_remains(call: Call, expired: Mapping[Topic, Expired], most: Mapping[Topic, int]) -> dict[Topic, Remains]:
    """Read the tasks of these batches as they are now; lock those that are lost, up to so many of each topic."""
    statements = []
    for topic, batches in expired.items():
        holds = held(batches.pairs or [_NO_ROW])
        statements += [call.write("still_leased", held=holds), call.write("take_lost", held=holds, most=most[topic])]
    answers = await call.send(*statements)
    return {
        topic: Remains([StillLeased(*one) for one in still], lost)
        for topic, still, lost in zip(expired, answers[::2], answers[1::2], strict=True)
    }


async def under_way(call: Call, topic: Topic) -> list[StillLeased]:
    """Read all of a topic that is leased, by when the lease ends; as much work as is under way."""
    [batches] = await call.send(call.write("leases", topic=topic))
    pairs = read_pairs(tasks for (tasks,) in batches)
    found: list[StillLeased] = []
    for part in slices(pairs, _LARGEST):
        [still] = await call.send(call.write("still_leased", held=held(part)))
        found += [StillLeased(*one) for one in still]
    return sorted(found)


# --- leases of this process

_MOST = 10_000
"""Leases that are remembered for certain; what is settled later than that is read first."""

Row = tuple[int, Token, bool, LeaseBatch]
"""The number of a row, the token of its lease, whether the task has a group, and the batch of the lease."""
_number, _batch = itemgetter(0), itemgetter(3)


class Settling(NamedTuple):
    """The known tasks of a batch that is to be settled; settling forgets them."""

    rows: list[Row]
    """Of each that was leased here by the token it is to be settled with, sorted."""
    complete: bool
    """True if that is all of them."""
    batches: Mapping[LeaseBatch, int]
    """How many there are of each batch."""
    emptied: list[BatchKey]
    """The batches of which nothing is left then."""

    def settled(self) -> None:
        """The leases are over: each is settled, or was not held any more. If that is not known, the batches stay."""
        for batch, count in self.batches.items():
            batch.left -= count


class LeasedRows:
    """The tasks that this process has leased, by name.

    Two generations, so that what is never settled here is forgotten without a search for the oldest.
    """

    __slots__ = ("_new", "_old", "_over")

    def __init__(self) -> None:
        self._over: list[BatchKey] = []
        self._new: dict[tuple[Topic, str], Row] = {}
        self._old: dict[tuple[Topic, str], Row] = {}

    def leased(self, rows: Iterable[int], tasks: Iterable[Record], batches: Iterable[LeaseBatch]) -> None:
        if len(self._new) >= _MOST:
            self._old, self._new = self._new, {}
        new = self._new
        for row, task, batch in zip(rows, tasks, batches, strict=True):
            new[task.topic, task.key] = (row, task.token, task.group is not None, batch)

    def of(self, outcomes: Sequence[Settlement]) -> Settling:
        """The known tasks among these."""
        found: list[Row] = []
        new, old = self._new, self._old
        for one in outcomes:
            name = (one.topic, one.key)
            for rows in (new, old):
                row = rows.get(name)
                if row is not None and row[1] == one.token:
                    found.append(row)
                    del rows[name]
                    break
        found.sort(key=_number)
        batches = Counter(map(_batch, found))
        emptied = [batch.name for batch, count in batches.items() if count == batch.left]
        return Settling(found, len(found) == len(outcomes), batches, emptied)

    def settled(self, known: Iterable[Settling]) -> None:
        """These were committed, with their batches left as they are."""
        for one in known:
            one.settled()
            self._over += [batch.name for batch in one.batches if batch.left == 0]

    def over(self, since: Millis) -> list[BatchKey]:
        """Batches of which nothing is left, and which no scan has read before `since`. They are forgotten."""
        over, self._over = self._over, []
        return [name for name in over if name.until > since]
