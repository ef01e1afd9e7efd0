"""The file that a watched table is in: that of an open store, or one that is nobody's store, opened for this alone."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol, TypeVar

from bide.core.errors import StoreUnavailable
from bide.ports import Joined
from bide.stores.sqlite.connection import OpenFile, connect, enter
from bide.stores.sqlite.database import Database
from bide.stores.sqlite.errors import translate
from bide.stores.sqlite.lanes import Lanes
from bide.stores.sqlite.libraries import refuse_others
from bide.stores.sqlite.listening import CommitListener
from bide.stores.sqlite.reader import Reader
from bide.stores.sqlite.room import Room
from bide.stores.sqlite.work import Work
from bide.stores.sqlite.writer import Writer

T = TypeVar("T")
_CHECKPOINT_PAGES = 1000


class File(Protocol):
    """The file that tables are in, open while one of them, a `user`, is."""

    path: str

    async def open(self, user: object) -> None: ...
    async def close(self, user: object) -> None: ...
    async def read(self, call: Callable[[sqlite3.Cursor], T]) -> T: ...
    async def write(self, call: Callable[[Work], T], *, adding: bool) -> T: ...
    def transaction(self) -> AbstractAsyncContextManager[Joined]: ...
    def listen(self, heard: Callable[[], None]) -> Callable[[], None] | None: ...


class TableFile:
    """A SQLite file that is nobody's store: opened for its own tables. Raises StoreUnavailable."""

    def __init__(self, path: str, *, synchronous: str = "full") -> None:
        self.path = os.path.abspath(path)
        self._synchronous = synchronous
        self._users: set[object] = set()
        self._turn = asyncio.Lock()
        self._entered: OpenFile | None = None
        self._connections: list[sqlite3.Connection] = []
        self._reader: Reader | None = None
        self._writer: Writer | None = None
        self._lanes: Lanes | None = None

    async def open(self, user: object) -> None:
        async with self._turn:
            if not self._users:
                await asyncio.to_thread(self._open)
            self._users.add(user)

    def _open(self) -> None:
        if not os.path.exists(self.path):
            raise StoreUnavailable(f"{self.path}: there is no such file; a table to be watched has to be there first")
        refuse_others(self.path)
        try:
            reading, writing = (self._connect() for _ in range(2))
            status = os.stat(self.path)
            identity = (os.getpid(), status.st_dev, status.st_ino)
            self._entered = enter(identity, self.path, {"synchronous": self._synchronous})
            lock = self._entered.lock
            self._reader = Reader(self.path, reading)
            self._writer = Writer(
                self.path, writing, lock, synchronous=self._synchronous.upper(), fault=None,
                tell=lambda wakes: None, need_stop=lambda changes: False,
            )  # fmt: skip
            self._lanes = Lanes(self.path, self._synchronous, lock, Room(self.path, 0), None, lambda *_: None)
        except Exception as error:
            self._close()
            raise translate(error, self.path, own=False) from error

    def _connect(self) -> sqlite3.Connection:
        connection = connect(self.path)
        self._connections.append(connection)
        _write_back(connection)
        return connection

    async def close(self, user: object) -> None:
        async with self._turn:
            self._users.discard(user)
            if not self._users:
                await asyncio.to_thread(self._close)

    def _close(self) -> None:
        if self._lanes is not None:
            self._lanes.close()
        if self._writer is not None:
            self._writer.stop()
        if self._reader is not None:
            self._reader.stop()
        for connection in self._connections:
            connection.close()
        if self._entered is not None:
            self._entered.leave()
        self._connections = []
        self._lanes = self._reader = self._writer = self._entered = None

    async def read(self, call: Callable[[sqlite3.Cursor], T]) -> T:
        if self._reader is None:
            raise StoreUnavailable(f"{self.path}: not open")
        return await self._reader.submit(call)

    async def write(self, call: Callable[[Work], T], *, adding: bool) -> T:
        if self._writer is None:
            raise StoreUnavailable(f"{self.path}: not open")
        return await self._writer.submit(call, durable=True, adding=adding)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Joined]:
        if self._lanes is None:
            raise StoreUnavailable(f"{self.path}: not open")
        async with self._lanes.transaction() as joined:
            _write_back(joined.connection)
            yield joined

    def listen(self, heard: Callable[[], None]) -> None:
        """Nobody tells."""


class StoreFile:
    """The file of an open store."""

    def __init__(self, path: str, opened: Callable[[], Database]) -> None:
        self.path = path
        self._opened = opened

    async def open(self, user: object) -> None:
        self._opened()

    async def close(self, user: object) -> None:
        """It is the store's."""

    async def read(self, call: Callable[[sqlite3.Cursor], T]) -> T:
        return await self._opened().reader.submit(call)

    async def write(self, call: Callable[[Work], T], *, adding: bool) -> T:
        database = self._opened()
        if adding:
            database.room.check()
        return await database.writer.submit(call, durable=True, adding=adding)

    def transaction(self) -> AbstractAsyncContextManager[Joined]:
        return self._opened().lanes.transaction()

    def listen(self, heard: Callable[[], None]) -> Callable[[], None]:
        database = self._opened()
        listener = CommitListener(heard, database.stop_listening)
        database.start_listening(listener)
        return listener.end


def _write_back(connection: sqlite3.Connection) -> None:
    """Where a store is open its checkpointer writes the log back; else each commit past a size does."""
    connection.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
