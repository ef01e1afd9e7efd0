"""A watched table as its handler sees it: the row, resting and given-up rows, and the call of the handler.

Rows that failed or were deferred by their handler rest: every query leaves them out, so they delay no other row. Only
this process knows how often a row failed, because the table has no column for it; after a crash the row is simply due.
Queries leave out given-up rows too. Each is checked once an hour, and stays given up while its due time is the same.

The log reports each event once: a row failed, its policy has ended, it was given up. If many rows fail, the log reports
their number.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from typing import Any, TypeVar

from msgspec import Struct

from bide.core.errors import BadInput, DuplicateHandler, SetupError
from bide.core.instants import Millis, as_datetime, duration_text
from bide.core.names import error_text, text_of
from bide.core.outcomes import Dead, Defer, Done, Outcome, Retry, outcome_in
from bide.core.records import NewTask, Topic
from bide.core.retry import RetryPolicy
from bide.core.table_source import TableSource
from bide.ports import Clock, DueRow, RowRefused, call_in_thread, final_result, is_coroutine_function

_log = logging.getLogger("bide.table")
LAST_PAUSE: Millis = 3_600_000
"""How long a row rests after its policy has ended. It is still due, and nothing else would retry it."""
_LOUD = 20
"""The number of resting rows that the log names one by one; beyond it, the log reports each power of ten."""

HandlesRow = TypeVar("HandlesRow", bound=Callable[["Row"], Any])
OnDead = TypeVar("OnDead", bound=Callable[["DeadRow"], Any])


class DeadRow(Struct, frozen=True):
    """A given-up row: its handler returned `Dead`, or it failed as often as the source allows.

    `due` is when it was due, in milliseconds since the epoch; `why` is the text of the last error.
    """

    id: Any
    due: Millis
    tries: int
    why: str
    table: str


class Row(Struct, eq=False):
    """A due row, as it was before the changes: `row["title"]` is a column. Its transaction is open during the handler.

    `connection` is the driver's own, in the transaction that changes the row: writes on it commit with the change.
    """

    _row: DueRow
    table: str
    connection: Any
    _now: Callable[[], Millis]

    @property
    def id(self) -> Any:
        return self._row.id

    @property
    def due_at(self) -> datetime:
        """When it was due (aware, UTC)."""
        return as_datetime(self._row.due)

    @property
    def columns(self) -> dict[str, Any]:
        """The columns that the source selects, and the id."""
        return dict(self._row.columns)

    def __getitem__(self, column: str) -> Any:
        return self._row.columns[column]

    @property
    def lateness(self) -> timedelta:
        """The time since the row was due, by the database's clock."""
        return timedelta(milliseconds=self._now() - self._row.due)

    def __repr__(self) -> str:
        return f"<Row {self.id!r} due_at={self.due_at.isoformat()}>"


class Watch(Struct, eq=False, kw_only=True):
    """A watched table, or several that match one pattern. By itself it only makes the changes of its source;
    `@watch.handler` adds a function, and `topic` makes a task of each row.
    """

    source: TableSource
    name: str
    """The name of its table, or the pattern of several."""
    concurrency: int
    retry: RetryPolicy
    timeout: Millis | None
    topic: Topic | None
    task_of: Callable[[DueRow, str], NewTask]
    """Makes the task of a row with the given key."""
    listeners: set[Callable[[], None]] = set()
    """One function for each loop in this process that watches it; `look` calls them."""
    dead_hooks: list[Callable[[DeadRow], Any]] = []
    given_up: dict[Any, DeadRow] = {}
    """By id, the rows that were given up without a change."""
    parts: list[Watch] = []
    """One watch for each table; they share hooks and `look`."""
    _function: Callable[[Row], Any] | None = None
    _threads: ThreadPoolExecutor | None = None

    def __post_init__(self) -> None:
        self.parts.append(self)
        if len(self.source.tables) > 1:
            self.parts = [copy.copy(self) for _ in self.source.tables]
            for part, one in zip(self.parts, self.source.each(), strict=True):
                part.source, part.parts, part.given_up = one, [part], {}

    def new_task(self, row: DueRow) -> NewTask:
        """The task for a row. With several tables its key names the table, since ids may repeat across tables."""
        table = self.source.table
        return self.task_of(row, str(row.id) if table == self.name else f"{table}/{row.id}")

    def handler(self, function: HandlesRow) -> HandlesRow:
        """Call `function` with each `Row` that fires, inside the transaction of its changes: both happen or neither.

        A coroutine function runs on the worker's loop, a plain one in a thread. If it raises, the row is unchanged and
        is retried by the retry policy; other due rows do not wait for it. Like a task's handler it may return or raise
        `Retry`, `Defer` and `Dead`; any other result but None is a failure. Raises DuplicateHandler, SetupError.
        """
        if self._function is not None:
            raise DuplicateHandler(f"{self} has a handler already")
        if self.topic is not None:
            raise SetupError(f"{self} hands its rows to {self.topic!r}: either a topic or a handler")
        if not callable(function):
            raise BadInput("handler", function, "a function that takes a Row")
        plain = not is_coroutine_function(function)
        threads = ThreadPoolExecutor(self.concurrency, f"bide {self.name}") if plain else None
        for watch in (self, *self.parts):
            watch._function, watch._threads = function, threads
        return function

    def on_dead(self, hook: OnDead) -> OnDead:
        """Call this function (plain or coroutine) with each `DeadRow` of this table, in the process that gave it up."""
        self.dead_hooks.append(hook)
        return hook

    @property
    def dead(self) -> list[DeadRow]:
        """The rows that this process has given up without a change, because the source has no `dead` changes."""
        return [row for part in self.parts for row in part.given_up.values()]

    def redrive(self, identity: Any, *, table: str | None = None) -> bool:
        """Try the given-up row with this id again; False: it was not given up. May be called from any thread.

        `table` names one of several tables; without it, every given-up row with this id is tried again.
        """
        found = [part.given_up.pop(identity, None) for part in self.parts if table in (None, part.source.table)]
        self.look()
        return any(found)

    def is_dead(self, identity: Any, due: Millis | None = None) -> bool:
        """True if the row was given up; with `due`, if it was given up with that due time."""
        row = self.given_up.get(identity)
        return row is not None and (due is None or row.due == due)

    @property
    def handled(self) -> bool:
        """True if a function is called for each row; else rows are taken by the page."""
        return self._function is not None

    @property
    def in_threads(self) -> bool:
        """True if its function runs in a thread, which cannot be stopped."""
        return self._threads is not None

    def look(self) -> None:
        """Query the table now, after this process has committed an earlier row. May be called from any thread.

        Does nothing if this process does not watch the table. Without it, the row is found at most `look_every` later.
        """
        for notify in tuple(self.listeners):
            notify()

    async def call(self, row: Row) -> Retry | Defer | Dead | None:
        """Call the handler and return its outcome; None: the row fires. Outcomes that the handler raises are returned
        too; its other exceptions are raised. Raises TypeError for any other result.
        """
        assert self._function is not None
        result: Any
        limit = asyncio.timeout(None if self.timeout is None else self.timeout / 1000)
        try:
            if self._threads is None:
                async with limit:
                    result = await final_result(self._function(row))
            else:
                result = await final_result(await call_in_thread(self._threads, self._function, row))
        except Exception as raised:
            result = outcome_in(raised)
            if limit.expired():
                raise TimeoutError(f"no outcome within {duration_text(self.timeout or 0)}") from raised
            if not isinstance(result, Outcome):
                raise result  # noqa: B904 - the exception itself, as a rule
        if result is None or (isinstance(result, Done) and result.again is None):
            return None
        if isinstance(result, Retry | Defer | Dead):
            return result
        raise TypeError(
            f"the handler answered {text_of(result, 80)}, so the row is not fired: return None, or Retry(...), "
            "Defer(...) or Dead(...)"
        )

    def __repr__(self) -> str:
        return f"<Watch {self.source.table}>"


class _RestingRow(Struct):
    row: DueRow
    failures: int = 0
    until: Millis = 0
    pause: Millis = 0
    dead: bool = False


class RestingRows(Struct, eq=False):
    """The rows that one loop leaves out for now. Each call costs O(resting rows)."""

    _watch: Watch
    clock: Clock
    _rests: dict[Any, _RestingRow] = {}

    def at(self, now: Millis) -> tuple[list[Any], Millis | None]:
        """The rows resting at `now`, and when the first of them is tried again."""
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
            self._watch.given_up.pop(identity, None)

    def forget(self, now: Millis, running: Collection[Any]) -> None:
        """Forget rows whose rest is over, except those being retried in `running`.

        Called if nothing else is due: they were moved, cancelled, or fired elsewhere.
        """
        running = set(running)
        self._rests = {one: rest for one, rest in self._rests.items() if rest.until > now or one in running}

    def check(self, row: DueRow) -> None:
        """Raise SetupError for a row that the query should have left out."""
        rest = self._rests.get(row.id)
        if rest is not None and rest.until > self.clock.now() and (not rest.dead or self._watch.is_dead(row.id)):
            raise SetupError(f"row {text_of(row.id)} cannot be left out: its id is not found by its value")

    def put(self, row: DueRow, until: Millis) -> None:
        """Let the row rest without counting a failure."""
        before = self._rests.get(row.id) or _RestingRow(row)
        self._rests[row.id] = _RestingRow(row, before.failures, until, before.pause)

    def bury(self, row: DueRow) -> None:
        """Leave out the given-up row while its due time stays the same."""
        until = self.clock.now() + self.clock.span(LAST_PAUSE)
        self._rests[row.id] = _RestingRow(row, 0, until, LAST_PAUSE, dead=True)

    def dead(self, row: DueRow, why: str) -> DeadRow:
        return DeadRow(row.id, row.due, self._failures(row), text_of(why), self._watch.source.table)

    def _failures(self, row: DueRow) -> int:
        """How often the row has now failed with this due time."""
        before = self._rests.get(row.id)
        return 1 if before is None or before.row.due != row.due else before.failures + 1

    def failed(self, row: DueRow, error: BaseException, until: Millis | None) -> DeadRow | None:
        """Count a failure; the row rests until `until`, or as the policy says. Returns it dead after the last try."""
        tries, now = self._watch.source.tries, self.clock.now()
        before, failures = self._rests.get(row.id), self._failures(row)
        if tries is not None and failures >= tries:
            return self.dead(row, said(error))
        pause = self._watch.retry.delay(failures)
        ended = pause is None and until is None
        if pause is None:
            pause = max(LAST_PAUSE, before.pause if before is not None else 0)
        until = now + self.clock.span(pause) if until is None else max(until, now)
        first_end = ended and (before is None or before.pause < LAST_PAUSE)
        self._rests[row.id] = _RestingRow(row, failures, until, pause)
        if failures == 1 or first_end:
            self._say(
                f"row {text_of(row.id)} failed{'' if failures == 1 else f' {failures} times'}; again "
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
