"""Where the lines of a history go: a list, or a file that outlives who wrote it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from heapq import merge
from itertools import count
from pathlib import Path

from bide.core.instants import Millis
from bide.testing.history.events import Event, decode, encode


class Journal:
    """Takes events; knows what time it is, by the clock that orders them and by the store's.

    `calls` gives the numbers of calls: those of several processes have to be kept apart.
    """

    def __init__(
        self,
        say: Callable[[Event], None],
        *,
        time_ns: Callable[[], int],
        clock: Callable[[], Millis],
        calls: Iterator[int] | None = None,
    ) -> None:
        self.say = say
        self.time_ns = time_ns
        self.clock = clock
        self._calls = count(1) if calls is None else calls

    def call(self) -> int:
        """A number that no other call has."""
        return next(self._calls)


class Log:
    """A file of events: one unbuffered append each, so that what was said outlives a kill."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def say(self, event: Event) -> None:
        os.write(self._file, encode(event))

    def close(self) -> None:
        os.close(self._file)


def read(path: Path) -> Iterator[Event]:
    """The events of a file, in order. A last line that a kill cut off does not count."""
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield decode(line)


def read_all(paths: Iterable[Path]) -> Iterator[Event]:
    """The events of all of these files, in the order of time."""
    return merge(*(read(path) for path in paths), key=lambda event: event.at)
