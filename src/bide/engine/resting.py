"""The rows of one table that are left alone for now: those that failed, and those that their handler deferred.

They are named in whatever is asked of the table, so that they hold up nobody. How often a row failed is known to this
process alone: the table has no column for it, and a row that is due after a crash is simply due. A row that was given
up is among them too: its due time may have changed since, so it is looked at once an hour, and stays given up while it
has the same.

The log says each thing once: that a row failed, that its policy is at an end, that it was given up. Where many rows
fail, it says how many.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

from msgspec import Struct

from bide.core.errors import SetupError
from bide.core.instants import Millis, duration_text
from bide.core.texts import error_text, text_of
from bide.engine.watch import DeadRow, Watch
from bide.ports import Clock, DueRow, RowRefused

_log = logging.getLogger("bide.table")
LAST_PAUSE: Millis = 3_600_000
"""How long a row rests that its policy has given up: it is due still, and nobody else would look at it."""
_LOUD = 20
"""Rows at rest of which each is named in the log; beyond that, each power of ten."""


class _Rest(Struct):
    row: DueRow
    failures: int
    until: Millis
    pause: Millis
    dead: bool = False


class Resting:
    """Those of one loop. What is asked of it costs O(rows at rest)."""

    def __init__(self, watch: Watch, clock: Clock) -> None:
        self.clock = clock
        self._watch = watch
        self._rests: dict[Any, _Rest] = {}

    def at(self, now: Millis) -> tuple[list[Any], Millis | None]:
        """The rows that rest at `now`, and when the first of them is tried again."""
        dead = self._watch.is_dead
        resting = [
            (rest.until, identity)
            for identity, rest in self._rests.items()
            if rest.until > now and (not rest.dead or dead(identity))
        ]
        return [identity for _, identity in resting], min((until for until, _ in resting), default=None)

    def fired(self, identities: Collection[Any]) -> None:
        for identity in identities:
            self._rests.pop(identity, None)
            self._watch.forget(identity)

    def forget(self, now: Millis) -> None:
        """Nothing is due: what has rested was moved, called off, or fired elsewhere."""
        self._rests = {one: rest for one, rest in self._rests.items() if rest.until > now}

    def check(self, row: DueRow) -> None:
        """Raises SetupError for a row that was to be left out, and was not."""
        rest = self._rests.get(row.id)
        if rest is not None and rest.until > self.clock.now() and (not rest.dead or self._watch.is_dead(row.id)):
            raise SetupError(f"row {text_of(row.id)} cannot be left out: its id is not found by its value")

    def put(self, row: DueRow, until: Millis) -> None:
        """Let it rest, counting nothing."""
        before = self._rests.get(row.id)
        failures, pause = (0, 0) if before is None else (before.failures, before.pause)
        self._rests[row.id] = _Rest(row, failures, until, pause)

    def bury(self, row: DueRow) -> None:
        """It was given up: for as long as it is due at the same time."""
        until = self.clock.now() + self.clock.span(LAST_PAUSE)
        self._rests[row.id] = _Rest(row, 0, until, LAST_PAUSE, dead=True)

    def dead(self, row: DueRow, why: str) -> DeadRow:
        before = self._rests.get(row.id)
        failures = 1 if before is None else before.failures + 1
        return DeadRow(row.id, row.due, failures, text_of(why), self._watch.source.table)

    def failed(self, row: DueRow, error: BaseException, until: Millis | None) -> DeadRow | None:
        """It failed once more, and rests until then, or as the policy says; what it is now if that was the last try."""
        source, now = self._watch.source, self.clock.now()
        before = self._rests.get(row.id)
        failures = 1 if before is None or before.row.due != row.due else before.failures + 1
        if source.tries is not None and failures >= source.tries:
            return DeadRow(row.id, row.due, failures, said(error), source.table)
        pause = self._watch.retry.delay(failures)
        ended = pause is None and until is None
        if pause is None:
            pause = max(LAST_PAUSE, before.pause if before is not None else 0)
        until = now + self.clock.span(pause) if until is None else max(until, now)
        first_end = ended and (before is None or before.pause < LAST_PAUSE)
        self._rests[row.id] = _Rest(row, failures, until, pause)
        if failures == 1 or first_end:
            self._say(
                f"row {text_of(row.id)} failed{'' if failures == 1 else f' {failures} times'}, and is as it was; again "
                f"in {duration_text(until - now)}{', and so on' if first_end else ''}: {said(error)}",
                error if failures == 1 and not isinstance(error, RowRefused) else None,
            )
        return None

    def _say(self, text: str, error: BaseException | None) -> None:
        count = len(self._rests)
        if count <= _LOUD:
            _log.warning("%s: %s", self._watch, text, exc_info=error)
        elif str(count).strip("0") == "1":
            _log.error("%s: %d rows fail and rest; the last: %s", self._watch, count, text)
        else:
            _log.debug("%s: %s", self._watch, text)


def said(error: BaseException) -> str:
    return text_of(error) if isinstance(error, RowRefused) else error_text(error)
