"""What the processes of a cell write down, each line at once, so that it survives their end by any signal.

They write into a file that is mapped into their memory: what is there is the system's as soon as it is written, and
costs a process less than a microsecond, so that even the fastest strategy is hardly slowed by being watched.

    > 17 schedule k1 1763800000000 1763799998000000000      a call was begun: number, verb, key, due, at
    < 17 ok 1763799998001000000                             and answered: ok, late (too late) or failed
    ! k1 1763800000000 1763800000002000000 4711             an effect, over at once: key, due, at, process
    ~ k2 1763800000000 1763800000002000000 4711             one that takes time has begun
    . k2 1763800000000 1763800000012000000 4711             and is done

Times of `at` are nanoseconds, `due` milliseconds; `-` stands for no due time.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

_PIECE = 16 << 20
"""Bytes by which a file grows; they are zeros, and take no space until they are written."""
_LOOK = 1 << 16
"""Bytes that are read at once."""
_AT_ONCE: int = getattr(mmap, "MAP_POPULATE", 0)
"""Where the system can, the first pages are there before they are written, so that no effect waits for one."""


class Call(NamedTuple):
    """One verb of one key, as its caller saw it."""

    verb: str
    key: str
    due: int | None
    begun: int
    answered: int | None
    """None: it never was, or with an error."""
    done: bool
    """Whether the answer says that it was done."""


class Firing(NamedTuple):
    """One effect."""

    key: str
    due: int
    at: int
    process: int
    begun: bool = True
    done: bool = True
    """One that takes time is two firings: begun, and done unless its process died meanwhile."""


class Journal:
    """One process's file, whose end is full of zeros. Any thread may write."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb+")
        self._file.truncate(_PIECE)
        self._map = mmap.mmap(self._file.fileno(), _PIECE, flags=mmap.MAP_SHARED | _AT_ONCE)
        self._at = 0
        self._lock = threading.Lock()
        self._number = 0
        self._process = os.getpid()
        self._effects = {sign: f"{sign} %b %d %d {self._process}\n".encode() for sign in "!~."}
        self.fired = 0

    def begun(self, verb: str, keys: Iterable[tuple[str, int | None]]) -> list[int]:
        """A call for several keys is begun; the numbers to answer by."""
        at = time.time_ns()
        numbers = []
        lines = []
        for key, due in keys:
            self._number += 1
            numbers.append(self._number)
            lines.append(f"> {self._number} {verb} {key} {'-' if due is None else due} {at}\n")
        self._write("".join(lines).encode())
        return numbers

    def answered(self, numbers: Iterable[int], word: str) -> None:
        at = time.time_ns()
        self._write("".join(f"< {number} {word} {at}\n" for number in numbers).encode())

    def effect(self, key: str, due: int, sign: str = "!") -> None:
        self._write(self._effects[sign] % (key.encode(), due, time.time_ns()))
        self.fired += sign != "~"

    def _write(self, lines: bytes) -> None:
        with self._lock:
            end = self._at + len(lines)
            while end > len(self._map):
                self._file.truncate(len(self._map) + _PIECE)
                self._map.resize(len(self._map) + _PIECE)
            self._map[self._at : end] = lines
            self._at = end

    def close(self) -> None:
        self._map.close()
        self._file.truncate(self._at)
        self._file.close()


def whole_lines(path: Path, *, since: int = 0) -> bytes:
    """What a journal has from the byte `since` on, up to its last line that is whole."""
    found = []
    with path.open("rb") as file:
        file.seek(since)
        while piece := file.read(_LOOK):
            written, zero, _ = piece.partition(b"\0")
            found.append(written)
            if zero:
                break
    new = b"".join(found)
    return new[: new.rfind(b"\n") + 1]


def read(paths: Iterable[Path]) -> tuple[list[Call], list[Firing]]:
    """All calls by their beginning and all firings by their time. A line that was cut off is passed over."""
    calls: list[Call] = []
    firings: list[Firing] = []
    for path in paths:
        begun: dict[str, Call] = {}
        for kind, words in _lines(path):
            if kind in "!~.":
                times = int(words[1]), int(words[2]), int(words[3])
                firings.append(Firing(words[0], *times, begun=kind != ".", done=kind != "~"))
            elif kind == ">":
                due = None if words[3] == "-" else int(words[3])
                begun[words[0]] = Call(words[1], words[2], due, int(words[4]), None, False)
            elif words[1] != "failed":
                begun[words[0]] = begun[words[0]]._replace(answered=int(words[2]), done=words[1] == "ok")
        calls += begun.values()
    return sorted(calls, key=lambda call: call.begun), sorted(firings, key=lambda firing: firing.at)


def _lines(path: Path) -> Iterator[tuple[str, list[str]]]:
    for line in whole_lines(path).decode().splitlines():
        kind, *words = line.split()
        yield kind, words
