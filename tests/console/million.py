"""Fills a store with a million tasks, and tells the second with the most: python -m tests.console.million URL

On SQLite the rows are written by SQL, in a third of the time that the store itself would take: the columns are those of
`stores/sqlite/schema.sql`, and the tasks those of `bench.console_store`.
"""

from __future__ import annotations

import asyncio
import sqlite3
import sys
import time

from bench.console_store import GROUP, PEAK, TOPICS, fill

from bide import Bide

TASKS = 1_000_000
_ROWS = """
INSERT INTO bide_task (topic, key, state, at, due_at, token, planned_at, attempt, failures, losses, created_at, id,
    group_name, options, payload)
WITH RECURSIVE numbers (n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM numbers WHERE n < :tasks - 1),
planned (n, topic, at) AS (
    SELECT n,
        CASE WHEN n >= :at_peak THEN json_extract(:topics, '$[' || (n % 10) || ']')
             WHEN n % 41 = 0 THEN 'order.close' ELSE 'coupon.remind' END,
        CASE WHEN n < :at_peak THEN :peak + n % 1000 ELSE :start + 60000 + abs(random() % 86340000) END
    FROM numbers
)
SELECT topic, printf('%07d', n), 0, at, at, :token + n, at, 0, 0, 0, :start, lower(hex(randomblob(16))),
    CASE WHEN topic = 'event.remind' AND n < :at_peak + 5000 THEN :group_name END, x'',
    CAST('{"number":' || n || '}' AS BLOB)
FROM planned
"""


async def _schema(url: str) -> None:
    async with Bide(url):
        """The first to open a file makes its tables."""


def _fill_sqlite(url: str) -> int:
    asyncio.run(_schema(url))
    start = time.time_ns() // 1_000_000_000 * 1_000
    peak = start + 12 * 3_600_000
    with sqlite3.connect(url.removeprefix("sqlite:///")) as connection:
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("PRAGMA cache_size = -300000")
        topics = "[" + ",".join(f'"{topic}"' for topic in TOPICS) + "]"
        given = {"tasks": TASKS, "at_peak": PEAK, "peak": peak, "start": start, "token": start * 1_000 - TASKS}
        connection.execute(_ROWS, {**given, "topics": topics, "group_name": GROUP})
    connection.close()
    return peak


if __name__ == "__main__":
    there = sys.argv[1]
    print(_fill_sqlite(there) if there.startswith("sqlite:") else asyncio.run(fill(there, TASKS)))
