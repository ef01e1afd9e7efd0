"""A store on a server, and the server's clock, by which it goes unless its options say otherwise.

Each answer carries the server's time at some moment between sending and receiving. So it bounds the offset between the
server's clock and this machine's monotonic clock. Intersecting the bounds of a few answers gives the offset to within
the fastest round trip (Cristian, 1989; Marzullo, 1984). Bounds widen with time, because quartz drifts. An answer that
contradicts them means that a clock was set, and the estimate starts over. This machine's wall clock is not used, so it
may be wrong by hours, or be set while bide runs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Generic, Literal, Protocol, TypeVar

from bide.core.errors import BadInput, StoreUnavailable
from bide.core.instants import Millis
from bide.ports import Clock

# --- the server's clock

_log = logging.getLogger("bide.stores")
_DRIFT = 200e-6
"""The most seconds per second that two clocks may drift apart; quartz stays well within 100 ppm."""
_READINGS, _QUICK = 3, 0.1
"""The most readings of a clock, and the round trip in seconds that is quick enough to stop earlier."""


class ServerTime:
    """The server's time in seconds since the epoch, kept by this process's monotonic clock."""

    def __init__(self) -> None:
        self._low = self._high = time.time() - time.monotonic()
        self._at = -1.0
        self._warned = False

    def saw(self, micros: int, sent: float, received: float) -> None:
        """Note a server time of `micros`, from a call `sent` and answered (`received`) by the monotonic clock."""
        low, high = micros / 1e6 - received, (micros + 1) / 1e6 - sent  # it was cut to whole microseconds
        if self._at >= 0:
            wider = _DRIFT * abs(received - self._at)  # answers may be noted in another order than they arrived in
            old_low, old_high = self._low - wider, self._high + wider
            if low <= old_high and old_low <= high:  # otherwise a clock was set
                low, high = max(low, old_low), min(high, old_high)
        self._low, self._high, self._at = low, high, received

    async def read(self, ask: Callable[[], Awaitable[int]]) -> int:
        """Read the server's time in microseconds by `ask`, and return the last answer.

        Reads again if a reading was slow, for example because a connection had to be opened first.
        """
        left = _READINGS
        while True:
            sent = time.monotonic()
            micros = await ask()
            received = time.monotonic()
            self.saw(micros, sent, received)
            left -= 1
            if received - sent < _QUICK or not left:
                return micros

    def seconds(self) -> float:
        return time.monotonic() + (self._low + self._high) / 2

    def warn_of_skew(self, where: str) -> None:
        """Log a warning, once, if this machine's clock is more than a second off."""
        if abs(self.skew) > 1 and not self._warned:
            self._warned = True
            _log.warning("this machine's clock is %+.1f s off that of %s; bide uses the server's", self.skew, where)

    @property
    def skew(self) -> float:
        """Seconds by which this machine's wall clock is ahead of the server's."""
        return time.time() - self.seconds()


class StoreClock:
    """The engine's clock on a store that has a clock of its own."""

    grain: Millis = 1

    def __init__(self, server: ServerTime) -> None:
        self._time = server

    def now(self) -> Millis:
        return int(self._time.seconds() * 1000)

    def seconds_until(self, at: Millis) -> float:
        return at / 1000 - self._time.seconds()

    def span(self, length: Millis) -> Millis:
        return length


# --- a store on a server

LONGEST_PATIENCE = 45.0
"""Seconds: servers keep an answer for 600, and a resend must arrive well before that."""
WhichClock = Literal["server", "caller"]
"""The clock that a store uses: the server's, or the `now` of each call."""


class Opened(Protocol):
    """The state of an open store."""

    @property
    def time(self) -> ServerTime: ...

    async def read_clock(self) -> int:
        """Read the server's time, in microseconds."""

    async def close(self) -> None: ...


T = TypeVar("T", bound=Opened)


class ServerStore(ABC, Generic[T]):
    """The options that all servers have, and what opens and closes a store once."""

    def __init__(self, shown: str, clock: WhichClock, longest: float = LONGEST_PATIENCE, **seconds: float) -> None:
        """`shown`: the address without secrets. `seconds`: options that have to be above 0, and at most `longest`."""
        if clock not in ("server", "caller"):
            raise BadInput("clock", clock, '"server" or "caller"')
        for name, value in seconds.items():
            if not 0 < value <= longest:
                raise BadInput(name, value, f"seconds above 0, at most {longest}")
        self._shown = shown
        self._clock: WhichClock = clock
        self._by_server = clock == "server"
        self._opened: T | None = None
        self._changing = asyncio.Lock()
        """Serializes `open` and `close`: after two concurrent opens, only one connection would ever be closed."""

    async def open(self) -> None:
        """Connect and check the server. Raises StoreUnavailable, StoreMismatch, SetupError."""
        async with self._changing:
            if self._opened is None:
                self._opened = await self._connect()

    @abstractmethod
    async def _connect(self) -> T: ...

    async def close(self) -> None:
        async with self._changing:
            if self._opened is not None:
                opened, self._opened = self._opened, None
                await opened.close()

    def _open(self) -> T:
        if self._opened is None:
            raise StoreUnavailable(f"{self._shown}: the store is not open")
        return self._opened

    # --- features.clock

    async def time(self) -> Millis:
        """As the server says: the estimate that is kept here may go back by a part of a millisecond."""
        return await self._open().read_clock() // 1000

    def clock(self) -> Clock | None:
        return StoreClock(self._open().time) if self._by_server else None
