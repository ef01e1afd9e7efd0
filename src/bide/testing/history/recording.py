"""Record a history as it happens: a client's verbs, a worker's calls to its store, and handlers.

`app.instruments.append(Recording(journal, who))`, before the app is opened, records what its workers lease, extend and
settle, and every delivery. `RecordedClient(app, journal, who)` records the calls made through it.

A `Journal` writes to a list, for example, or to a `Log`, a file that outlives its process.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from heapq import merge
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from msgspec.structs import replace

from bide.app import Bide
from bide.core.answers import Answer
from bide.core.errors import OutcomeUnknown, PartlyFailed, StoreError
from bide.core.instants import Due, In, Millis
from bide.core.names import RESERVED_TOPICS
from bide.core.outcomes import Outcome
from bide.core.records import Cancel, Change, Lease, Leased, Move, NewTask, Redrive, Settlement, Token, Topic
from bide.core.tasks import Task
from bide.ports import Instrument, Pending, Route, Sink, Store, StoreFacade
from bide.testing.history import events as ev
from bide.testing.history.events import Asks, Event, decode, encode, seen


class Journal:
    """Takes events, and reads both the clock that orders them and the store's clock.

    `calls` yields the numbers of calls. Those of several processes must be distinct.
    """

    def __init__(
        self, say: Callable[[Event], None], *, time_ns: Callable[[], int], clock: Callable[[], Millis],
        calls: Iterator[int] | None = None,
    ) -> None:  # fmt: skip
        self.say = say
        self.time_ns = time_ns
        self.clock = clock
        self._calls = count(1) if calls is None else calls

    def call(self) -> int:
        """The number of a new call."""
        return next(self._calls)


class Log:
    """A file of events: one unbuffered append for each, so that written events survive a kill."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def say(self, event: Event) -> None:
        os.write(self._file, encode(event))

    def close(self) -> None:
        os.close(self._file)


def read(path: Path) -> Iterator[Event]:
    """Read the events of a file, in order. A last line that a kill cut off is ignored. Raises OSError, ValueError."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.endswith(b"\n"):
                try:
                    yield decode(line)
                except ValueError as error:
                    raise ValueError(f"{path}, line {number}: {error}") from error


def read_all(paths: Iterable[Path]) -> Iterator[Event]:
    """Read the events of several files, in the order of time."""
    return merge(*(read(path) for path in paths), key=lambda event: event.at)


Answers = TypeVar("Answers", bound=Sequence[object])
_of_a_group: ContextVar[RecordedClient | None] = ContextVar("of_a_group", default=None)
"""The client whose verb over a group is running: only its calls to the store show the single tasks."""


class Recording(Instrument):
    """Records the leases, extends and settles of one process, `who`, and the first and last lines of its handlers.

    Changes that a verb over a group makes at the store are recorded as calls of its client.
    """

    def __init__(self, journal: Journal, who: str) -> None:
        self._journal = journal
        self._who = who

    def store(self, store: Store) -> Store:
        return _RecordedStore(store, self._journal, self._who)

    def route(self, route: Route) -> Route:
        return replace(route, sink=_Recorded(route.sink, self._journal, self._who))


class _RecordedStore(StoreFacade):
    """A store that records its leases, extends, settles and changes."""

    def __init__(self, inner: Store, journal: Journal, who: str) -> None:
        super().__init__(inner)
        self._journal = journal
        self._who = who

    async def lease(self, wants: Mapping[Topic, int], *, now: Millis, until: Millis, holder: str) -> Leased:
        journal = self._journal
        asked = {topic: want for topic, want in wants.items() if want > 0 and topic not in RESERVED_TOPICS}
        if not asked:
            return await super().lease(wants, now=now, until=until, holder=holder)
        call = journal.call()
        journal.say(ev.Leasing(call, self._who, journal.time_ns(), journal.clock(), asked, until))
        try:
            leased = await super().lease(wants, now=now, until=until, holder=holder)
        except BaseException as error:
            # tasks that were leased nevertheless are due again when their leases end
            _tell(journal, call, error)
            raise
        held = [ev.Held(task.topic, task.key, seen(task)) for task in leased.tasks]
        journal.say(ev.Leased(call, journal.time_ns(), leased.now, held, leased.next_wake))
        return leased

    async def extend(self, leases: Sequence[Lease], *, now: Millis, until: Millis) -> list[bool]:
        journal = self._journal
        calls = [journal.call() for _ in leases]
        at, clock = journal.time_ns(), journal.clock()
        for call, lease in zip(calls, leases, strict=True):
            journal.say(ev.Extending(call, self._who, at, clock, *lease, until, now))
        return await _told(journal, calls, super().extend(leases, now=now, until=until))

    async def settle(self, outcomes: Sequence[Settlement], *, now: Millis) -> Sequence[bool | Pending[bool]]:
        journal = self._journal
        calls = [journal.call() for _ in outcomes]
        # a store that uses the caller's clock settles at `now`, which may have been read long before
        at, clock = journal.time_ns(), min(journal.clock(), now)
        for call, out in zip(calls, outcomes, strict=True):
            told = ev.Settling(
                call, self._who, at, clock, out.topic, out.key, out.token, out.outcome, out.next_at, out.keep_until,
                out.error, out.next_id,
            )  # fmt: skip
            journal.say(told)
        return await _told(journal, calls, super().settle(outcomes, now=now))

    async def change(self, changes: Sequence[Change], *, now: Millis) -> Sequence[Answer | Pending[Answer]]:
        client, asked = _of_a_group.get(), super().change(changes, now=now)
        return await asked if client is None else await client.told(client.asks(changes, now), asked)


class _Recorded:
    """A sink that records the first and the last line of each delivery."""

    def __init__(self, sink: Sink, journal: Journal, who: str) -> None:
        self._sink = sink
        self._journal = journal
        self._who = who

    async def deliver(self, task: Task[Any]) -> Outcome | None:
        journal, record = self._journal, task.record
        began = ev.Began(
            self._who, journal.time_ns(), journal.clock(), record.topic, record.key, record.id, record.token,
            record.attempt, record.planned_at,
        )  # fmt: skip
        journal.say(began)
        how = "returned"
        try:
            outcome = await self._sink.deliver(task)
            if outcome is not None:
                how = repr(outcome)
            return outcome
        except BaseException as error:
            how = repr(error)
            raise
        finally:
            journal.say(ev.Ended(self._who, journal.time_ns(), record.topic, record.key, record.token, how))


class RecordedClient:
    """The verbs of an app, with calls and answers recorded. A StoreError is recorded and raised again."""

    def __init__(self, app: Bide, journal: Journal, who: str) -> None:
        self.app = app
        self._journal = journal
        self._who = who

    def new(self, topic: Topic, payload: object = None, **options: Any) -> NewTask:
        """Like `Bide.new`."""
        return self.app.new(topic, payload, **options)

    async def schedule(self, task: NewTask) -> Answer:
        """Schedule a task made by `new`."""
        [call] = self._asks_schedule([task])
        return await self._answered(call, self.app.schedule_new(task))

    async def schedule_many(self, tasks: Sequence[NewTask]) -> list[Answer]:
        """Schedule tasks in one call of the app."""
        return await self.told(self._asks_schedule(tasks), self.app.schedule_many(tasks))

    async def reschedule(
        self, topic: Topic, key: str, *, delay: timedelta | None = None, at: Any = None, if_token: Token | None = None
    ) -> Answer:
        due: Due | None = None if delay is None else In(round(delay / timedelta(milliseconds=1)))
        if due is None:
            due = self.app.new(topic, None, at=at).due
        call = self._asks(Asks.MOVE, topic, key, due=due, if_token=if_token)
        return await self._answered(call, self.app.reschedule(topic, key, delay=delay, at=at, if_token=if_token))

    async def fire_now(self, topic: Topic, key: str, *, if_token: Token | None = None) -> Answer:
        call = self._asks(Asks.MOVE, topic, key, due=In(0), if_token=if_token)
        return await self._answered(call, self.app.fire_now(topic, key, if_token=if_token))

    async def cancel(self, topic: Topic, key: str, *, if_token: Token | None = None) -> Answer:
        call = self._asks(Asks.CANCEL, topic, key, if_token=if_token)
        return await self._answered(call, self.app.cancel(topic, key, if_token=if_token))

    async def redrive(self, topic: Topic, key: str, *, delay: timedelta, if_token: Token | None = None) -> Answer:
        due = In(round(delay / timedelta(milliseconds=1)))
        call = self._asks(Asks.REDRIVE, topic, key, due=due, if_token=if_token)
        return await self._answered(call, self.app.redrive(topic, key, delay=delay, if_token=if_token))

    async def change_many(self, changes: Sequence[Change]) -> list[Answer]:
        """Make moves, cancels and redrives in one call of the app."""
        return await self.told(self.asks(changes), self.app.change_many(changes))

    async def get(self, topic: Topic, key: str) -> Task[Any] | None:
        journal = self._journal
        call = self._asks(Asks.GET, topic, key)
        try:
            task = await self.app.get(topic, key)
        except BaseException as error:
            journal.say(ev.Failed(call, journal.time_ns(), False, repr(error)))  # nothing is done by reading
            raise
        shown = None if task is None else seen(task.record)
        journal.say(ev.Answered(call, journal.time_ns(), journal.clock(), None, shown))
        return task

    async def shift(self, group: str, by: timedelta, *, topic: Topic | None = None) -> list[Answer]:
        """Like `Bide.shift`; each change that it makes is recorded."""
        with self._over_a_group():
            return await self.app.shift(group, by, topic=topic)

    async def cancel_group(self, group: str, *, topic: Topic | None = None) -> list[Answer]:
        """Like `Bide.cancel_group`; each change that it makes is recorded."""
        with self._over_a_group():
            return await self.app.cancel_group(group, topic=topic)

    def asks(self, changes: Sequence[Change], now: Millis | None = None) -> list[int]:
        """Record that these changes are about to be made, with the time `now` if known; return their calls."""
        return [
            self._asks(
                Asks.MOVE if isinstance(one, Move) else Asks.CANCEL if isinstance(one, Cancel) else Asks.REDRIVE,
                one.topic,
                one.key,
                id=one.id if isinstance(one, Redrive) else "",
                due=None if isinstance(one, Cancel) else one.due,
                if_token=one.if_token,
                deadline=one.deadline if isinstance(one, Move) else None,
                now=now,
            )
            for one in changes
        ]

    async def told(self, calls: Sequence[int], asked: Awaitable[Answers]) -> Answers:
        """Await `asked`; record each call's answer, and return all of them."""
        return await _told(self._journal, calls, asked)

    # internals

    def _asks(self, asks: Asks, topic: Topic, key: str, *, now: Millis | None = None, **details: Any) -> int:
        journal = self._journal
        call = journal.call()
        if asks is Asks.CANCEL:
            details["keeps"] = self.app.config.retentions.of(topic).cancelled > 0
        at, clock = journal.time_ns(), journal.clock()
        if now is not None:
            clock = min(clock, now)
        journal.say(ev.Asked(call, self._who, at, clock, asks, topic, key, grain=self.app.clock.grain, **details))
        return call

    def _asks_schedule(self, tasks: Sequence[NewTask]) -> list[int]:
        return [
            self._asks(
                Asks.SCHEDULE, task.topic, task.key, id=task.id, due=task.due, on_conflict=task.on_conflict,
                deadline=task.deadline, if_token=task.if_token,
            )
            for task in tasks
        ]  # fmt: skip

    async def _answered(self, call: int, asked: Awaitable[Answer]) -> Answer:
        try:
            answer = await asked
        except BaseException as error:
            _tell(self._journal, call, error)
            raise
        _tell(self._journal, call, answer)
        return answer

    @contextmanager
    def _over_a_group(self) -> Iterator[None]:
        """Within this context, `Recording` records the app's changes at its store."""
        before = _of_a_group.set(self)
        try:
            yield
        finally:
            _of_a_group.reset(before)


async def _told(journal: Journal, calls: Sequence[int], asked: Awaitable[Answers]) -> Answers:
    """Await `asked`; record each call's own answer or error."""
    try:
        answers = await asked
    except BaseException as error:
        each = error.answers if isinstance(error, PartlyFailed) else [error] * len(calls)
        for call, one in zip(calls, each, strict=True):
            _tell(journal, call, one)
        raise
    for call, answer in zip(calls, answers, strict=True):
        _tell(journal, call, answer)
    return answers


def _tell(journal: Journal, call: int, answer: object) -> None:
    at = journal.time_ns()
    if isinstance(answer, Pending):
        answer.add_done_callback(lambda done: _tell(journal, call, _result(done)))
    elif isinstance(answer, BaseException):
        journal.say(ev.Failed(call, at, _unknown(answer), repr(answer)))
    elif isinstance(answer, Answer):
        task = None if answer.record is None else seen(answer.record)
        journal.say(ev.Answered(call, at, journal.clock(), answer.result, task, answer.was))
    else:
        journal.say(ev.Told(call, at, journal.clock(), bool(answer)))


def _unknown(error: BaseException) -> bool:
    """True if a call that failed with this error may have taken effect. Only a StoreError can exclude that."""
    return not isinstance(error, StoreError) or isinstance(error, (OutcomeUnknown, PartlyFailed))


def _result(done: asyncio.Future[Any]) -> object:
    return asyncio.CancelledError() if done.cancelled() else done.exception() or done.result()
