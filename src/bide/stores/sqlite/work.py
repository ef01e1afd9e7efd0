"""One open transaction as the operations see it: its cursor, its tokens, and what it makes wake earlier."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Any, TypeAlias

from bide.core.instants import Millis
from bide.core.records import Token, Topic
from bide.stores.sqlite.errors import lost_part
from bide.stores.sqlite.queries import QUERIES

Fault: TypeAlias = Callable[[str], None]
"""Called with the name of a point between two statements; a test kills the process there.

The points: add:begun, add:inserted, add:decided (a key was taken); change:decided, change:written; lease:begun,
lease:selected, lease:updated; settle:begun, settle:deleted, or settle:decided and settle:written; and for every
transaction token:written (if one was given out), "before commit", "after commit".
"""

_LAST_TOKEN = QUERIES["last_token"]
_PUT_TOKEN = QUERIES["put_token"]


class Work:
    """What the operations of one transaction share.

    The token counter is read at its first use and written once, at the end: other processes write it too, so it cannot
    be kept from one transaction to the next, and one row written per transaction costs less than one per task.
    """

    __slots__ = ("_last", "_stored", "cursor", "fault", "wakes")

    def __init__(self, cursor: sqlite3.Cursor, *, fault: Fault | None = None, listening: bool = False) -> None:
        self.cursor = cursor
        self.fault = fault
        self.wakes: dict[Topic, Millis] | None = {} if listening else None
        self._last: Token = -1
        self._stored: Token = -1

    def one(self, query: str, arguments: tuple[Any, ...] = ()) -> Any:
        """The first row, or None."""
        return self.cursor.execute(query, arguments).fetchone()

    def last_token(self) -> Token:
        if self._last < 0:
            found = self.one(_LAST_TOKEN)
            if found is None or type(found[0]) is not int:
                raise lost_part(self.cursor, "the last token is gone")
            self._last = self._stored = found[0]
        return self._last

    def used_token(self, token: Token) -> None:
        """`token` was given out: the next one will be above it."""
        self._last = token

    def wake(self, topic: Topic, wake_at: Millis) -> None:
        """Something of `topic` now wakes at `wake_at`. Costs nothing worth counting while nobody listens."""
        if self.wakes is not None and wake_at < self.wakes.get(topic, wake_at + 1):
            self.wakes[topic] = wake_at

    def finish(self) -> None:
        """Write what was gathered. The last thing before the commit."""
        if self._last != self._stored:
            self.cursor.execute(_PUT_TOKEN, (self._last,))
            self._stored = self._last
            if self.fault is not None:
                self.fault("token:written")
