"""S1: the business table itself is read every minute for what has come due."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit
from zlib import crc32

from bide_lab.processes import MysqlStrategy
from bide_lab.strategy import Effect, Flaw, Harm, Item, Setting, each_period, now, together, when

_DRAFT, _SCHEDULED, _PUBLISHED = 1, 2, 3
_PERIOD = 60.0
_WINDOW = 300.0
"""Seconds of strategy time."""
_PAGE = 100

Page = Sequence[Sequence[Any]]


class Serial(MysqlStrategy):
    """One table, one post after another."""

    name = "S1-serial"
    title = "table scan, one post after another"
    precision = _PERIOD
    again = _PERIOD
    tables: ClassVar[int] = 1
    loses = "what came due while the scanner was away for longer than its window"
    shows: ClassVar[Sequence[str]] = ("steady", "burst", "idle", "two")
    flaws: ClassVar[Sequence[Flaw]] = (
        Flaw(
            "what came due while the scanner was away for longer than its window never fires", "away",
            when("lost", "{lost} of {expected} posts never published after {away_seconds} s without a scanner"),
            Harm.LOST,
        ),
    )  # fmt: skip

    reader: Any = None
    """The pool of connections that it reads on; None: that which it writes on."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.blogs = [self.table(f"blog_{number}") for number in range(self.tables)]

    async def prepare(self) -> None:
        for blog in self.blogs:
            await self.change(
                f"CREATE TABLE {blog} (id VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin PRIMARY KEY, "
                "status TINYINT NOT NULL, expected BIGINT NOT NULL, actual BIGINT, KEY due (status, expected))"
            )

    def blog_of(self, key: str) -> str:
        return self.blogs[crc32(key.encode()) % self.tables]

    async def schedule(self, items: Sequence[Item]) -> None:
        for blog in self.blogs:
            if rows := [(item.key, _SCHEDULED, item.due) for item in items if self.blog_of(item.key) == blog]:
                await self.change_many(f"INSERT INTO {blog} (id, status, expected) VALUES (%s, %s, %s)", rows)

    async def reschedule(self, item: Item) -> bool:
        move = f"UPDATE {self.blog_of(item.key)} SET expected = %s WHERE id = %s AND status = %s"
        return bool(await self.change(move, item.due, item.key, _SCHEDULED))

    async def cancel(self, key: str) -> bool:
        back = f"UPDATE {self.blog_of(key)} SET status = %s WHERE id = %s AND status = %s"
        return bool(await self.change(back, _DRAFT, key, _SCHEDULED))

    async def run(self, role: str, effect: Effect) -> None:
        await each_period(
            self.setting.span(_PERIOD), lambda: together(*(self.scan(blog, effect) for blog in self.blogs))
        )

    async def scan(self, blog: str, effect: Effect) -> None:
        async for page in self.pages(blog):
            await self.publish_all(blog, page, effect)

    async def pages(self, blog: str) -> AsyncIterator[Page]:
        """All that is scheduled and came due within the window, each page from where the one before it ended."""
        until = now()
        expected, last = until - round(self.setting.span(_WINDOW) * 1000), ""
        self.counted["scans"] += 1
        while True:
            page = await self.rows(
                f"SELECT id, expected FROM {blog} WHERE status = %s AND expected BETWEEN %s AND %s "
                f"AND (expected > %s OR id > %s) ORDER BY expected, id LIMIT {_PAGE}",
                _SCHEDULED, expected, until, expected, last, pool=self.reader,
            )  # fmt: skip
            self.counted["pages"] += 1
            self.counted["looked_at"] += len(page)
            if page:
                yield page
            if len(page) < _PAGE:
                return
            last, expected = page[-1]

    async def publish_all(self, blog: str, page: Page, effect: Effect) -> None:
        """Each is published when it is committed; if the effect fails, or we do, the next scan meets it again."""
        publish = f"UPDATE {blog} SET status = %s, actual = %s WHERE id = %s AND status = %s AND expected = %s"
        for key, expected in page:
            async with self.transaction() as cursor:
                mine = await cursor.execute(publish, (_PUBLISHED, now(), key, _SCHEDULED, expected))
                if mine:
                    await effect(key, expected)
            self.counted["published" if mine else "looked_at_in_vain"] += 1


class Parallel(Serial):
    """One table; each page is published by a task of its own, on a connection of its own.

    The window is the same, and so is its flaw, which is played for the serial form alone.
    """

    name = "S1-parallel"
    title = "table scan, pages side by side"
    connections = 8
    shows = ("burst",)
    flaws = ()

    async def scan(self, blog: str, effect: Effect) -> None:
        async with asyncio.TaskGroup() as publishers:
            async for page in self.pages(blog):
                publishers.create_task(self.publish_all(blog, page, effect))


class Tables(Serial):
    """The posts are spread over four tables by their ids, which are scanned side by side: four questions per period.

    The window is the same, and so is its flaw, which is played for the serial form alone.
    """

    name = "S1-tables"
    title = "table scan, four tables side by side"
    tables = 4
    shows = ("burst",)
    flaws = ()


class Replica(Serial):
    """One table, read from a replica that is as far behind as it is, and written to where it is kept."""

    name = "S1-replica"
    title = "table scan, read from a replica"
    needs = ("mysql_replica",)
    direct = True
    precision = 4 * _PERIOD  # one of its own, and three for a replica that is as far behind
    shows = ()
    flaws = (
        Flaw(
            "what it reads is as old as the replica is behind", "steady",
            when("looked_at_in_vain", "half of them {p50:,.0f} ms late, and {looked_at_in_vain:,.0f} posts met again "
                 "that were published already"),
        ),
    )  # fmt: skip

    async def open(self) -> None:
        await super().open()
        url = self.setting.urls["mysql_replica"]
        self.reader = await self.pool_of(url, parse_qs(urlsplit(url).query)["replica"][0])

    async def prepare(self) -> None:
        await super().prepare()
        while not await self.rows("SHOW TABLES LIKE %s", self.blogs[0], pool=self.reader):  # noqa: ASYNC110 - the replica tells nobody
            await asyncio.sleep(0.05)
