"""The store on MySQL and MariaDB: one row per task, beside your own tables.

**The cost**: scheduling and plain Done are one packet and one round trip per batch; leasing two, and one that only
reads when nothing is due; whatever has to look at a task first (moving, cancelling, a conflict, Retry) is one
transaction of two. A process has a connection for each kind of call, opened when first used.

Nothing in MySQL tells others of a commit, so while somebody listens an `ear` looks five times a second, for all in this
process. Workers sleep exactly until what they have seen, or have heard of from it or from their own process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bide.core.errors import PartlyFailed, StoreError
from bide.core.instants import Millis
from bide.core.records import NewTask
from bide.stores.mysql.joined import CallersConnection
from bide.stores.mysql.runtime import MySqlRuntime
from bide.stores.mysql.schema import SCHEMA
from bide.stores.mysql.sizes import too_large
from bide.stores.mysql.table import MySqlTable
from bide.stores.sql.locked_rows import together
from bide.stores.sql.store import SqlStore


class MySqlStore(SqlStore):
    """Tasks in MySQL or MariaDB, at `url`; see `address` for what that may say. `bide migrate` makes the tables.

    `clock`: by default the server's own, whatever this machine's says; "caller" goes by the `now` of each call, for
    tests and for clocks that run faster. `patience`: seconds that a call goes on trying while the server is away.
    `silence`: seconds that one packet may take.
    """

    _runtime = MySqlRuntime
    _schema = SCHEMA
    _tables = MySqlTable.each
    _callers = CallersConnection

    async def add_apart(self, tasks: Sequence[NewTask], *, now: Millis) -> list[Any]:
        """What makes too large a packet fails alone."""
        problems = too_large(tasks, self._open().connections["read"].largest)
        if not problems:
            return await super().add_apart(tasks, now=now)
        if len(problems) == len(tasks):
            raise problems[0]
        fine = [place for place in range(len(tasks)) if place not in problems]
        added: Sequence[object]
        try:
            added = await together(await super().add_apart([tasks[place] for place in fine], now=now))
        except PartlyFailed as error:
            added = error.answers
        except StoreError as error:
            added = [error] * len(fine)
        answers: list[Any] = [problems.get(place) for place in range(len(tasks))]
        for place, answer in zip(fine, added, strict=True):
            answers[place] = answer
        raise PartlyFailed(answers)
