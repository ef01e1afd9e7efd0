"""The store on MySQL and MariaDB: one row per task, beside your own tables.

**The cost**: scheduling and plain Done are one packet and one round trip per batch; leasing two, and one that only
reads when nothing is due; whatever has to look at a task first (moving, cancelling, a conflict, Retry) is one
transaction of two. A process has a connection for each kind of call, opened when first used.

Nothing in MySQL tells others of a commit, so while somebody listens an `ear` looks five times a second, for all in this
process. Workers sleep exactly until what they have seen, or have heard of from it or from their own process.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

from bide.core.errors import PartlyFailed, StoreError
from bide.core.instants import Millis
from bide.core.records import Change, Leased, NewTask, Settlement, Topic
from bide.ports import Finding, Heard, Listening
from bide.stores.batches import slices
from bide.stores.mysql import adding, diagnosis, keeping, leasing, operations, reading
from bide.stores.mysql.address import Address, address_of
from bide.stores.mysql.ear import POLL
from bide.stores.mysql.joined import CallersConnection
from bide.stores.mysql.journaled_connection import MySqlConnection
from bide.stores.mysql.reading import MySqlReads
from bide.stores.mysql.runtime import Opened
from bide.stores.mysql.schema import SCHEMA
from bide.stores.mysql.sizes import AT_ONCE, WITH_ERRORS, slices_of_new, too_large
from bide.stores.mysql.table import MySqlTable
from bide.stores.mysql.transactions import Transactions
from bide.stores.sql.locked_rows import together
from bide.stores.sql.store import ServerStore


class MySqlStore(ServerStore[Opened]):
    """Tasks in MySQL or MariaDB, at `url`; see `address` for what that may say. `schema.migrate` makes the tables.

    `clock`: by default the server's own, whatever this machine's says; "caller" goes by the `now` of each call, for
    tests and for clocks that run faster. `patience`: seconds that a call goes on trying while the server is away.
    `silence`: seconds that one packet may take.
    """

    _operations = operations
    _reading = reading
    _reads = MySqlReads
    _schema = SCHEMA
    _tables = MySqlTable.each
    _address_of = address_of
    _at_once = AT_ONCE
    _transactions = Transactions
    _callers = CallersConnection
    _address: Address

    def _made(self, patience: float) -> Opened:
        return Opened(self._address, by_server=self._by_server, patience=patience, silence=self._silence)

    # --- AnswersApart

    async def add_apart(self, tasks: Sequence[NewTask], *, now: Millis) -> list[Any]:
        opened = self._open()
        largest = opened.lanes["read"].largest
        problems = too_large(tasks, largest)
        if not problems:
            return await self._add(opened, tasks, now)
        if len(problems) == len(tasks):
            raise problems[0]
        fine = [place for place in range(len(tasks)) if place not in problems]
        added: Sequence[object]
        try:
            added = await together(await self._add(opened, [tasks[place] for place in fine], now))
        except PartlyFailed as error:
            added = error.answers
        except StoreError as error:
            added = [error] * len(fine)
        answers: list[Any] = [problems.get(place) for place in range(len(tasks))]
        for place, answer in zip(fine, added, strict=True):
            answers[place] = answer
        raise PartlyFailed(answers)

    async def _add(self, opened: Opened, tasks: Sequence[NewTask], now: Millis) -> list[Any]:
        parts = slices_of_new(tasks, opened.lanes["read"].largest)
        return await self._write("add", partial(adding.add, conflicts=opened.conflicts), tasks, parts, now)

    async def change_apart(self, changes: Sequence[Change], *, now: Millis) -> list[Any]:
        return await self._write("change", operations.change, changes, slices(changes, WITH_ERRORS), now)

    async def settle_apart(self, outcomes: Sequence[Settlement], *, now: Millis) -> list[Any]:
        operation = partial(operations.settle, leased=self._open().leased)
        at_once = WITH_ERRORS if any(one.error for one in outcomes) else AT_ONCE
        return await self._write("settle", operation, outcomes, slices(outcomes, at_once), now)

    async def _told(
        self, opened: Opened, operation: Any, now: Millis, lane: MySqlConnection, part: Sequence[Any]
    ) -> list[Any]:
        told: dict[Topic, Millis] = {}
        answers: list[Any] = await operation(lane, part, self._now(now), self._about(now), told.update)
        if told:
            opened.tell(told)
        return answers

    # --- workers

    async def lease(self, wants: Mapping[Topic, int], *, now: Millis, until: Millis, holder: str) -> Leased:
        opened = self._open()
        sent = opened.loop.time()
        leased = await leasing.lease(
            opened.lanes["lease"], opened.floors, opened.depths, opened.expected, wants, self._now(now),
            self._about(now), until - now, holder, opened.leased,
        )  # fmt: skip
        opened.ear.looked(wants, sent)
        if self._by_server and not opened.ear.hears_of(wants):  # nobody tells of what other processes schedule
            return Leased(leased.tasks, leased.next_wake, leased.now, leased.now + POLL)
        return leased

    async def purge(self, *, now: Millis, limit: int) -> int:
        opened = self._open()
        lane = opened.lanes["keep"]
        purged = await keeping.purge(lane, self._now(now), limit)
        await keeping.forget_callers(lane, [lane.name for lane in opened.lanes.values()])
        return purged

    # --- Notifies

    async def listen(self, topics: Collection[Topic], heard: Heard) -> Listening:
        return self._open().ear.listen(topics, heard)

    # --- Diagnoses

    async def diagnose(self) -> list[Finding]:
        opened = self._open()
        return await diagnosis.diagnose(opened.lanes["keep"], self._address, opened.time)
