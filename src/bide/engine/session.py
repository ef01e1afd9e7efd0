"""An open client's path to its store: batched, or directly in the caller's open transaction; and what travels with it.

**Group commit**: concurrent single calls become one plural call. While one batch is in flight, the next one gathers, so
no call waits for a timer. A single call goes out at the end of the current turn of the event loop; a thousand
concurrent calls go out together. As the load grows, batches get larger and each call gets cheaper. This is the group
commit of databases, with coroutines as committers.

**Context**: a service has one client and many callers, so the caller travels in the context. No verb needs a parameter
for it, and every path to the store records it. The trace of the delivered task travels with it, and the open
transaction: a verb awaited inside `task.transaction()` or `app.using(connection)` must use that same connection, since
on the store's own it would deadlock on a lock that its caller holds. An asyncio task created inside such a block
inherits its context and may outlive the block. By then the connection is in another transaction or in none, so the
verbs of that task are refused: a rollback elsewhere would undo them.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from msgspec import Struct, field

from bide.core.answers import Answer
from bide.core.errors import HAS_TO_BE_AWAITED, NotOpen, PartlyFailed, SetupError
from bide.core.events import Event, EventKind, event_of
from bide.core.options import carried_trace
from bide.core.payloads import fitting, payload_sizes
from bide.core.records import Cancel, Change, Move, NewTask, Record, Ref, Result
from bide.engine.background import run_to_end
from bide.engine.history import History, Recorder
from bide.engine.pauses import PauseGate
from bide.ports import Clock, Joined, Pending, Store, Verbs, all_answers, run_at_once

T = TypeVar("T")

# --- the caller

OnChange: TypeAlias = Callable[[str, Sequence[Answer], str], None]
"""Called on the event loop with a verb, its answers and the caller, before the answers are returned. Must not raise."""


class Caller(NamedTuple):
    """The caller of the verbs in a context."""

    who: str
    on_change: OnChange | None


_caller: ContextVar[Caller | None] = ContextVar("bide_acting", default=None)


def current_caller() -> Caller | None:
    """The caller for which this coroutine acts; None: the client's own actor."""
    return _caller.get()


@contextmanager
def acting_as(who: str, on_change: OnChange | None = None) -> Iterator[None]:
    """Attribute the verbs in this block to `who`, in the event log and for `on_change`.

    `on_change` is called with every answer of every verb that makes changes. The event log records a schedule only if
    it replaced a task: thousands of new tasks a second would push everything else out of it. Once sent, a verb runs to
    its end even if its caller is cancelled, so that a disconnect hides no change.
    """
    mark = _caller.set(Caller(who, on_change))
    try:
        yield
    finally:
        _caller.reset(mark)


# --- the open transaction, and the delivery


class _Block(Struct, eq=False):
    """One block of verbs on the connection of `joined`; `outer` is the enclosing block."""

    store: Store
    joined: Joined
    here: bool
    outer: _Block | None
    over: bool = False


_innermost: ContextVar[_Block | None] = ContextVar("bide_joined", default=None)
_running: ContextVar[Record | None] = ContextVar("bide_running", default=None)

set_running = _running.set


def inherited_headers() -> Mapping[str, str] | None:
    """The trace headers of the task delivered in this context; None if there are none."""
    record = _running.get()
    return None if record is None or not record.options else carried_trace(record.options) or None


def _block_on(store: Store) -> _Block | None:
    """The innermost block on `store` around this coroutine, or around the creation of its asyncio task."""
    block = _innermost.get()
    while block is not None and block.store is not store:
        block = block.outer
    return block


def joined_to(store: Store) -> Joined | None:
    """The open transaction on `store` around this coroutine. Raises SetupError if it has ended."""
    block = None if _innermost.get() is None else _block_on(store)
    if block is None:
        return None
    if block.over:
        raise SetupError(
            "the transaction in which this asyncio task was created is over: await the task within the block, or "
            "create it outside, or with create_task(..., context=contextvars.Context())"
        )
    return block.joined


def on_this_thread(store: Store) -> bool:
    """True if that transaction's connection belongs to this thread, as synchronous connections do."""
    block = _block_on(store)
    return block is not None and block.here and not block.over


def enter(store: Store, joined: Joined, *, here: bool = False) -> None:
    """Make the verbs of this context join `joined`; `here`: its connection belongs to this thread."""
    _innermost.set(_Block(store, joined, here, _innermost.get()))


def leave(joined: Joined) -> None:
    """End what `enter` began. Raises SetupError if `joined` was not entered last in this context."""
    block = _innermost.get()
    if block is None or block.joined is not joined:
        raise SetupError("leave blocks of app.using(connection) in the context of their entry, the inner one first")
    block.over = True
    _innermost.set(block.outer)


@contextmanager
def joining(store: Store, joined: Joined) -> Iterator[None]:
    """Make the verbs of this coroutine join `joined` within this block."""
    enter(store, joined)
    try:
        yield
    finally:
        leave(joined)


def run_on_this_thread(verb: Coroutine[Any, Any, T]) -> T:
    """Run a verb on a synchronous connection to its end without an event loop. Raises SetupError if it suspends."""
    return run_at_once(verb, SetupError(HAS_TO_BE_AWAITED))


# --- the session

_CHANGED = frozenset(
    {Result.CREATED, Result.REPLACED, Result.MOVED, Result.CANCELLED, Result.CANCELLED_WHILE_LEASED, Result.REDRIVEN}
)

_ELSEWHERE = "this app is open in another event loop; give each loop its own app, or use app.sync"

running_loop = asyncio._get_running_loop
"""The event loop that runs in this thread, or None; in a forked child, the parent's loop does not count."""
Asked = TypeVar("Asked")
Got = TypeVar("Got")
Named = TypeVar("Named", Ref, NewTask, Change)
Answers = Sequence[Answer | Pending[Answer]]


class Batcher(Struct, Generic[Asked, Got], eq=False):
    """Combines `ask(x)` calls into `send([x, ...])`, which answers in the same order. One batch is in flight.

    A batch has at most `limit` calls, and `core.payloads.TOGETHER` bytes of payloads.
    """

    send: Callable[[Sequence[Asked]], Awaitable[Sequence[Got | Pending[Got]]]]
    limit: int = 1000
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _asked: list[Asked] = []
    _futures: list[asyncio.Future[Got]] = []
    _task: asyncio.Task[None] | None = None
    _waiting: set[Pending[Any]] = set()

    def ask(self, asked: Asked) -> asyncio.Future[Got]:
        """Return a future for the answer. A caller that stops waiting does not stop the call: it may still be done."""
        future: asyncio.Future[Got] = self._loop.create_future()
        self._asked.append(asked)
        self._futures.append(future)
        if self._task is None:
            self._start()
        return future

    def _start(self) -> None:
        self._task = self._loop.create_task(self._flush(), name="bide batcher")
        self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Send the calls that came meanwhile, however the batch ended (it may have been cancelled before it began)."""
        self._task = None
        if self._asked:
            self._start()

    async def _flush(self) -> None:
        count = 1 if len(self._asked) == 1 else fitting(payload_sizes(self._asked[: self.limit]))
        asked, futures = self._asked[:count], self._futures[:count]
        del self._asked[:count], self._futures[:count]
        try:
            got = await self.send(asked)
            if len(got) != len(asked):
                raise RuntimeError(f"{len(got)} answers to {len(asked)} calls")
        except PartlyFailed as partly:
            self._tell(futures, partly.answers)
        except Exception as error:  # noqa: BLE001 - passed to every caller of the batch
            self._tell(futures, [error] * len(futures))
        except BaseException:
            for future in futures:
                future.cancel()
            raise
        else:
            self._tell(futures, got)

    def _tell(self, futures: Sequence[asyncio.Future[Any]], answers: Sequence[object]) -> None:
        for future, answer in zip(futures, answers, strict=True):
            if future.done():
                continue
            if isinstance(answer, Pending):
                self._later(future, answer)
            elif isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)

    def _later(self, future: asyncio.Future[Any], answer: Pending[Any]) -> None:
        """Pass on a delayed answer when it arrives; the next batch does not wait for it."""
        self._waiting.add(answer)

        def told(answer: asyncio.Future[Any]) -> None:
            self._waiting.discard(answer)
            if answer.cancelled():
                future.cancel()
            else:
                self._tell([future], [answer.exception() or answer.result()])

        answer.add_done_callback(told)

    async def drain(self) -> None:
        """Wait until everything asked so far has been answered."""
        while self._task is not None:
            await asyncio.wait([self._task])
        if self._waiting:
            await asyncio.wait(self._waiting)


class Session:
    """The session of one event loop, the one it was made in. With an `actor`, or a caller from the context
    (`acting_as`), every change that took place is recorded under that name."""

    def __init__(self, store: Store, clock: Clock, actor: str | None, *, history: bool = False) -> None:
        self.store = store
        self.loop = asyncio.get_running_loop()
        self.recorder = Recorder(store)
        self.history = History(store, clock, write=history)
        self._clock = clock
        self._actor = actor
        parts = store.features.parts
        self._part_of = None if parts is None else parts.part_of
        self._gets: dict[int, Batcher[Ref, Record | None]] = {}
        self._adds: dict[int, Batcher[NewTask, Answer]] = {}
        self._changes: dict[int, Batcher[Change, Answer]] = {}
        self._own: Joined | None = None
        self.pause_gates: list[PauseGate] = []

    def within(self, joined: Joined) -> Session:
        """The session for verbs that join `joined`, wherever they are called."""
        session = copy(self)
        session._own = joined
        return session

    @property
    def verbs(self) -> Verbs:
        """The caller's open transaction on this store, else the store."""
        return self.joined() or self.store

    def joined(self) -> Joined | None:
        """The caller's open transaction, if any."""
        return self._own or joined_to(self.store)

    async def get(self, ref: Ref) -> Record | None:
        joined = self.joined()
        return (await joined.get([ref]))[0] if joined else await self._batcher(self._gets, ref, self.store.get).ask(ref)

    async def add(self, new: NewTask) -> Answer:
        joined = self.joined()
        if joined:
            return (await self.plural("schedule", joined.add([new], now=self._clock.now()), bulk=False))[0]
        return await self._noted("schedule", self._batcher(self._adds, new, self._add).ask(new))

    async def add_many(self, tasks: Sequence[NewTask]) -> list[Answer]:
        """Add tasks in one store call. Only replacements are recorded: new tasks would push all else out of the log."""
        answers = await self.plural("schedule", self.verbs.add(tasks, now=self._clock.now()))
        if not on_this_thread(self.store):
            self.history.scheduled(len(answers))
        return answers

    async def change(self, change: Change) -> Answer:
        joined = self.joined()
        if joined:
            return (await self.plural(verb_of(change), joined.change([change], now=self._clock.now()), bulk=False))[0]
        return await self._noted(verb_of(change), self._batcher(self._changes, change, self._change).ask(change))

    async def change_many(self, changes: Sequence[Change]) -> list[Answer]:
        """Make all `changes`, which are of one verb, in one store call."""
        verb = verb_of(changes[0]) if changes else ""
        return await self.plural(verb, self.verbs.change(changes, now=self._clock.now()))

    async def plural(self, verb: str, asked: Coroutine[Any, Any, Answers], *, bulk: bool = True) -> list[Answer]:
        """Record and return the answers to a batch, also to one that partly failed."""

        async def noted() -> list[Answer]:
            try:
                answers = await all_answers(await asked)
            except PartlyFailed as partly:
                await note([one for one in partly.answers if isinstance(one, Answer)])
                raise
            await note(answers)
            return answers

        async def note(answers: Sequence[Answer]) -> None:
            joined = self.joined()
            if joined is None:
                self.note(verb, answers, bulk=bulk)
            elif events := self._events(verb, answers, bulk=bulk):
                await joined.record(events)  # an error may mean that the whole transaction is gone

        return await noted() if current_caller() is None or self.joined() else await run_to_end(noted())

    async def _noted(self, verb: str, asked: asyncio.Future[Answer]) -> Answer:
        """Await and record an answer. If the context has a caller, record it even if the caller stops waiting."""
        if current_caller() is None:
            answer = await asked
            if self._actor is not None:
                self.note(verb, [answer])
            return answer

        def note(done: asyncio.Future[Answer]) -> None:
            if not done.cancelled() and done.exception() is None:
                self.note(verb, [done.result()])

        asked.add_done_callback(note)
        return await asyncio.shield(asked)

    def note(self, verb: str, answers: Sequence[Answer], *, bulk: bool = False) -> None:
        """Record the changes among `answers`, which are committed."""
        for event in self._events(verb, answers, bulk=bulk):
            self.recorder.note(event)

    def _events(self, verb: str, answers: Sequence[Answer], *, bulk: bool = False) -> list[Event]:
        """The changes among `answers` as the caller's, else as the actor's; with neither, none."""
        caller = current_caller()
        who = self._actor if caller is None else caller.who
        if who is None:
            return []
        if caller is not None and caller.on_change is not None and answers:
            caller.on_change(verb, answers, who)
        new_too = caller is None and not bulk
        now = self._clock.now()
        events: list[Event] = []
        for answer in answers:
            record = answer.record
            if record is not None and answer.result in _CHANGED and (new_too or answer.result is not Result.CREATED):
                what, wake_at = f"{verb}: {answer.result.value}", record.wake_at if record.state.live else None
                events.append(event_of(record, EventKind.CHANGE, now, who, what, was=answer.was, wake_at=wake_at))
        return events

    def _batcher(
        self,
        batchers: dict[int, Batcher[Named, Got]],
        asked: Named,
        send: Callable[[Sequence[Named]], Awaitable[Sequence[Got | Pending[Got]]]],
    ) -> Batcher[Named, Got]:
        """The batcher of the store's part that `asked` belongs to, so that no call waits for an unavailable part."""
        part = 0 if self._part_of is None else self._part_of(asked.topic, asked.key)
        batcher = batchers.get(part)
        if batcher is None:
            batcher = batchers[part] = Batcher(send)
        return batcher

    async def _add(self, batch: Sequence[NewTask]) -> Answers:
        answers = await self.store.add(batch, now=self._clock.now())
        self.history.scheduled(len(answers))
        return answers

    async def _change(self, batch: Sequence[Change]) -> Answers:
        return await self.store.change(batch, now=self._clock.now())

    async def close(self) -> None:
        """Wait for calls in progress, then close the store."""
        batchers: list[Batcher[Any, Any]] = [*self._adds.values(), *self._changes.values(), *self._gets.values()]
        try:
            for batcher in batchers:
                await batcher.drain()
            await self.history.close()
            await self.recorder.close()
        finally:
            await self.store.close()


def verb_of(change: Change) -> str:
    """The caller's word for `change`."""
    if type(change) is Move:
        return change.verb
    return "cancel" if type(change) is Cancel else "redrive"


class SharedSession:
    """The session of an open client in one event loop. The first `enter` opens it, the last `leave` closes it."""

    def __init__(self, begin: Callable[[], Coroutine[Any, Any, Session]]) -> None:
        self.session: Session | None = None
        self.entered = 0
        self._begin = begin
        self._opening: asyncio.Task[None] | None = None
        """The task that opens it; done once it is open."""
        self._closing: asyncio.Task[None] | None = None
        self._process = os.getpid()
        self._inherited: list[object] = []

    async def enter(self) -> None:
        """Open it if it is closed. Raises SetupError if it is open in another loop, and the errors of opening."""
        self._forget_the_parents()
        if self._opening is None:
            self._opening = asyncio.get_running_loop().create_task(self._open(self._closing), name="bide open")
        elif self._opening.get_loop() is not asyncio.get_running_loop():
            raise SetupError(_ELSEWHERE)
        self.entered += 1
        try:
            await asyncio.shield(self._opening)
        except BaseException:
            await self.leave()
            raise

    async def leave(self) -> None:
        """Close it if this is the last `leave`. Cancelling the caller does not stop that."""
        self._forget_the_parents()
        if self._opening is None:
            return
        if self._opening.get_loop() is not asyncio.get_running_loop():
            raise SetupError(_ELSEWHERE)
        self.entered -= 1
        if self.entered == 0:
            self._opening.cancel()  # it has finished, or no caller waits for it any more
            self._closing = asyncio.get_running_loop().create_task(self._close(self._opening), name="bide close")
            self._opening = None
            await asyncio.shield(self._closing)

    async def _open(self, closing: asyncio.Task[None] | None) -> None:
        if closing is not None and closing.get_loop() is asyncio.get_running_loop():
            await asyncio.wait([closing])  # it may be closing the same store
        self.session = await self._begin()

    async def _close(self, opening: asyncio.Task[None]) -> None:
        await asyncio.wait([opening])
        session, self.session = self.session, None
        if session is not None:
            await session.close()

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop in which it is open; None if it is closed."""
        self._forget_the_parents()
        return None if self.session is None else self.session.loop

    @property
    def closed(self) -> bool:
        """False while it opens, is open, or closes in a running event loop."""
        self._forget_the_parents()
        last = self._opening or self._closing
        return last is None or not last.get_loop().is_running() or (last is self._closing and last.done())

    def checked(self) -> Session:
        """The session. Raises NotOpen, and SetupError if another event loop runs in this thread."""
        self._forget_the_parents()
        if self.session is None:
            raise NotOpen(
                "not open: use `async with app:` around this, also in a forked child, or app.sync from synchronous code"
            )
        if running_loop() not in (None, self.session.loop):
            raise SetupError(_ELSEWHERE)
        return self.session

    def _forget_the_parents(self) -> None:
        """Close nothing but start afresh in a forked child, and keep the parent's objects from garbage collection."""
        if self._process != os.getpid():
            self._process = os.getpid()
            self._inherited += (self._opening, self._closing, self.session)
            self._opening = self._closing = self.session = None
            self.entered = 0
