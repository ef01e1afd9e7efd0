"""The verbs for synchronous code: Django, Flask, scripts, and plain-function handlers.

If the app is open in an event loop of another thread (as for a plain handler inside a worker), calls go to that loop.
Otherwise the first call starts a loop in a background thread and opens the app's store there. Thread-safe; after a fork
the child opens its own. A call made while another thread closes waits, and opens the store again.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import functools
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, Concatenate, ParamSpec, Protocol, Self, TypeVar

from bide.core.errors import OutcomeUnknown, SetupError, StoreUnavailable
from bide.core.instants import Millis, When
from bide.core.records import NewTask
from bide.core.tasks import Task
from bide.engine.client import Client, JoinedClient
from bide.engine.recurring import Recurring, is_recurring
from bide.engine.session import on_this_thread, run_on_this_thread, running_loop
from bide.engine.verbs import ClientVerbs, Pages, filter_of

P = ParamSpec("P")
R = TypeVar("R")
Of = TypeVar("Of")
Of_co = TypeVar("Of_co", covariant=True)
_LOOK = 1.0
"""Seconds after which a waiting call checks that the loop it waits for still runs."""
_MOMENT, _LONGEST_WAIT = 0.005, 60.0
"""Seconds after which a call looks again whether the app has opened, or closed, in its loop; and after which it fails.
It may itself be in the way: if it runs in the loop's default threads, which also look up the names of servers."""


class _Runs(Protocol[Of_co]):
    def _run(self, verb: Callable[[Of_co], Coroutine[Any, Any, R]], /) -> R: ...


def _blocking(
    verb: Callable[Concatenate[Of, P], Coroutine[Any, Any, R]], run: str = "_run"
) -> Callable[Concatenate[_Runs[Of], P], R]:
    """The blocking form of a verb, with the same name, arguments, answer and errors."""

    @functools.wraps(verb)
    def call(self: _Runs[Of], /, *args: P.args, **kwargs: P.kwargs) -> R:
        answer: R = getattr(self, run)(lambda one: verb(one, *args, **kwargs))
        return answer

    return call


class SyncRecurring:
    """The blocking verbs of recurring tasks, with the arguments, answers and errors of those in `Recurring`."""

    def __init__(self, verbs: SyncVerbs) -> None:
        self._verbs = verbs

    def _run(self, verb: Callable[[Recurring], Coroutine[Any, Any, R]], /) -> R:
        return self._verbs._run(lambda client: verb(Recurring(client)))

    add = _blocking(Recurring.add)
    add_many = _blocking(Recurring.add_many)
    pause = _blocking(Recurring.pause)
    resume = _blocking(Recurring.resume)
    skip_next = _blocking(Recurring.skip_next)
    run_now = _blocking(Recurring.run_now)
    backfill = _blocking(Recurring.backfill)
    next = _blocking(Recurring.next)
    remove = _blocking(Recurring.remove)
    replan = _blocking(Recurring.replan)

    def find(self, topic: str | None = None, *, group: str | None = None) -> Iterator[Task[Any]]:
        """See `Recurring.find`."""
        return filter(is_recurring, self._verbs.find(topic=topic, group=group))


class SyncVerbs(ABC):
    """The blocking verbs, with the arguments, answers and errors of the verbs of the same name in `ClientVerbs`."""

    @abstractmethod
    def _run(self, verb: Callable[[ClientVerbs], Coroutine[Any, Any, R]], /) -> R:
        """Call `verb` with a client and wait for its answer. Raises its errors, and SetupError in a running loop."""

    @property
    def recurring(self) -> SyncRecurring:
        """The verbs of recurring tasks."""
        return SyncRecurring(self)

    schedule = _blocking(ClientVerbs.schedule)
    schedule_new = _blocking(ClientVerbs.schedule_new)
    schedule_many = _blocking(ClientVerbs.schedule_many)
    reschedule = _blocking(ClientVerbs.reschedule)
    reschedule_many = _blocking(ClientVerbs.reschedule_many)
    fire_now = _blocking(ClientVerbs.fire_now)
    fire_many = _blocking(ClientVerbs.fire_many)
    cancel = _blocking(ClientVerbs.cancel)
    cancel_many = _blocking(ClientVerbs.cancel_many)
    cancel_group = _blocking(ClientVerbs.cancel_group)
    shift = _blocking(ClientVerbs.shift)
    redrive = _blocking(ClientVerbs.redrive)
    redrive_many = _blocking(ClientVerbs.redrive_many)
    pause = _blocking(ClientVerbs.pause)
    resume = _blocking(ClientVerbs.resume)
    paused = _blocking(ClientVerbs.paused)
    get = _blocking(ClientVerbs.get)
    get_many = _blocking(ClientVerbs.get_many)
    find_page = _blocking(ClientVerbs.find_page)

    def find(
        self,
        *,
        topic: str | None = None,
        state: str | None = None,
        group: str | None = None,
        wake_from: When | None = None,
        wake_before: When | None = None,
        page: int = 500,
    ) -> Iterator[Task[Any]]:
        """All matching tasks; see `ClientVerbs.find`."""
        where = filter_of(topic, state, group, wake_from, wake_before, now=lambda: self._run(_now))
        pages = Pages(where, page)
        while not pages.over:
            yield from map(Task, self._run(pages.read))


async def _now(client: ClientVerbs) -> Millis:
    return client.clock.now()


class _NotNow(Exception):
    """Nothing was done, since the app opened or closed in a loop just then."""


def _run_on(
    loop: asyncio.AbstractEventLoop, client: Client, verb: Callable[[ClientVerbs], Coroutine[Any, Any, R]]
) -> R:
    """Run `verb` on `loop` in a copy of this thread's context, which carries any open transaction. Raises _NotNow."""

    async def run() -> R:
        if client.open_in is not loop:
            raise _NotNow
        return await verb(client)

    waited = run()
    try:
        answer = asyncio.run_coroutine_threadsafe(waited, loop)  # it copies the context
    except RuntimeError:
        waited.close()
        raise _NotNow from None
    while not concurrent.futures.wait([answer], _LOOK).done and loop.is_running():
        pass
    if not answer.done() or answer.cancelled():
        raise OutcomeUnknown("the event loop that was to answer has ended")
    return answer.result()


class _LoopThread:
    """An event loop in a background thread of this process, with a client that the first call opens."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._calls = 0
        self._closing = False
        self._client: Client | None = None

    @contextmanager
    def call(self, own: Client, clone: Callable[[], Client]) -> Iterator[tuple[Client, asyncio.AbstractEventLoop]]:
        """The open client and its loop. Opens the client if needed, and keeps it open inside the `with` block.

        Raises _NotNow while `own`, whose store may be the same object, is not closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._closing)
            if not own.closed:
                raise _NotNow
            if self._client is None:
                self._open(clone())
            assert self._client is not None
            client = self._client
            self._calls += 1
        try:
            yield client, self._loop
        finally:
            with self._changed:
                self._calls -= 1
                self._changed.notify_all()

    def _open(self, client: Client) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="bide sync", daemon=True)
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(client.open(), self._loop).result()
        except BaseException:
            self._stop(client)
            raise
        self._client = client
        atexit.register(self.close)

    def close(self) -> None:
        """Wait for calls in progress, then close. Does nothing in a forked child, which inherits the `atexit`."""
        if self._process != os.getpid():
            return
        with self._changed:
            self._changed.wait_for(lambda: not self._closing)
            if self._client is None:
                return
            atexit.unregister(self.close)
            self._closing = True
            self._changed.wait_for(lambda: self._calls == 0)
        try:
            self._stop(self._client)
        finally:
            with self._changed:
                self._client, self._closing = None, False
                self._changed.notify_all()

    def _stop(self, client: Client) -> None:
        """Close the client, whose opening a KeyboardInterrupt may have left under way, and end the thread."""
        asyncio.run_coroutine_threadsafe(client.close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class SyncClient(SyncVerbs):
    """`app.sync`: the verbs as blocking calls. Raises SetupError inside a running event loop."""

    def __init__(self, own: Client, clone: Callable[[], Client]) -> None:
        self._own = own
        self._clone = clone
        self._threads: dict[int, _LoopThread] = {}
        """Keyed by process id. A forked child must not use its parent's, whose locks may never be released."""

    tally = _blocking(ClientVerbs.tally, "_run_on_loop")
    events = _blocking(ClientVerbs.events, "_run_on_loop")

    def _run(self, verb: Callable[[ClientVerbs], Coroutine[Any, Any, R]], /) -> R:
        def run(client: Client, loop: asyncio.AbstractEventLoop) -> R:
            if on_this_thread(client.store):
                return run_on_this_thread(verb(client))
            return _run_on(loop, client, verb)

        return self._called(run)

    def _run_on_loop(self, verb: Callable[[ClientVerbs], Coroutine[Any, Any, R]], /) -> R:
        """For a verb that joins no transaction, also within a block of `using`."""
        return self._called(lambda client, loop: _run_on(loop, client, verb))

    def _called(self, work: Callable[[Client, asyncio.AbstractEventLoop], R]) -> R:
        """Do `work` with the client to call and its loop, once the app has opened or closed if it is about to."""
        if running_loop() is not None:
            raise SetupError("app.sync would block the event loop that runs here; await the verb instead")
        ends = time.monotonic() + _LONGEST_WAIT
        while time.monotonic() < ends:
            own_loop = self._own.open_in
            with suppress(_NotNow):
                if own_loop is not None and own_loop.is_running():
                    return work(self._own, own_loop)
                thread = self._threads.get(os.getpid()) or self._threads.setdefault(os.getpid(), _LoopThread())
                with thread.call(self._own, self._clone) as (client, loop):
                    client.config, client.carrier = self._own.config, self._own.carrier  # a later handler changed them
                    return work(client, loop)
            time.sleep(_MOMENT)
        raise StoreUnavailable(f"the app opened or closed in its event loop for {_LONGEST_WAIT:g} s; nothing was done")

    def using(self, connection: object) -> SyncJoinedClient:
        """The verbs in the caller's own transaction on a synchronous `connection`, in this thread; the caller commits.

        `app.sync.using(connection).schedule(...)`, or `with app.sync.using(connection):` around verbs of `app.sync`.
        Raises BadInput, SetupError as `app.using` does, and SetupError for a connection that has to be awaited.
        """
        return self._called(lambda client, _: SyncJoinedClient(client.using(connection)))

    def close(self) -> None:
        """Wait for calls in progress, then close the background store and end its thread, if this process has one.

        The next call opens both again.
        """
        thread = self._threads.get(os.getpid())
        if thread is not None:
            thread.close()

    async def give_way(self) -> None:
        """Close the background store before the app opens the same one, which may be an object, in its own loop."""
        if os.getpid() in self._threads:
            # not in the loop's default threads, where calls of app.sync may wait for the app to open
            await asyncio.get_running_loop().run_in_executor(ThreadPoolExecutor(1), self.close)


class SyncJoinedClient(SyncVerbs):
    """The verbs on the caller's synchronous connection; each runs in the thread that calls it.

    As `with app.sync.using(connection):` it applies to every verb of `app.sync` within the block.
    """

    def __init__(self, client: JoinedClient) -> None:
        self._client = client

    def _run(self, verb: Callable[[ClientVerbs], Coroutine[Any, Any, R]], /) -> R:
        with self:
            return run_on_this_thread(verb(self._client))

    def new(self, topic: str, payload: object = None, **options: Any) -> NewTask:
        """See `ClientVerbs.new`."""
        return self._client.new(topic, payload, **options)

    def __enter__(self) -> Self:
        self._client.enter(here=True)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._client.leave()
