"""The server behind a store, as a benchmark sees it, and the processor time of any process of this machine (Linux).

A process is named by its folder, `/proc/7`, and a thread of it by `/proc/7/task/9`. What reads it raises OSError where
there is nothing to see: it has ended, runs on another machine, or the system has no `/proc`.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple, Protocol
from urllib.parse import parse_qsl, urlsplit

from bide.core.errors import BadInput

HOUR = 3_600_000
_PROC = Path("/proc")
_TRIES = 200
_REFRESH = 1.0
"""Seconds after which a watch asks again who serves the store, or how long a round trip takes."""
_AT_FIRST = 40
"""Operations before each of which it asks: a store connects when it first uses something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The work of a server from its start to one moment."""

    at: float
    """Seconds of a monotonic clock."""
    cpu: float | None
    """Seconds of processor time; None where nothing tells."""
    requests: int
    """Requests that it has served; each kind of server counts its own unit."""


class Raw(Protocol):
    """One connection of the plain driver, with a place of its own."""

    def store(self, keys: Sequence[str]) -> None:
        """Store a task for each key, due in an hour, as durably as bide does."""
        ...

    def close(self) -> None: ...


class Watch(Protocol):
    """A stopwatch for one operation, in microseconds."""

    @property
    def step(self) -> float:
        """Its resolution: a median within one step is where half of the values lie below, so steps may be coarse."""
        ...

    def start(self) -> None: ...

    def stop(self) -> float: ...


class Server(ABC):
    """One server, or several that are one to their clients, and the part of it that the benchmark works in."""

    kind: ClassVar[str]
    """ "redis", "postgres" or "mysql"."""
    remembers_heads: ClassVar[bool] = False
    """True if an open store may know what wakes next without asking, so that only a fresh one is measured."""

    def make(self) -> None:  # noqa: B027 - nothing where opening a store makes the part
        """Make the part."""

    @abstractmethod
    def clear(self) -> None:
        """Remove the whole part, also one that an earlier run has left."""

    @abstractmethod
    def is_empty(self) -> bool:
        """True if the part does not exist yet."""

    @abstractmethod
    def size(self) -> int:
        """Bytes that the part uses, or the whole server where it does not tell of parts."""

    def flush(self) -> None:  # noqa: B027 - nothing where a server writes at its own pace
        """Have what was stored written out now, and not while something is measured."""

    @abstractmethod
    def load(self) -> Load: ...

    @abstractmethod
    def watch(self) -> Watch:
        """Measures how long the server is busy with one operation, while it works for nobody else."""

    @abstractmethod
    def raw(self) -> Raw: ...

    @abstractmethod
    def health(self) -> Mapping[str, int]:
        """Figures that grow in long use: bytes, and rows that are dead and not yet removed."""

    def snapshot(self) -> AbstractContextManager[None]:
        """Hold a snapshot of the data open. Raises BadInput where there is no such thing."""
        raise BadInput("--snapshot", self.kind, "a database server: PostgreSQL, MySQL")


class Stopwatch:
    """By this process's clock, less what the round trip to a server takes."""

    step = 0.001

    def __init__(self, round_trip: Callable[[], float] | None = None) -> None:
        """`round_trip`: microseconds of a request that costs the server nothing; measured again each second."""
        self._measure = round_trip
        self._measured = -_REFRESH
        self._round_trip = 0.0

    def start(self) -> None:
        if self._measure and time.monotonic() - self._measured > _REFRESH:
            self._round_trip = self._measure()
            self._measured = time.monotonic()
        self._began = time.perf_counter_ns()

    def stop(self) -> float:
        taken = (time.perf_counter_ns() - self._began) / 1000
        return max(1.0, taken - self._round_trip) if self._measure else taken  # ratios are made of it: never 0


def named_part(url: str, option: str, fresh: str) -> str:
    """`url` with `?option=fresh`, unless it names a part of the server by that option already."""
    if dict(parse_qsl(urlsplit(url).query)).get(option):
        return url
    return f"{url}{'&' if '?' in url else '?'}{option}={fresh}"


def due_in_an_hour() -> int:
    """In milliseconds since the epoch."""
    return time.time_ns() // 1_000_000 + HOUR


class Stat(NamedTuple):
    """The fields of `/proc/7/stat` that are used here. Times in seconds."""

    name: str
    state: str
    parent: int
    used: float
    """Processor time of all threads, in steps of some milliseconds."""
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
    used, waited = (sum(map(int, fields[first : first + 2])) / tick for first in (11, 13))
    return Stat(name, fields[0], int(fields[1]), used, waited, int(fields[19]) / tick)


def spent(place: Path) -> float:
    """Seconds on a processor, to the nanosecond; for a process, of its first thread. Raises OSError."""
    return int((place / "schedstat").read_text(encoding="ascii").split()[0]) / 1e9


def resident_bytes(place: Path) -> int:
    """The memory of a process that is in use; 0 where the system does not tell."""
    try:
        return int((place / "statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def started_at(place: Path) -> float:
    """The start time in seconds since the epoch, exact to some hundredths. Raises OSError."""
    up = float((_PROC / "uptime").read_text(encoding="ascii").split()[0])
    return time.time() - up + stat(place).began


def place_of_process(pid: int, began: float, *, within: float, parent: bool = False) -> Path | None:
    """The process with that number, or its parent, if it began at that time; None: it runs on another machine."""
    try:
        place = _PROC / str(stat(_PROC / str(pid)).parent if parent else pid)
        return place if abs(started_at(place) - began) < within else None
    except (OSError, ValueError, IndexError):
        return None


def family(parent: Path) -> list[Path]:
    """The process and its children."""
    found = [parent]
    for place in _PROC.glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            if stat(place).parent == int(parent.name):
                found.append(place)
    return found


def spent_by_family(parent: Path) -> float:
    """Seconds that the process and its children took, including children that have ended. Raises OSError."""
    total = stat(parent).waited
    for place in family(parent):
        with suppress(OSError):  # it ended a moment ago
            total += spent(place)
    return total


class ProcessorWatch:
    """Microseconds of processor time of those who serve a store: no waits for a disk, a lock or the client."""

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
    """Seconds spent so far, read once it sleeps: the system updates them rarely while it runs. None: it has ended."""
    try:
        for _ in range(_TRIES):
            if stat(place).state not in "RD":
                break
        return spent(place)
    except OSError:
        return None
