"""An open file: its connections, the threads that own them, and how they come and go."""

from __future__ import annotations

import os
import sqlite3
import threading
from contextlib import closing

from msgspec import Struct

from bide.core.errors import BadInput, StoreUnavailable
from bide.stores.sqlite import schema
from bide.stores.sqlite.checkpoint import Checkpointer
from bide.stores.sqlite.connection import OpenFile, connect, create_private, enter, patiently
from bide.stores.sqlite.errors import translate
from bide.stores.sqlite.joined import CallersConnection
from bide.stores.sqlite.lanes import JoinedTransaction, Lanes
from bide.stores.sqlite.libraries import refuse_others
from bide.stores.sqlite.listening import Listener, Listeners
from bide.stores.sqlite.reader import Reader
from bide.stores.sqlite.room import Room
from bide.stores.sqlite.watch import Watcher
from bide.stores.sqlite.work import Fault
from bide.stores.sqlite.writer import Writer

WRITER_CACHE_KIB = 8 * 1024
READER_CACHE_KIB = 2 * 1024
CHECKPOINT_CACHE_KIB = 64


class Settings(Struct, frozen=True, kw_only=True):
    """How a file is to be opened; checked here, once."""

    path: str
    synchronous: str
    disk_reserve: int
    events_kept: int
    watch: str
    fault: Fault | None

    def __post_init__(self) -> None:
        if not self.path or self.path.startswith(":memory:") or self.path.startswith("file:"):
            raise BadInput("path", self.path, "the path of a file; for tasks that need not survive, use memory:")
        if self.synchronous not in {"full", "normal"}:
            raise BadInput("synchronous", self.synchronous, '"full" or "normal"')
        if self.watch not in {"auto", "inotify", "poll"}:
            raise BadInput("watch", self.watch, '"auto", "inotify" or "poll"')
        if self.disk_reserve < 0:
            raise BadInput("disk_reserve", self.disk_reserve, "a number of bytes, 0 or more")
        if self.events_kept < 0:
            raise BadInput("events_kept", self.events_kept, "a number of events, 0 or more")


class Database:
    """Everything that is there between open and close. Constructing it opens the file, and blocks."""

    def __init__(self, settings: Settings) -> None:
        self.path = os.path.abspath(settings.path)
        self._process = os.getpid()
        self._connections: list[sqlite3.Connection] = []
        self._file: OpenFile | None = None
        self.listeners = Listeners()
        self._listening = threading.Lock()
        self._watch = settings.watch
        self._watcher: Watcher | None = None
        self._ended_watchers: list[Watcher] = []
        self.room = Room(self.path, settings.disk_reserve)
        try:
            self._open(settings)
        except Exception as error:
            for connection in self._connections:
                connection.close()
            self._leave()
            raise translate(error, self.path) from error

    def _open(self, settings: Settings) -> None:
        folder = os.path.dirname(self.path)
        if not os.path.isdir(folder):
            raise StoreUnavailable(f"{self.path}: the folder {folder} does not exist; create it first")
        refuse_others(self.path)
        create_private(self.path)
        writing = self._connect(WRITER_CACHE_KIB)
        mode = patiently(writing, "PRAGMA journal_mode = WAL")[0]
        if mode != "wal":
            raise StoreUnavailable(
                f"{self.path}: SQLite cannot keep a write-ahead log there (it says {mode!r}); use a local disk"
            )
        status = os.stat(self.path)
        self.room.identity = status.st_dev, status.st_ino
        identity = (self._process, status.st_dev, status.st_ino)
        self._file = enter(identity, self.path, {"synchronous": settings.synchronous})
        lock = self._file.lock
        schema.prepare(writing, self.path)
        writing.execute("PRAGMA busy_timeout = 0")  # from here on the waiting is ours: see `patiently`
        reading = self._connect(READER_CACHE_KIB)
        self.reader = Reader(self.path, reading)
        self.checkpointer = Checkpointer(self.path, self._connect(CHECKPOINT_CACHE_KIB), lock)
        self.writer = Writer(
            self.path,
            writing,
            lock,
            synchronous=settings.synchronous.upper(),
            fault=settings.fault,
            tell=self.listeners.tell,
            need_stop=self.checkpointer.committed,
        )
        self.lanes = Lanes(
            self.path, settings.synchronous, lock, self.room, settings.fault, self._transaction_committed
        )
        self._fault = settings.fault

    def using(self, connection: object) -> CallersConnection:
        """The verbs on the caller's connection. Raises BadInput for one that cannot be joined."""
        return CallersConnection(connection, self.path, self.room, self._fault)

    def _transaction_committed(self, joined: JoinedTransaction, changes: int) -> None:
        self.checkpointer.others_committed(changes)
        if joined.wakes:
            self.listeners.tell(joined.wakes)

    def _connect(self, cache_kib: int) -> sqlite3.Connection:
        connection = connect(self.path, cache_kib=cache_kib)
        self._connections.append(connection)
        return connection

    @property
    def ours(self) -> bool:
        """Whether this process opened it: after a fork the child must not touch the parent's connections."""
        return os.getpid() == self._process

    def _leave(self) -> None:
        if self._file is not None:
            self._file.leave()
            self._file = None

    def close(self) -> None:
        """Let the threads finish, then close the connections. Blocks."""
        with self._listening:
            self._end_watcher()
            watchers, self._ended_watchers = self._ended_watchers, []
        for watcher in watchers:
            watcher.join()
        self.lanes.close()
        self.writer.stop()
        self.reader.stop()
        self.checkpointer.stop()
        for connection in self._connections:
            connection.close()
        self._leave()

    def start_listening(self, listener: Listener) -> None:
        """Tell `listener` from now on; the first one starts the watcher."""
        with self._listening:
            self.listeners.add(listener)
            self.writer.listening = True
            if self._watcher is None:
                self._watcher = Watcher(self.path, self._watch, self.listeners, self.writer.foreign_version)

    def stop_listening(self, listener: Listener) -> None:
        """Tell `listener` no more; the last one ends the watcher, which then goes by itself."""
        with self._listening:
            self.listeners.remove(listener)
            if not self.listeners:
                self.writer.listening = False
                self._end_watcher()

    def _end_watcher(self) -> None:
        if self._watcher is not None:
            self._watcher.stop()
            self._ended_watchers = [one for one in self._ended_watchers if one.alive]
            self._ended_watchers.append(self._watcher)
            self._watcher = None


def version_of_file(settings: Settings) -> int:
    """The schema's version in a file that need not be open, and is not made by asking."""
    path = os.path.abspath(settings.path)
    if not os.path.exists(path):
        return 0
    try:
        refuse_others(path)
        with closing(connect(path, cache_kib=READER_CACHE_KIB)) as connection:
            connection.execute("PRAGMA query_only = ON")
            return schema.found_version(connection)
    except Exception as error:
        raise translate(error, path) from error
