"""S2: once an hour, one statement for all that has been finished for two days."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import ClassVar

from bide_lab.processes import sqlite_file
from bide_lab.strategy import Effect, Flaw, Harm, Item, Strategy, each_period, now, when

_WAIT = 48 * 3_600_000
"""Milliseconds from the end of the order to the stars. It is the task's own delay, and never scaled."""
_PAGE = 100
_OPEN, _RATED = 0, 1
_NOTICED = 500
"""Milliseconds that are a period's share of lateness, and no moment."""


class _CronBatch(Strategy):
    """A shop's table in SQLite, which each process opens by itself, and a batch over it."""

    every: ClassVar[float]
    """Seconds of strategy time."""
    database: sqlite3.Connection

    async def open(self) -> None:
        self.database = sqlite_file(self, "shop.db")

    async def prepare(self) -> None:
        self.sql("CREATE TABLE orders (id TEXT PRIMARY KEY, finish_time INTEGER, status INTEGER, stars INTEGER)")
        self.sql("CREATE INDEX to_rate ON orders (status, finish_time)")

    def sql(self, statement: str, *values: int | str) -> sqlite3.Cursor:
        return self.database.execute(statement, values)

    async def schedule(self, items: Sequence[Item]) -> None:
        with self.database:
            self.sql("BEGIN IMMEDIATE")
            self.database.executemany(
                "INSERT INTO orders VALUES (?, ?, ?, NULL)", [(item.key, item.due - _WAIT, _OPEN) for item in items]
            )

    async def reschedule(self, item: Item) -> bool:
        move = "UPDATE orders SET finish_time = ? WHERE id = ? AND status = ?"
        return self.sql(move, item.due - _WAIT, item.key, _OPEN).rowcount > 0

    async def cancel(self, key: str) -> bool:
        """The customer rates it."""
        rate = "UPDATE orders SET status = ?, stars = 4 WHERE id = ? AND status = ?"
        return self.sql(rate, _RATED, key, _OPEN).rowcount > 0

    async def run(self, role: str, effect: Effect) -> None:
        async def batch() -> None:
            self.counted["batches"] += 1
            before = now() - _WAIT
            while await self.rate_page(before, effect) == _PAGE:
                pass

        await each_period(self.setting.span(self.every), batch)

    async def rate_page(self, before: int, effect: Effect) -> int:
        """One page is one transaction: if we die in it, the next batch does it again. Answers how many rows it had."""
        with self.database:
            self.sql("BEGIN IMMEDIATE")
            page = self.sql(
                "SELECT id, finish_time FROM orders WHERE status = ? AND finish_time <= ? ORDER BY finish_time "
                f"LIMIT {_PAGE}", _OPEN, before,
            ).fetchall()  # fmt: skip
            for key, finish_time in page:
                self.sql("UPDATE orders SET status = ?, stars = 5 WHERE id = ?", _RATED, key)
                await effect(key, finish_time + _WAIT)
        self.counted.update(pages=1, empty_pages=not page, rows=len(page))
        return len(page)


class Hourly(_CronBatch):
    """Once an hour. An hour is played as four minutes of strategy time, since a cell has to end."""

    name = "S2-hour"
    title = "cron batch once an hour (played as 4 minutes)"
    every = 240.0
    precision = every
    shows = ()
    flaws = (
        Flaw(
            "a task is late by anything up to an hour", "steady",
            when("most", "late by {p50:,.0f} ms in the middle and {most:,.0f} ms at most", over=_NOTICED), Harm.LATE,
        ),
    )  # fmt: skip


class EveryMinute(_CronBatch):
    """Once a minute: the other end of the trade."""

    name = "S2-minute"
    title = "cron batch once a minute"
    every = 60.0
    precision = every
