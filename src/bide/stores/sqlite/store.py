"""The store on a SQLite file: each of the nine operations is handed to the thread that does it."""

from __future__ import annotations

import asyncio
import gc
import os
import sqlite3
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar, TypeVarTuple

from bide.core.answers import Answer
from bide.core.errors import StoreUnavailable
from bide.core.events import Event
from bide.core.instants import Millis
from bide.core.payloads import slices
from bide.core.records import Lease, Leased, NewTask, Ref, Tally, Topic
from bide.core.table_source import TableSource
from bide.ports import COUNTED, Features, Finding, OnTaken, OnWake
from bide.stores.sql.operations import rest_of
from bide.stores.sql.reading import tally_all
from bide.stores.sqlite import database, operations
from bide.stores.sqlite.commit_watch import Listener
from bide.stores.sqlite.database import VERSION, OpenFile, Settings, StoreFile, open_in_thread, version_of_file
from bide.stores.sqlite.operations import Fault, Verbs, Write
from bide.stores.sqlite.rows import tally_some
from bide.stores.sqlite.transactions import CallersConnection, JoinedVerbs
from bide.stores.sqlite.watched_table import SqliteTable

A = TypeVar("A")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")
_WRITES_FOR, _PAUSES_FOR = 0.016, 0.008
"""Seconds: a large call writes for so long, then lets others write, who try every 5 ms or less (`patiently`)."""


class SqliteStore(Verbs):
    """Tasks in a SQLite file, which may hold other tables too, and which several processes may share.

    `synchronous`: with "full" every acknowledged task survives a power cut; with "normal" a power cut may lose the
    newest, but commits are faster. `disk_reserve`: bytes of free disk space below which new tasks are refused. `watch`:
    how changes by other processes are noticed: "inotify", "poll", or "auto", the better available one. `fault`: for
    tests that kill the process.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        synchronous: str = "full",
        disk_reserve: int = 16 * 1024 * 1024,
        events_kept: int = 10_000,
        watch: str = "auto",
        fault: Fault | None = None,
    ) -> None:
        self._settings = Settings(
            path=os.fspath(path),
            synchronous=synchronous,
            disk_reserve=disk_reserve,
            events_kept=events_kept,
            watch=watch,
            fault=fault,
        )
        self._events_kept = events_kept
        self._database: OpenFile | None = None

    def __repr__(self) -> str:
        return f"<SqliteStore {self._settings.path} {'open' if self._database else 'closed'}>"

    async def add(self, tasks: Sequence[NewTask], *, now: Millis) -> list[Answer]:
        """In transactions of some thousand tasks or 1 MiB, with pauses in which other processes write."""
        parts, done = slices(tasks), 0
        if len(parts) <= 1:
            return await super().add(tasks, now=now)
        lock = self._open().transactions.shared.lock
        answers: list[Any] = [None] * len(tasks)
        gc.collect(0)  # else it visits each of the new tasks in the first transaction, while the file is locked
        wrote_since = time.monotonic()
        with rest_of(answers):
            for part in parts:
                restarts = lock.restarts
                answers[done : done + len(part)] = await super().add(part, now=now)
                done += len(part)
                if time.monotonic() - wrote_since > _WRITES_FOR:
                    await asyncio.sleep(_PAUSES_FOR)
                    if lock.restarts != restarts:  # one took that pause
                        await asyncio.sleep(_PAUSES_FOR)
                    wrote_since = time.monotonic()
        return answers

    @property
    def features(self) -> Features:
        return Features(
            wakes=self, workers=self, transactions=self, events=self, schema=self, diagnosis=self, tables=self
        )

    async def open(self) -> None:
        """Open the file; create it and its schema if missing. Raises StoreMismatch, StoreUnavailable, StoreCorrupt."""
        if self._database is None:
            self._database = await open_in_thread(self._settings)

    async def close(self) -> None:
        """Finish the operations under way, write the WAL back and close the file. A second close does nothing."""
        database, self._database = self._database, None
        if database is not None and database.process == os.getpid():
            try:
                await asyncio.to_thread(database.close)
            except RuntimeError:  # the interpreter is shutting down and starts no more threads
                database.close()

    def _open(self) -> OpenFile:
        database = self._database
        if database is None:
            raise StoreUnavailable(f"{self._settings.path}: the store is not open")
        if database.process != os.getpid():
            raise StoreUnavailable(
                f"{self._settings.path}: opened before a fork, and a connection must not cross one; "
                "open a new store in the child process"
            )
        return database

    # The nine operations of ports.Store, except those in `Verbs`

    async def _write(self, call: Write[A, T], asked: Sequence[A], now: Millis, *, adding: bool = False) -> list[T]:
        opened = self._open()
        if not asked:
            return []
        if adding:
            opened.reserve.check(asked)
        return await opened.writer.submit(call, asked, now, adding=adding)

    async def _read(self, call: Callable[[sqlite3.Cursor, *Ts], T], *arguments: *Ts) -> T:
        return await self._open().reader.submit(call, *arguments)

    async def tally(
        self, edges: Sequence[Millis] | None = None, *, upto: int = COUNTED, topics: Collection[Topic] | None = None
    ) -> Tally:
        return await tally_all(lambda after, most: self._read(tally_some, edges, upto, topics, after, most))

    async def lease(self, wants: Mapping[Topic, int], *, now: Millis, until: Millis, holder: str) -> Leased:
        return await self._open().writer.submit(operations.lease, wants, now, until, holder, durable=False)

    async def extend(self, leases: Sequence[Lease], *, now: Millis, until: Millis) -> list[bool]:
        writer = self._open().writer
        return await writer.submit(operations.extend, leases, until, durable=False) if leases else []

    async def purge(self, *, now: Millis, limit: int) -> int:
        return await self._open().writer.submit(operations.purge, now, limit)

    # features.wakes

    async def listen(self, topics: Collection[Topic], on_wake: OnWake, on_taken: OnTaken | None = None) -> Listener:
        """Call `on_wake` on the running loop when one of `topics` wakes earlier, whichever process caused it."""
        return self._open().notifier.listen(topics, on_wake, on_taken)

    # features.transactions

    def transaction(self) -> AbstractAsyncContextManager[JoinedVerbs]:
        """A transaction on the store's file, for tasks and for your own tables (`.connection`).

        Committed when the block ends without an error, else rolled back. While it is open no other connection can
        write, so keep it short. Inside, do not await verbs of the store itself, which would wait for this transaction:
        use the verbs of the object that the block yields.
        """
        return self._open().transactions.begin()

    def using(self, connection: object) -> JoinedVerbs:
        """The verbs on your own `sqlite3` connection to the store's file, in its current transaction.

        You commit. Raises BadInput for a connection of another library, or to another file.
        """
        return CallersConnection(connection, self._open().transactions)

    # features.tables

    def tables(self, source: TableSource, *, connections: int) -> Sequence[SqliteTable]:
        """Watched tables in the same file. Whatever `connections` says, a file has one writer at a time."""
        file = StoreFile(self._settings.path, self._open)
        return [SqliteTable(one, file) for one in source.each()]

    # features.schema

    async def schema_version(self) -> tuple[int, int]:
        """The versions of the file's schema (0: none) and of this code's. Works before `open`, and changes nothing."""
        return await asyncio.to_thread(version_of_file, self._settings.path), VERSION

    async def plan(self) -> list[str] | None:
        """None: `open` migrates."""
        return None

    async def migrate(self) -> None:
        """Migrate the file to this code's version, as `open` does."""
        if self._database is None:
            await self.open()
            await self.close()

    # features.diagnosis

    async def diagnose(self) -> list[Finding]:
        """Check the library, the file, its schema and its disk. Reads a file of up to 256 MiB completely."""
        return await self._read(database.diagnose, self._open().path, self._settings.disk_reserve)

    # features.workers

    async def announce(
        self, holder: str, topics: Collection[Topic], until: Millis, *, now: Millis
    ) -> dict[str, list[Topic]]:
        opened = self._open()
        live = await opened.writer.submit(operations.announce, holder, topics, until, now, durable=False)
        opened.notifier.others = len(live) > 1
        return live

    # features.events

    async def events(self, ref: Ref | None = None, *, limit: int = 100) -> list[Event]:
        return await self._read(operations.events, ref, limit, self._events_kept)
