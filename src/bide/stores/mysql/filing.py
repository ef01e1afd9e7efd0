"""What was leased together, on file: a row of `lease` says which tasks, and until when none of them is lost.

A lease touches no index, so that what is leased, or lost, is not told apart from what waits by where it lies. It is
found by its file. One is written with the lease itself, and taken away by the settlement of its last task. If it is
still there when its time has come, whoever leases looks at it: what is lost is leased anew, and what is still held
(because its lease was extended, or somebody has it locked) is filed anew. So an extension writes no file, as a timer is
not moved that looks, when it expires, whether it was put off.

A file names each task by its row and the token of its lease. Once the task has another token, or is not leased, that
lease is over for good; whatever else becomes of it needs no file to be looked at.
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
from bide.stores.mysql.dialect import Rows
from bide.stores.mysql.journaled_connection import Call
from bide.stores.mysql.statements import Code, Quote, held, literal
from bide.stores.mysql.statements import rows as tuples

_LARGEST = 1_000
"""Tasks in one file: looking at it is one packet."""
AT_ONCE = 32
"""Files that one look takes."""

_log = logging.getLogger("bide.mysql")
Pair = tuple[int, Token]
"""The number of a row, and the token of its lease."""
_encode = msgspec.msgpack.encode
decode_pairs = msgspec.msgpack.Decoder(list[Pair]).decode
_NOBODY: Pair = (0, 0)
"""No task has this row."""


class FileName(NamedTuple):
    """The primary key of a file. Row and token are those of its first task; `caller` is who wrote it, and when."""

    topic: Topic
    until: Millis
    row: int
    token: Token
    caller: str


class File:
    """One that this process has written: how many of its tasks it has not settled yet."""

    __slots__ = ("left", "name")

    def __init__(self, name: FileName, left: int) -> None:
        self.name = name
        self.left = left


class StillLeased(NamedTuple):
    """A task of a file that is still leased by that lease: a row of the query `still_leased`."""

    wake: Millis
    row: int
    token: Token
    at: Millis


class Expired(NamedTuple):
    """Files of one topic whose time has come."""

    names: list[FileName]
    pairs: list[Pair]


def read_expired(topic: Topic, found: Rows) -> Expired:
    """The rows of the query `expired_leases`."""
    names = [
        FileName(topic, until, row, token, caller.decode("utf-8", "surrogateescape"))
        for until, row, token, caller, _ in found
    ]
    return Expired(names, read_pairs(tasks for *_, tasks in found))


def read_pairs(files: Iterable[bytes]) -> list[Pair]:
    """Those of all files together, by row. One that cannot be read, by another program's doing, holds nobody up."""
    pairs: set[Pair] = set()
    for tasks in files:
        try:
            pairs.update(decode_pairs(tasks))
        except msgspec.DecodeError as error:
            _log.error("a row of the leases cannot be read (%s): what is lost of its tasks stays leased", error)
    return sorted(pairs)


def file(
    call: Call, topics: Mapping[Topic, Sequence[Pair]], until: Millis
) -> tuple[list[bytes], list[tuple[File, Sequence[Pair]]]]:
    """The statements that file what was leased of each topic, and the files with their tasks."""
    files = [
        (File(FileName(topic, until, *part[0], _caller(call)), len(part)), part)
        for topic, pairs in topics.items()
        for part in slices(pairs, _LARGEST)
    ]
    return _written(call, [(*one.name, _encode(part)) for one, part in files]), files


def file_anew(call: Call, expired: Expired, left: Sequence[StillLeased], there: Millis) -> list[bytes]:
    """The statements that put in the place of those files what is left of them, each file until its first is lost."""
    left = sorted(left)
    if left and len(left) == len(expired.pairs) and left[0].wake <= there:
        return []
    topic, lines = expired.names[0].topic, []
    for part in slices(left, _LARGEST):
        name = FileName(topic, part[0].wake, part[0].row, part[0].token, _caller(call))
        lines.append((*name, _encode([(one.row, one.token) for one in part])))
    return [*close(call, expired.names), *_written(call, lines)]


def _caller(call: Call) -> str:
    """A task may be on file twice, and be the first in both: so what each call files has a name of its own."""
    return f"{call.caller}:{call.number}"


def _written(call: Call, lines: Sequence[tuple[Any, ...]]) -> list[bytes]:
    return [call.write("file_leases", rows=tuples(lines, call.quote))] if lines else []


def close(call: Call, names: Sequence[FileName]) -> list[bytes]:
    """The statements that take these files away."""
    return [call.write("close_leases", leases=these_files(names, call.quote))] if names else []


def these_files(names: Iterable[FileName], quote: Quote) -> Code:
    """The condition that a file is one of these."""
    line = b"(topic = %b AND until = %d AND `row` = %d AND token = %d AND caller = %b)"
    return Code(
        b"(%b)"
        % b" OR ".join(
            [line % (literal(topic, quote), until, row, token, literal(caller, quote))
             for topic, until, row, token, caller in sorted(names)]
        )
    )  # fmt: skip


class Remains(NamedTuple):
    """What became of the tasks of files."""

    held: list[StillLeased]
    """All that are leased still, the lost ones too."""
    lost: Rows


async def look_up(call: Call, expired: Mapping[Topic, Expired], most: Mapping[Topic, int]) -> dict[Topic, Remains]:
    """What became of the tasks of these files; of each topic up to so many that are lost, locked."""
    statements = []
    for topic, files in expired.items():
        holds = held(files.pairs or [_NOBODY])
        statements += [call.write("still_leased", held=holds), call.write("take_lost", held=holds, most=most[topic])]
    answers = await call.send(*statements)
    return {
        topic: Remains([StillLeased(*one) for one in still], lost)
        for topic, still, lost in zip(expired, answers[::2], answers[1::2], strict=True)
    }


async def under_way(call: Call, topic: Topic) -> list[StillLeased]:
    """All of a topic that is leased, by when the lease ends; as much work as is under way."""
    [files] = await call.send(call.write("leases", topic=topic))
    pairs = read_pairs(tasks for (tasks,) in files)
    found: list[StillLeased] = []
    for part in slices(pairs, _LARGEST):
        [still] = await call.send(call.write("still_leased", held=held(part)))
        found += [StillLeased(*one) for one in still]
    return sorted(found)


_MOST = 10_000
"""Leases that are remembered for certain; what is settled later than that is looked up."""

Row = tuple[int, Token, bool, File]
"""The number of a row, the token of its lease, whether the task has a group, and where the lease is on file."""
_number, _file = itemgetter(0), itemgetter(3)


class Settling(NamedTuple):
    """What is known of the tasks of a batch that is to be settled, which are forgotten by that."""

    rows: list[Row]
    """Of each that was leased here by the token it is to be settled with, sorted."""
    complete: bool
    """Whether that is all of them."""
    files: Mapping[File, int]
    """How many there are of each file."""
    emptied: list[FileName]
    """The files of which nothing is left then."""

    def settled(self) -> None:
        """The leases are over: each is settled, or was not held any more. If that is not known, the files stay."""
        for file, count in self.files.items():
            file.left -= count


class LeasedRows:
    """By name. Two generations, so that what is never settled here is forgotten without looking for the oldest."""

    __slots__ = ("_new", "_old", "_over")

    def __init__(self) -> None:
        self._over: list[FileName] = []
        self._new: dict[tuple[Topic, str], Row] = {}
        self._old: dict[tuple[Topic, str], Row] = {}

    def leased(self, rows: Iterable[int], tasks: Iterable[Record], files: Iterable[File]) -> None:
        if len(self._new) >= _MOST:
            self._old, self._new = self._new, {}
        new = self._new
        for row, task, file in zip(rows, tasks, files, strict=True):
            new[task.topic, task.key] = (row, task.token, task.group is not None, file)

    def of(self, outcomes: Sequence[Settlement]) -> Settling:
        """What is known of these."""
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
        files = Counter(map(_file, found))
        emptied = [file.name for file, count in files.items() if count == file.left]
        return Settling(found, len(found) == len(outcomes), files, emptied)

    def settled(self, known: Iterable[Settling]) -> None:
        """These were committed, with their files left as they are."""
        for one in known:
            one.settled()
            self._over += [file.name for file in one.files if file.left == 0]

    def over(self, since: Millis) -> list[FileName]:
        """Files of which nothing is left, and at which nobody has looked before `since`. They are forgotten."""
        over, self._over = self._over, []
        return [name for name in over if name.until > since]
