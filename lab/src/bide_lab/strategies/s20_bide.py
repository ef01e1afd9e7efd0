"""bide itself: one index of wake times, leases, and sleeps that are exact.

**Idea.** Everything that has to happen later is one number in one index. A worker sleeps until the smallest that
concerns it, leases what is due, does it, and settles it; a lease that ends unsettled is due again.

**Origin.** This project; docs/lifecycle.md tells the whole.

**Cost.** O(log n) for each verb; nothing is asked while nothing is due, but for one look per capped sleep; a settle for
each delivery that a strategy without acknowledgement saves itself.

**Flaw.** It delivers at least once: a worker that dies after the effect and before the settle has it done again, when
its lease ends, unless the effect is in the task's own transaction or checks the token.

**Right when.** A task must happen, on time, and may have to be moved or cancelled until it does.

**To bide.** You are there. To another store: schedule on the new one, and let the old one run dry.

      client --- schedule ---> [ wake_at index by topic ]  <--- lease what is due --- worker
                                        |                  --- sleep exactly until the next --->
                                        +----------------- <--- settle: done, retry, dead -----
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import ClassVar
from urllib.parse import unquote, urlencode, urlsplit

from bide import Bide, Task
from bide.core.answers import Answer
from bide.core.instants import as_datetime
from bide.ports import HasSchema
from bide.settings import Settings
from bide.wiring import store_maker
from bide_lab.servers.none import GONE
from bide_lab.strategy import Effect, Flaw, Item, Setting, Strategy

_TOPIC = "lab"


_AGAIN = Flaw(
    "what was done and not settled yet when its worker died is done again", "killed",
    lambda seen: f"{seen.duplicated} of {seen.expected} tasks done twice" if seen.duplicated else "",
)  # fmt: skip


class _Bide(Strategy):
    """An app on one kind of store, as a user has it."""

    hold = 10.0
    shows: ClassVar[Sequence[str]] = ("steady", "burst", "two", "idle")

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.app = Bide(self.url, keep_done="0s", keep_cancelled="0s")

    @property
    def url(self) -> str:
        raise NotImplementedError

    async def open(self) -> None:
        store = store_maker(self.url, Settings())()
        # the first of a cell's processes makes what the others find; only SQLite would do that by itself
        if isinstance(store, HasSchema) and await store.plan():
            await store.migrate()
        await self.app.open()

    async def close(self) -> None:
        await self.app.close()

    async def schedule(self, items: Sequence[Item]) -> None:
        await self.app.schedule_many(
            [self.app.new(_TOPIC, item.due, key=item.key, at=as_datetime(item.due)) for item in items]
        )

    async def reschedule(self, item: Item) -> bool:
        return _done(await self.app.reschedule(_TOPIC, item.key, at=as_datetime(item.due)))

    async def cancel(self, key: str) -> bool:
        return _done(await self.app.cancel(_TOPIC, key))

    async def fire_now(self, key: str) -> bool:
        return _done(await self.app.fire_now(_TOPIC, key))

    async def run(self, role: str, effect: Effect) -> None:
        @self.app.handler(_TOPIC)
        async def fire(task: Task[int]) -> None:
            await effect(task.key, task.record.planned_at)

        async with self.app.worker():
            await asyncio.Event().wait()


def _done(answer: Answer) -> bool:
    return answer.ok


class InMemory(_Bide):
    """In the process itself: quick, and gone with it."""

    name = "bide-memory"
    title = "bide in memory"
    in_process = True
    shows = ("steady", "burst", "idle")
    flaws = (GONE,)

    @property
    def url(self) -> str:
        return "memory:"


class OnSqlite(_Bide):
    """In one file, for as many processes as like."""

    name = "bide-sqlite"
    title = "bide on SQLite"

    @property
    def url(self) -> str:
        return f"sqlite:///{self.setting.folder / 'bide.db'}"


class OnRedis(_Bide):
    """On Redis, in a namespace of its own."""

    name = "bide-redis"
    title = "bide on Redis"
    needs = ("redis",)
    shows = ("steady", "burst", "two", "idle", "verbs", "trips")
    flaws = (_AGAIN,)

    @property
    def url(self) -> str:
        return _with(self.setting.urls["redis"], namespace=self.setting.prefix)

    async def clear(self) -> None:
        from redis.asyncio import Redis

        async with Redis.from_url(self.setting.urls["redis"]) as client:
            keys = [key async for key in client.scan_iter(match=f"{{{self.setting.prefix}[:}}]*", count=1000)]
            for begin in range(0, len(keys), 1000):
                await client.unlink(*keys[begin : begin + 1000])


class OnPostgres(_Bide):
    """On PostgreSQL, in a schema of its own."""

    name = "bide-postgres"
    title = "bide on PostgreSQL"
    needs = ("postgres",)
    shows: ClassVar[Sequence[str]] = ("steady", "burst", "two", "idle", "verbs", "trips")
    flaws: ClassVar[Sequence[Flaw]] = (_AGAIN,)

    @property
    def url(self) -> str:
        return _with(self.setting.urls["postgres"], schema=self.setting.prefix)

    async def clear(self) -> None:
        import asyncpg

        connection = await asyncpg.connect(self.setting.urls["postgres"])
        try:
            await connection.execute(f'DROP SCHEMA IF EXISTS "{self.setting.prefix}" CASCADE')
        finally:
            await connection.close()


class OnMysql(_Bide):
    """On MySQL or MariaDB, in a database of its own."""

    name = "bide-mysql"
    title = "bide on MySQL or MariaDB"
    needs = ("mysql",)

    @property
    def url(self) -> str:
        return _with(self.setting.urls["mysql"], schema=self.setting.prefix)

    async def clear(self) -> None:
        import asyncmy

        parts = urlsplit(self.setting.urls["mysql"])
        connection = await asyncmy.connect(
            host=parts.hostname or "127.0.0.1", port=parts.port or 3306, user=unquote(parts.username or "root"),
            password=unquote(parts.password or ""),
        )  # fmt: skip
        try:
            async with connection.cursor() as cursor:
                await cursor.execute(f"DROP DATABASE IF EXISTS `{self.setting.prefix}`")
        finally:
            connection.close()


def _with(url: str, **options: str) -> str:
    return f"{url}{'&' if '?' in url else '?'}{urlencode(options)}"
