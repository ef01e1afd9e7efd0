"""The store on MySQL and MariaDB: one row per task, in the same database as your own tables.

**The cost**: scheduling and plain Done are one packet and one round trip per batch. Leasing takes two round trips, or
one read-only packet if nothing is due. A call that has to read a task first (moving, cancelling, a conflict, Retry) is
one transaction of two round trips. A process has a connection for each kind of call, opened when first used.

MySQL has no notifications. But each write moves the position of the redo log, which workers read every `POLL` (or they
poll for tasks). For tasks that it has seen, or that its own process has written, a worker wakes up exactly on time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence
from functools import partial
from itertools import filterfalse
from typing import Any

from asyncmy.errors import MySQLError

from bide.core.errors import StoreError, StoreUnavailable
from bide.core.instants import Millis
from bide.core.payloads import slices
from bide.core.records import NewTask, Topic
from bide.ports import Finding, Listening, OnTaken, OnWake
from bide.stores.batches import Conflicts, Named
from bide.stores.mysql import operations
from bide.stores.mysql.connection import MYSQL, Address, Call, MySqlConnection, meaning
from bide.stores.mysql.joined import MySqlVerbs, Transactions, identity_of
from bide.stores.mysql.leasing import MySqlLeasing
from bide.stores.mysql.operations import MySqlReads
from bide.stores.mysql.schema import SCHEMA, diagnose
from bide.stores.mysql.watched_table import MySqlTable
from bide.stores.sql.dialect import LockTimeout
from bide.stores.sql.journaled_connection import Ask, RowLocked
from bide.stores.sql.leasing import POLL, SLACK
from bide.stores.sql.operations import HELD
from bide.stores.sql.store import CONNECTION_OF, Runtime, SqlStore

AT_ONCE = 1_000
"""Tasks in one statement: more would be no faster, and make other calls wait longer."""
WITH_ERRORS = 500
"""The same for tasks that may have error texts of some 6 KB each: together they fit into a packet of 4 MB."""
_PROBES = 200
"""Tasks that are probed for locks in one packet."""
_BYTES_AT_ONCE = 4 * 1024 * 1024
_AROUND = 2_500
"""The maximum size of a task in a statement, in bytes, without payload and options."""
_REST = 4_096
"""Bytes reserved for the rest of a packet."""

Name = tuple[Topic, str]


def size_of(new: NewTask) -> int:
    """The maximum size of this task in a statement, in bytes, where quotes and backslashes are doubled."""
    size = _AROUND
    for data in (new.payload, new.options):
        size += len(data) + data.count(b"'") + data.count(b"\\")
    return size


def too_large(tasks: Sequence[NewTask], largest: int) -> dict[int, StoreError]:
    """The places of the tasks that the server would reject, with the reasons."""
    if not tasks or 2 * max(len(new.payload) + len(new.options) for new in tasks) + _AROUND + _REST <= largest:
        return {}
    problems: dict[int, StoreError] = {}
    for place, new in enumerate(tasks):
        size = size_of(new) + _REST
        if size > largest:
            problems[place] = StoreUnavailable(
                f"not done: task {new.topic!r} {new.key!r} makes a packet of up to {size} bytes, and the server's "
                f"max_allowed_packet is {largest}: raise that, or keep large data elsewhere"
            )
    return problems


def slices_of_new(tasks: Sequence[NewTask], largest: int) -> list[Sequence[NewTask]]:
    """Split tasks into parts for one packet each, by number and by size."""
    room = min(_BYTES_AT_ONCE, largest - _REST)
    parts: list[Sequence[NewTask]] = []
    for part in slices(tasks, AT_ONCE):
        if 2 * sum([len(new.payload) + len(new.options) for new in part]) + _AROUND * len(part) <= room:
            parts.append(part)
        else:
            parts += slices(part, AT_ONCE, sizes_of=lambda some: [*map(size_of, some)], room=room)
    return parts


class MySqlRuntime(Runtime):
    dialect = MYSQL
    operations = operations
    reads = MySqlReads
    at_once = AT_ONCE
    _connects = MySqlConnection
    _transactions = Transactions
    joined = MySqlVerbs
    leasing: MySqlLeasing

    def __init__(self, address: Address, **options: Any) -> None:
        super().__init__(address, **options)
        self.leasing = MySqlLeasing(self)
        self.own = {"add": {"conflicts": Conflicts()}, "settle": {"leased": self.leasing.leased}}
        self.purge = operations.purge
        self._watching: asyncio.Task[None] | None = None
        self._positions: tuple[int, ...] = (0,)  # the last two of the redo log; none after a failure

    async def listen(self, topics: Collection[Topic], on_wake: OnWake, on_taken: OnTaken | None = None) -> Listening:
        if self.by_server and (self._watching is None or self._watching.done()):
            self._watching = self.loop.create_task(self._watch(), name="bide commit watch")
        return await super().listen(topics, on_wake, on_taken)

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        await super().close()

    async def _watch(self) -> None:
        while self.listeners:
            try:
                if not await self.connections["read"].read(self._look):
                    break
                self.look_every = SLACK  # for long transactions, and leases that expire
            except StoreError as error:
                if self._positions:
                    MYSQL.log.info("the redo log's position cannot be read, so workers poll: %s", error)
                self._positions = ()
            await asyncio.sleep(POLL / 1000)
            self.look_every = POLL  # until the next answer

    async def _look(self, call: Call) -> bool:
        """If the log has moved, notify of what wakes soon. False: the server does not tell the position.

        One seek per topic, except where something is known to be due; from three readings back, as no task wakes before
        it is written. A commit becomes visible a moment after it was logged, so the next reading asks again.
        """
        now, topics = self.about(0), self.listeners.topics()
        is_due = partial(self.leasing.next_due.is_due, about=now)
        if all(map(is_due, topics)):
            return True  # there is nothing to notify of
        rows = await call.ask("redo")
        position = int(rows[0][1]) if rows else 0
        if self._positions != (position, position):
            for part in slices([*filterfalse(is_due, topics)], AT_ONCE):
                self.notify(await self.leasing.wakes_between(call, part, now - 3 * POLL, now + 2 * SLACK))
            self._positions = (*self._positions[-1:], position)
        return position > 0

    def parts(self, kind: str, asked: Sequence[Any]) -> Sequence[Sequence[Any]]:
        if kind == "add":
            return slices_of_new(asked, self.connections["read"].largest)
        errors = kind == "change" or (kind == "settle" and any(one.error for one in asked))
        return slices(asked, WITH_ERRORS if errors else AT_ONCE)

    async def past(self, kind: str, part: Sequence[Any], ask: Ask) -> list[Any]:
        """Like the base class, but skips locked tasks; a new task that makes a packet too large fails alone.

        A call that waits for a lock longer than our connections allow (a second) is rolled back. Then each of its tasks
        is probed without waiting, and the locked ones are left out, so that the others need not wait.
        """
        connection, probe = self.connections[CONNECTION_OF[kind]], self.connections["held"]
        failed = too_large(part, self.connections["read"].largest) if kind == "add" else {}
        locked = set(self.held.names)
        if connection is probe:
            locked = await probe.read(partial(_find_locked, asked=part))
        answers: list[Any] = [failed.get(place, HELD) for place in range(len(part))]
        ends, probed = time.monotonic() + connection.patience, False
        while True:
            left = [
                place for place, one in enumerate(part) if place not in failed and (one.topic, one.key) not in locked
            ]
            tried = part if len(left) == len(part) else [part[place] for place in left]
            try:
                found = await ask(connection, tried) if left else []
            except RowLocked as error:
                if probed and time.monotonic() >= ends:
                    raise StoreUnavailable(str(error)) from error
                locked |= await probe.read(partial(_find_locked, asked=tried))
                probed = True
                continue
            except StoreError as error:
                if len(left) == len(part):
                    raise
                found = [error] * len(left)
            for place, answer in zip(left, found, strict=True):
                answers[place] = answer
            return answers

    async def identify(self, *, check: bool = False) -> None:
        async def work(call: Call) -> None:
            if check:
                await SCHEMA.check(call.connection, self.address)
            [[row]] = await call.send(call.write("identity"))
            self.identity = identity_of(row)
            self.joined_queries = call.queries

        await self.connections["read"].read(work)

    async def reserve(self, now: Millis, most: int) -> int:
        async def work(call: Call) -> int:
            [[(_, micros)]] = await call.send(*call.begin(now, most), call.write("clock"), *call.ending())
            return int(micros)

        return int(await self.here(self.connections["write"].read(work)))

    async def diagnose(self) -> list[Finding]:
        read = self.connections["read"].read
        findings: list[Finding] = await read(lambda call: diagnose(call, self.address))
        return findings


async def _find_locked(call: Call, asked: Sequence[Named]) -> set[Name]:
    """Find the tasks that another transaction has locked, or is inserting."""
    rest, locked = sorted({(one.topic, one.key) for one in asked}), set[Name]()
    while rest:
        part = rest[:_PROBES]
        statements = [call.write("probe", topic=topic, key=key) for topic, key in part]
        answers: list[Any] = []
        try:
            await call.connection.ask(b"; ".join(statements), answers=answers)
            rest = rest[_PROBES:]
        except MySQLError as error:
            if not isinstance(meaning(error, ""), LockTimeout):
                raise
            locked.add(part[len(answers)])
            rest = rest[len(answers) + 1 :]
    return locked


class MySqlStore(SqlStore):
    """Tasks in MySQL or MariaDB, at `url` (see `mysql.connection` for its form). `bide migrate` creates the tables.

    `clock`: by default the server's clock, independent of this machine's; "caller" uses the `now` of each call, for
    tests and for clocks that run faster. `patience`: seconds that a call keeps trying while the server is away.
    `silence`: seconds that one packet may take.
    """

    _runtime = MySqlRuntime
    _schema = SCHEMA
    _tables = MySqlTable.each
