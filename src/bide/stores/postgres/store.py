"""The PostgreSQL store: one row per task, beside your own tables.

**The cost**: scheduling, leasing and plain Done are one statement and one round trip per batch; whatever has to look at
a task first (moving, cancelling, a conflict, Retry) is one transaction of four. A process has up to nine connections,
one for each kind of call and one that listens, opened when first used, and up to ten for transactions of handlers.
"""

from __future__ import annotations

from typing import Any

from bide.core.instants import Millis
from bide.stores.postgres.joined import CallersConnection
from bide.stores.postgres.runtime import PostgresRuntime
from bide.stores.postgres.schema import SCHEMA
from bide.stores.postgres.table import PostgresTable
from bide.stores.sql.store import SqlStore


class PostgresStore(SqlStore):
    """Tasks in PostgreSQL, at `url`; see `address` for what that may say. `bide migrate` makes the tables.

    `clock`: by default the server's own, whatever this machine's says; "caller" goes by the `now` of each call, for
    tests and for clocks that run faster. `patience`: seconds that a call goes on trying while the server is away.
    `silence`: seconds that one statement may take. `cap`: how far ahead a wake is still told of: the longest that any
    worker sleeps.
    """

    _runtime = PostgresRuntime
    _schema = SCHEMA
    _tables = PostgresTable.each
    _callers = CallersConnection

    def __init__(self, url: str, *, cap: Millis = 60_000, **options: Any) -> None:
        super().__init__(url, cap=cap, **options)
