"""The same verbs for synchronous code: Django, Flask, scripts, and plain-function handlers.

Calls go to the event loop in which the app is open, if there is one in another thread (a plain handler inside a
worker). Otherwise, at the first call, a loop is started in a background thread and the app's store opened there.
Thread-safe; after a fork the child opens its own.
"""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import functools
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Concatenate, ParamSpec, TypeVar

from bide.core.errors import SetupError
from bide.core.tasks import Task
from bide.engine.client import Client
from bide.engine.joined_client import SyncJoinedClient, found_here
from bide.engine.joining import run_here, stays_here

P = ParamSpec("P")
R = TypeVar("R")
_PAGE = 200


def _blocking(
    verb: Callable[Concatenate[Client, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[SyncClient, P], R]:
    """The blocking form of a client's verb: same name, arguments, answer and errors."""

    @functools.wraps(verb)
    def call(self: SyncClient, /, *args: P.args, **kwargs: P.kwargs) -> R:
        client, loop = self._ready()
        if stays_here(client.store):
            return run_here(verb(client, *args, **kwargs))
        return self._run(loop, verb(client, *args, **kwargs))

    return call


class SyncClient:
    """`app.sync`: blocks until the answer is there."""

    def __init__(self, own: Client, clone: Callable[[], Client]) -> None:
        self._own = own
        self._clone = clone
        self._lock = threading.Lock()
        self._client: Client | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._pid = 0

    schedule = _blocking(Client.schedule)
    schedule_many = _blocking(Client.schedule_many)
    reschedule = _blocking(Client.reschedule)
    reschedule_many = _blocking(Client.reschedule_many)
    fire_now = _blocking(Client.fire_now)
    fire_many = _blocking(Client.fire_many)
    cancel = _blocking(Client.cancel)
    cancel_many = _blocking(Client.cancel_many)
    cancel_group = _blocking(Client.cancel_group)
    shift = _blocking(Client.shift)
    redrive = _blocking(Client.redrive)
    redrive_many = _blocking(Client.redrive_many)
    pause = _blocking(Client.pause)
    resume = _blocking(Client.resume)
    paused = _blocking(Client.paused)
    get = _blocking(Client.get)
    get_many = _blocking(Client.get_many)
    tally = _blocking(Client.tally)
    events = _blocking(Client.events)

    def using(self, connection: object) -> SyncJoinedClient:
        """The verbs in the caller's own transaction on a synchronous `connection`, in this thread; the caller commits.

        `app.sync.using(connection).schedule(...)`, or `with app.sync.using(connection):` around verbs of `app.sync`.
        Raises BadInput, SetupError as `app.using` does, and SetupError for a connection that has to be awaited.
        """
        client, _ = self._ready()
        return SyncJoinedClient(client.using(connection))

    def find(self, **where: Any) -> Iterator[Task[Any]]:
        """Every task that matches; see `Client.find`."""
        client, loop = self._ready()
        if stays_here(client.store):
            yield from found_here(client, where)
            return
        tasks = client.find(**where)

        async def some() -> list[Task[Any]]:
            page: list[Task[Any]] = []
            async for task in tasks:
                page.append(task)
                if len(page) == _PAGE:
                    break
            return page

        while True:
            page = self._run(loop, some())
            yield from page
            if len(page) < _PAGE:
                return

    def close(self) -> None:
        """Close the background store and end its thread, if this process started one."""
        with self._lock:
            client, loop, thread = self._client, self._loop, self._thread
            self._client = self._loop = self._thread = None
        if client is None or loop is None or thread is None or self._pid != os.getpid():
            return
        atexit.unregister(self.close)
        asyncio.run_coroutine_threadsafe(client.close(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

    def _ready(self) -> tuple[Client, asyncio.AbstractEventLoop]:
        """The client to call and the loop it lives in; opened now if need be."""
        own_loop = self._own.open_in
        if own_loop is not None and own_loop.is_running():
            if _running_loop() is own_loop:
                raise SetupError("app.sync would block the event loop that must answer it; await the verb instead")
            return self._own, own_loop
        with self._lock:
            if self._client is None or self._loop is None or self._pid != os.getpid():
                self._start()
            assert self._client is not None
            assert self._loop is not None
            return self._client, self._loop

    def _start(self) -> None:
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, name="bide sync", daemon=True)
        thread.start()
        client = self._clone()
        try:
            asyncio.run_coroutine_threadsafe(client.open(), loop).result()
        except BaseException:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()
            raise
        self._client, self._loop, self._thread, self._pid = client, loop, thread, os.getpid()
        atexit.register(self.close)

    def _run(self, loop: asyncio.AbstractEventLoop, verb: Coroutine[Any, Any, R]) -> R:
        """Run `verb` on `loop` in a copy of this thread's context (an open transaction travels in it)."""
        context = contextvars.copy_context()

        async def within() -> R:
            return await asyncio.get_running_loop().create_task(verb, context=context)

        return asyncio.run_coroutine_threadsafe(within(), loop).result()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
