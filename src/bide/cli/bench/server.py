"""What a benchmark needs of the server behind a store, beside the store's own connections."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

_REFRESH = 1.0
"""Seconds after which a round trip is measured again."""
_LEAST = 1.0
"""Microseconds that an operation takes at the least, since a ratio is made of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a server had done at one moment, since it began."""

    at: float
    """Seconds of a monotonic clock."""
    cpu: float | None
    """Seconds of processor time; None where nobody tells."""
    requests: int
    """How often it was asked something: what counts as once, each kind of server says for itself."""


class Raw(Protocol):
    """One connection of the plain driver."""

    def store(self, keys: Sequence[str]) -> None:
        """Store a task for each key, due in an hour, as durably as bide does."""
        ...

    def close(self) -> None: ...


class Watch(Protocol):
    """How long one operation takes, in microseconds."""

    @property
    def step(self) -> float:
        """What it counts in. A median within one step is where half of the values lie below, so steps may be coarse."""
        ...

    def start(self) -> None: ...

    def stop(self) -> float: ...


class Server(Protocol):
    """One server, or several that are one to their clients, and the part of it that the benchmark works in."""

    @property
    def kind(self) -> str:
        """ "redis", "postgres", ..."""
        ...

    @property
    def remembers_heads(self) -> bool:
        """Whether an open store may know what wakes next without asking, so that only a fresh one is measured."""
        ...

    def make(self) -> None:
        """Make the part, where opening a store in it does not."""
        ...

    def clear(self) -> None:
        """Take away the whole part, whoever made it."""
        ...

    def is_empty(self) -> bool:
        """Whether the part is not there yet."""
        ...

    def size(self) -> int:
        """Bytes that it uses: of the part, or of all where it does not say."""
        ...

    def flush(self) -> None:
        """Have it write down at once what it would write, of what was stored, while something is measured."""
        ...

    def load(self) -> Load:
        """What it did so far."""
        ...

    def watch(self) -> Watch:
        """How long it is busy with one operation; it works for nobody else."""
        ...

    def raw(self) -> Raw:
        """A connection that stores with nothing of ours, in a place of its own."""
        ...

    def health(self) -> Mapping[str, int]:
        """What grows there when it is used for long: bytes, rows that are dead and not yet taken away."""
        ...

    def snapshot(self) -> AbstractContextManager[None]:
        """Somebody who sees the data as they are now while it is held. Raises BadInput where there is no such thing."""
        ...


class Stopwatch:
    """By this process's own clock."""

    step = 0.001

    def start(self) -> None:
        self._began = time.perf_counter_ns()

    def stop(self) -> float:
        return (time.perf_counter_ns() - self._began) / 1000


class LessRoundTrip:
    """By this process's own clock, less what the way there and back takes, which is measured again each second."""

    step = 0.001

    def __init__(self, round_trip: Callable[[], float]) -> None:
        """`round_trip`: microseconds of a question that costs the server nothing."""
        self._measure = round_trip
        self._measured = -_REFRESH
        self._round_trip = 0.0

    def start(self) -> None:
        if time.monotonic() - self._measured > _REFRESH:
            self._round_trip = self._measure()
            self._measured = time.monotonic()
        self._began = time.perf_counter_ns()

    def stop(self) -> float:
        return max(_LEAST, (time.perf_counter_ns() - self._began) / 1000 - self._round_trip)
