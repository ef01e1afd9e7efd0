"""The one thread that reads, on a connection of its own: in WAL mode it waits for no writer, and no writer for it."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

from bide.core.errors import StoreUnavailable
from bide.stores.sqlite.errors import translate

T = TypeVar("T")


class Reader:
    """Owns a connection that cannot write. `submit` may be called from any event loop."""

    def __init__(self, path: str, connection: sqlite3.Connection) -> None:
        self._path = path
        self._connection = connection
        connection.execute("PRAGMA query_only = ON")
        self._queue: SimpleQueue[tuple[Callable[[sqlite3.Cursor], Any], asyncio.Future[Any]] | None] = SimpleQueue()
        self._closed = False
        self._gate = threading.Lock()
        """So that nothing is put behind the end of the queue, where nobody would take it."""
        self._thread = threading.Thread(target=self._run, name=f"bide reader of {path}", daemon=True)
        self._thread.start()

    async def submit(self, call: Callable[[sqlite3.Cursor], T]) -> T:
        """Run `call` in one read transaction: it sees one state of the file."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        with self._gate:
            if self._closed:
                raise StoreUnavailable(f"{self._path}: the store is closed")
            self._queue.put((call, future))
        result: T = await future
        return result

    def stop(self) -> None:
        """Finish what was submitted, then end the thread. Blocks; a second call does nothing."""
        with self._gate:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (asked := self._queue.get()) is not None:
            call, future = asked
            result, error = self._read(call)
            try:
                future.get_loop().call_soon_threadsafe(_resolve, future, result, error)
            except RuntimeError:  # the loop has been closed: nobody waits any more
                continue

    def _read(self, call: Callable[[sqlite3.Cursor], T]) -> tuple[T | None, Exception | None]:
        cursor = self._connection.cursor()
        try:
            if self._connection.in_transaction:  # it could not be rolled back
                cursor.execute("ROLLBACK")
            cursor.execute("BEGIN")
            try:
                return call(cursor), None
            finally:
                cursor.execute("ROLLBACK")
        except Exception as error:  # noqa: BLE001 - it belongs to whoever asked
            return None, translate(error, self._path)


def _resolve(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
