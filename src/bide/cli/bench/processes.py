"""What processes and threads of this machine have used, as the system shows it to everybody who may look (Linux).

A process is named by its folder, `/proc/7`, and a thread of it by `/proc/7/task/9`. Where there is nothing to be seen
(it is of another machine, or the system is another) that is an OSError.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")
_TRIES = 200
_REFRESH = 1.0
"""Seconds after which it is asked again who they are."""
_AT_FIRST = 40
"""So often it is asked each time: a store connects when it is first used for something."""


class Stat(NamedTuple):
    """Of `stat`, what is used here. Times in seconds."""

    name: str
    state: str
    parent: int
    used: float
    """Processor time of all its threads, in steps of some milliseconds."""
    waited: float
    """Processor time of children that have ended and were waited for."""
    began: float
    """Since the system was started."""


def stat(place: Path) -> Stat:
    """Raises OSError where there is no such process (any more)."""
    text = (place / "stat").read_text(encoding="utf-8", errors="replace")
    name, _, rest = text.partition("(")[2].rpartition(")")
    fields = rest.split()  # from the third on
    tick = os.sysconf("SC_CLK_TCK")
    used = (int(fields[11]) + int(fields[12])) / tick
    return Stat(
        name, fields[0], int(fields[1]), used, (int(fields[13]) + int(fields[14])) / tick, int(fields[19]) / tick
    )


def spent(place: Path) -> float:
    """Seconds on a processor, to the nanosecond; of a process that of its first thread. Raises OSError."""
    return int((place / "schedstat").read_text(encoding="ascii").split()[0]) / 1e9


def started_at(place: Path) -> float:
    """When, in seconds since the epoch; good to some hundredths. Raises OSError."""
    up = float((_PROC / "uptime").read_text(encoding="ascii").split()[0])
    return time.time() - up + stat(place).began


def family(parent: Path) -> list[Path]:
    """The process and its children."""
    found = [parent]
    for place in _PROC.glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            if stat(place).parent == int(parent.name):
                found.append(place)
    return found


def spent_by_family(parent: Path) -> float:
    """Seconds that the process and its children took, those that have ended too. Raises OSError."""
    total = stat(parent).waited
    for place in family(parent):
        with suppress(OSError):  # it ended a moment ago
            total += spent(place)
    return total


class ProcessorWatch:
    """Processor time of those who serve a store, in microseconds.

    What they wait for (a disk, a lock, the client) is not in it.
    """

    step = 1.0

    def __init__(self, who: Callable[[], Collection[Path]]) -> None:
        self._who = who
        self._places: Collection[Path] = ()
        self._asked = -_REFRESH
        self._times = 0

    def start(self) -> None:
        self._times += 1
        if self._times <= _AT_FIRST or time.monotonic() - self._asked > _REFRESH:
            self._places = self._who()
            self._asked = time.monotonic()
        self._before = {place: so_far for place in self._places if (so_far := _at_rest(place)) is not None}

    def stop(self) -> float:
        after = {place: so_far for place in self._before if (so_far := _at_rest(place)) is not None}
        return sum(so_far - self._before[place] for place, so_far in after.items()) * 1e6


def _at_rest(place: Path) -> float | None:
    """What it has spent, once it sleeps: while it works, that is only counted now and then. None: it has ended."""
    try:
        for _ in range(_TRIES):
            if stat(place).state not in "RD":
                break
        return spent(place)
    except OSError:
        return None
