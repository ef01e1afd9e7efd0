"""The store on a SQLite file: the nine operations, each a hop to the thread that does it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import TypeVar

from bide.core.answers import Answer
from bide.core.errors import StoreUnavailable
from bide.core.events import Event
from bide.core.instants import Millis
from bide.core.records import (
    Change,
    Filter,
    Found,
    Lease,
    Leased,
    NewTask,
    Page,
    Record,
    Ref,
    Settlement,
    Tally,
    Topic,
)
from bide.core.table_source import TableSource
from bide.ports import COUNTED, Finding
from bide.stores.sqlite import diagnosis, journal, operations, reading, schema
from bide.stores.sqlite.database import Database, Settings, version_of_file
from bide.stores.sqlite.joined import JoinedVerbs
from bide.stores.sqlite.listening import Listener
from bide.stores.sqlite.table import SqliteTable
from bide.stores.sqlite.table_file import StoreFile
from bide.stores.sqlite.work import Fault, Work

T = TypeVar("T")
DISK_RESERVE = 16 * 1024 * 1024
EVENTS_KEPT = 10_000


class SqliteStore:
    """Tasks in a SQLite file, which may hold other tables too and be shared by several processes.

    `synchronous` "full" makes every acknowledged task survive a power cut; "normal" leaves the newest of them to one,
    and is quicker. `disk_reserve` is the bytes of free disk below which new tasks are refused. `watch` is how changes
    by other processes are noticed: "inotify", "poll", or "auto", the better one that there is. `fault` is for tests
    that kill the process.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        synchronous: str = "full",
        disk_reserve: int = DISK_RESERVE,
        events_kept: int = EVENTS_KEPT,
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
        self._database: Database | None = None

    def __repr__(self) -> str:
        return f"<SqliteStore {self._settings.path} {'open' if self._database else 'closed'}>"

    async def open(self) -> None:
        """Open the file; create it and its schema if need be. Raises StoreMismatch, StoreUnavailable, StoreCorrupt."""
        if self._database is None:
            opening = asyncio.get_running_loop().run_in_executor(None, Database, self._settings)
            try:
                self._database = await asyncio.shield(opening)
            except asyncio.CancelledError:
                opening.add_done_callback(_close_unwanted)
                raise

    async def close(self) -> None:
        """Finish what was begun, write the WAL back and let go of the file. A second close does nothing."""
        database, self._database = self._database, None
        if database is not None and database.ours:
            try:
                await asyncio.to_thread(database.close)
            except RuntimeError:  # the interpreter is on its way out and starts no more threads
                database.close()

    def _open(self) -> Database:
        database = self._database
        if database is None:
            raise StoreUnavailable(f"{self._settings.path}: the store is not open")
        if not database.ours:
            raise StoreUnavailable(
                f"{self._settings.path}: opened before a fork, and a connection must not cross one; "
                "open a new store in the child process"
            )
        return database

    async def _write(self, call: Callable[[Work], T], *, durable: bool = True, adding: bool = False) -> T:
        return await self._open().writer.submit(call, durable=durable, adding=adding)

    # The nine operations of ports.Store

    async def add(self, tasks: Sequence[NewTask], *, now: Millis) -> list[Answer]:
        database = self._open()
        if not tasks:
            return []
        database.room.check(tasks)
        return await self._write(partial(operations.add, tasks=tasks, now=now), adding=True)

    async def change(self, changes: Sequence[Change], *, now: Millis) -> list[Answer]:
        self._open()
        if not changes:
            return []
        return await self._write(partial(operations.change, changes=changes, now=now))

    async def get(self, refs: Sequence[Ref]) -> list[Record | None]:
        return await self._open().reader.submit(partial(reading.get, refs=refs))

    async def find(self, where: Filter, page: Page) -> Found:
        return await self._open().reader.submit(partial(reading.find, where=where, page=page))

    async def tally(
        self, edges: Sequence[Millis] | None = None, *, upto: int = COUNTED, topics: Collection[Topic] | None = None
    ) -> Tally:
        return await self._open().reader.submit(partial(reading.tally, edges=edges, upto=upto, only=topics))

    async def lease(self, wants: Mapping[Topic, int], *, now: Millis, until: Millis, holder: str) -> Leased:
        call = partial(operations.lease, wants=wants, now=now, until=until, holder=holder)
        return await self._write(call, durable=False)

    async def extend(self, leases: Sequence[Lease], *, now: Millis, until: Millis) -> list[bool]:
        self._open()
        if not leases:
            return []
        return await self._write(partial(operations.extend, leases=leases, now=now, until=until), durable=False)

    async def settle(self, outcomes: Sequence[Settlement], *, now: Millis) -> list[bool]:
        self._open()
        if not outcomes:
            return []
        return await self._write(partial(operations.settle, outcomes=outcomes, now=now))

    async def purge(self, *, now: Millis, limit: int) -> int:
        return await self._write(partial(operations.purge, now=now, limit=limit))

    # Notifies

    async def listen(self, topics: Collection[Topic], heard: Callable[[Topic, Millis], None]) -> Listener:
        """Be told, on the running loop, when one of `topics` wakes earlier, whichever process made it so."""
        database = self._open()
        listener = Listener(topics, heard, database.stop_listening)
        database.start_listening(listener)
        return listener

    # JoinsTransaction

    def transaction(self) -> AbstractAsyncContextManager[JoinedVerbs]:
        """A transaction on the store's file, for tasks and for your own tables (`.connection`).

        Committed on leaving without an error, else rolled back. While it is open nobody else can write, so be short;
        and nothing but the verbs of what it yields may be awaited on this store inside: that would wait for it.
        """
        return self._open().lanes.transaction()

    def using(self, connection: object) -> JoinedVerbs:
        """The verbs on your own `sqlite3` connection to the store's file, in the transaction that it is in.

        You commit. Raises BadInput for a connection of another library, or to another file.
        """
        return self._open().using(connection)

    # WatchesTables

    def tables(self, source: TableSource, *, connections: int) -> Sequence[SqliteTable]:
        """Tables of the same file. One transaction at a time: whatever `connections` says, a file has one writer."""
        file = StoreFile(self._settings.path, self._open)
        return [SqliteTable(one, file, stores_own=True) for one in source.each()]

    # HasSchema

    async def schema_version(self) -> tuple[int, int]:
        """What the file has (0: nothing), and what this code wants. Also before `open`, without changing anything."""
        return await asyncio.to_thread(version_of_file, self._settings), schema.VERSION

    async def plan(self) -> list[str] | None:
        """None: `open` migrates."""
        return None

    async def migrate(self) -> None:
        """Bring the file to the version that this code wants. So does `open`."""
        if self._database is None:
            await self.open()
            await self.close()

    # Diagnoses

    async def diagnose(self) -> list[Finding]:
        """Look at the library, the file, its schema and its disk. Reads through files up to 256 MiB."""
        database = self._open()
        call = partial(diagnosis.diagnose, path=database.path, reserve=self._settings.disk_reserve)
        return await database.reader.submit(call)

    # Shares

    async def announce(
        self, holder: str, topics: Collection[Topic], until: Millis, *, now: Millis
    ) -> dict[str, list[Topic]]:
        call = partial(journal.announce, holder=holder, topics=topics, until=until, now=now)
        return await self._write(call, durable=False)

    # KeepsEvents

    async def record(self, events: Sequence[Event]) -> None:
        if events:
            await self._write(partial(journal.record, events=events, kept=self._settings.events_kept))

    async def events(self, ref: Ref | None = None, *, limit: int = 100) -> list[Event]:
        kept = self._settings.events_kept
        return await self._open().reader.submit(partial(journal.events, ref=ref, limit=limit, kept=kept))


def _close_unwanted(opening: asyncio.Future[Database]) -> None:
    """What was still being opened when its caller was cancelled."""
    if opening.cancelled() or opening.exception() is not None:
        return
    try:
        opening.get_loop().run_in_executor(None, opening.result().close)
    except RuntimeError:  # the loop is on its way out and starts no more threads
        opening.result().close()
