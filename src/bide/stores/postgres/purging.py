"""Forgetting what was kept long enough: a page at a time, and from where the page before it ended.

What was purged leaves an entry in its index until vacuum comes; while somebody holds an old snapshot, each page that
began at the start would step over all that was purged since.
"""

from __future__ import annotations

import time

from bide.core.instants import Millis
from bide.stores.postgres.journaled_connection import Call, PostgresConnection

AT_ONCE = 2_000
WHOLE = 600.0
"""Seconds between purges that begin at the start, for what was locked, or committed late."""
SLACK: Millis = 60_000
"""How long a transaction may be open, so that what it has ended is not too far back when it appears."""


class Purging:
    """How far it is purged. `used` false: each call begins at the start, for a clock that is the caller's."""

    __slots__ = ("_floor", "_used", "_whole_at")

    def __init__(self, *, used: bool) -> None:
        self._used = used
        self._floor: Millis = 0
        self._whole_at = 0.0

    async def purge(self, connection: PostgresConnection, now: Millis | None, limit: int) -> int:
        """Forget at most `limit` of what is kept until no later than now; how many that were."""
        if not self._used or time.monotonic() >= self._whole_at:
            self._floor, self._whole_at = 0, time.monotonic() + WHOLE
        purged = 0

        async def work(call: Call) -> int:
            most = min(limit - purged, AT_ONCE)
            [(count, last, there)] = await call.fetch("purge", now, most, self._floor)
            if count == most:
                self._floor = max(last, self._floor)
            else:
                self._floor = max(there - SLACK, 0)
            return int(count)

        while purged < limit:
            forgotten = await connection.repeat(work)
            purged += forgotten
            if forgotten < AT_ONCE:
                break
        return purged
