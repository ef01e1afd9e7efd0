"""Leases that were given together. A row of `lease` is a batch; its expiry is the time before which none is lost.

A lease changes no index entry, so leased and lost tasks stay among the waiting ones in the index. Expired leases are
found through their batch. It is written together with the leases, and deleted with the settlement of its last task. If
it still exists at its expiry, the next thorough scan reads it: lost tasks are leased again, and those still held
(because the lease was extended, or the task is locked) are written as a new batch. So an extension writes no batch,
just as a postponed timer need not be moved if it checks at its expiry whether it was postponed.

A batch names each task by its row and the token of its lease. Once the task has another token, or is no longer leased,
that lease is over for good, and nothing else that happens to the task needs the batch.

A lease that moves index entries instead is slower by 30 to 50 % with several workers.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import msgspec

from bide.core.instants import Millis
from bide.core.payloads import slices
from bide.core.records import Record, Settlement, Token, Topic
from bide.stores.mysql.connection import Call, Rows
from bide.stores.mysql.queries import Code, Quote, held, literal, tuples

_LARGEST = 1_000
"""The maximum of tasks in one batch, which is read in one packet."""
AT_ONCE = 32
"""The maximum of batches that one scan reads."""

_log = logging.getLogger("bide.mysql")
Pair = tuple[int, Token]
"""The number of a row, and the token of its lease."""
_encode = msgspec.msgpack.encode
decode_pairs = msgspec.msgpack.Decoder(list[Pair]).decode
_NO_ROW: Pair = (0, 0)
"""No task has this row."""


class BatchKey(NamedTuple):
    """The primary key of a batch. Row and token are those of its first task; `caller` names the call that wrote it."""

    topic: Topic
    until: Millis
    row: int
    token: Token
    caller: str


class LeaseBatch(msgspec.Struct, eq=False):
    """A batch that this process has written, and the number of its tasks that this process has not settled yet."""

    name: BatchKey
    left: int


class StillLeased(NamedTuple):
    """A task of a batch that still has the same lease: a row of the query `still_leased`."""

    wake: Millis
    row: int
    token: Token
    at: Millis


class Expired(NamedTuple):
    """The expired batches of one topic."""

    names: list[BatchKey]
    pairs: list[Pair]


def read_expired(topic: Topic, found: Rows) -> Expired:
    """Read the rows of the query `expired_leases`."""
    names = [
        BatchKey(topic, until, row, token, caller.decode("utf-8", "surrogateescape"))
        for until, row, token, caller, _ in found
    ]
    return Expired(names, read_pairs(tasks for *_, tasks in found))


def read_pairs(batches: Iterable[bytes]) -> list[Pair]:
    """The pairs of all batches, by row. Skips a batch that cannot be read, which another program has written."""
    pairs: set[Pair] = set()
    for tasks in batches:
        try:
            pairs.update(decode_pairs(tasks))
        except msgspec.DecodeError as error:
            _log.error("a row of the leases cannot be read (%s): its tasks stay leased if their holder is lost", error)
    return sorted(pairs)


def write_batches(
    call: Call, topics: Mapping[Topic, Sequence[Pair]], until: Millis
) -> tuple[list[bytes], dict[int, LeaseBatch]]:
    """The statements that record the leases of each topic in batches, and the batch of each row."""
    lines, batch_of = [], {}
    for topic, pairs in topics.items():
        for part in slices(pairs, _LARGEST):
            batch = LeaseBatch(BatchKey(topic, until, *part[0], _caller(call)), len(part))
            lines.append((*batch.name, _encode(part)))
            batch_of.update(dict.fromkeys([row for row, _ in part], batch))
    return _written(call, lines), batch_of


def rewrite_batches(call: Call, expired: Expired, left: Sequence[StillLeased], there: Millis) -> list[bytes]:
    """The statements that replace the expired batches by new ones of the remaining leases, up to the first expiry."""
    left = sorted(left)
    if left and len(left) == len(expired.pairs) and left[0].wake <= there:
        return []
    topic, lines = expired.names[0].topic, []
    for part in slices(left, _LARGEST):
        name = BatchKey(topic, part[0].wake, part[0].row, part[0].token, _caller(call))
        lines.append((*name, _encode([(one.row, one.token) for one in part])))
    return [*delete_batches(call, expired.names), *_written(call, lines)]


def _caller(call: Call) -> str:
    """A name for the batches of this call: a task may be the first of two batches, whose keys have to differ."""
    return f"{call.caller}:{call.number}"


def _written(call: Call, lines: Sequence[tuple[Any, ...]]) -> list[bytes]:
    return [call.write("insert_batches", rows=tuples(lines, call.quote))] if lines else []


def delete_batches(call: Call, names: Sequence[BatchKey]) -> list[bytes]:
    """The statements that delete these batches."""
    return [call.write("delete_batches", leases=these_batches(names, call.quote))] if names else []


def these_batches(names: Iterable[BatchKey], quote: Quote) -> Code:
    """An SQL condition: the batch is one of these."""
    line = b"(topic = %b AND until = %d AND `row` = %d AND token = %d AND caller = %b)"
    return Code(
        b"(%b)"
        % b" OR ".join(
            [line % (literal(topic, quote), until, row, token, literal(caller, quote))
             for topic, until, row, token, caller in sorted(names)]
        )
    )  # fmt: skip


async def read_remains(
    call: Call, expired: Mapping[Topic, Expired], most: Mapping[Topic, int]
) -> dict[Topic, tuple[list[StillLeased], Rows]]:
    """Read which tasks of these batches are still leased, and which of those are lost.

    Locks lost tasks, up to `most` of each topic.
    """
    statements = []
    for topic, batches in expired.items():
        holds = held(batches.pairs or [_NO_ROW])
        statements += [call.write("still_leased", held=holds), call.write("take_lost", held=holds, most=most[topic])]
    answers = await call.send(*statements)
    return {
        topic: ([StillLeased(*one) for one in still], lost)
        for topic, still, lost in zip(expired, answers[::2], answers[1::2], strict=True)
    }


async def under_way(call: Call, topic: Topic) -> list[StillLeased]:
    """Read all leased tasks of a topic, by the expiry of the lease. The cost is proportional to their number."""
    [batches] = await call.send(call.write("leases", topic=topic))
    pairs = read_pairs(tasks for (tasks,) in batches)
    found: list[StillLeased] = []
    for part in slices(pairs, _LARGEST):
        [still] = await call.send(call.write("still_leased", held=held(part)))
        found += [StillLeased(*one) for one in still]
    return sorted(found)


# --- leases of this process

_MOST = 10_000
"""The number of newest leases that are always remembered; to settle an older one, its row is read first."""

Row = tuple[int, Token, bool, LeaseBatch]
"""The number of a row, the token of its lease, whether the task has a group, and the batch of the lease."""
_number, _batch = itemgetter(0), itemgetter(3)


class Settling(NamedTuple):
    """The remembered leases among the settlements of one call. They are forgotten once this is made."""

    rows: list[Row]
    """The rows of the tasks that this process leased with the token of their settlement, sorted."""
    complete: bool
    """True if all settlements of the call are among them."""
    batches: Mapping[LeaseBatch, int]
    """The number of these leases in each batch."""
    emptied: list[BatchKey]
    """The batches that have no leases left after this."""

    def settled(self) -> None:
        """Note that these leases are over: settled, or no longer held. Without this call, their batches stay."""
        for batch, count in self.batches.items():
            batch.left -= count


class LeasedRows:
    """The tasks that this process has leased, by name.

    There are two generations, so that tasks that are never settled here are forgotten without a search for the oldest.
    """

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
        """The remembered leases among these settlements, which are then forgotten."""
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
        """Note that these settlements were committed, without the deletion of their batches."""
        for one in known:
            one.settled()
            self._over += [batch.name for batch in one.batches if batch.left == 0]

    def over(self, since: Millis) -> list[BatchKey]:
        """The batches without remaining leases that expire after `since`, so that no scan has read them; forget all."""
        over, self._over = self._over, []
        return [name for name in over if name.until > since]
