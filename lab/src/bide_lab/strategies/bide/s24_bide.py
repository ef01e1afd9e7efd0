"""S24: one index of wake times, leases, and sleeps that are exact."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from typing import ClassVar
from urllib.parse import urlencode

from bide import Bide, Task
from bide.core.instants import as_datetime
from bide.settings import Settings
from bide.wiring import store_maker
from bide_lab.processes import mysql_server, postgres_pool, unlink
from bide_lab.strategy import DONE_TWICE, GONE, Effect, Flaw, Harm, Item, Recurrent, Setting, Strategy

_TOPIC = "lab"
_AGAIN = Flaw("what was done and not settled yet when its worker died is done again", "killed", DONE_TWICE, Harm.TWICE)


class _Bide(Strategy):
    """An app on one kind of store, as a user has it, in a schema or namespace of its own."""

    hold = 10.0
    shows: ClassVar[Sequence[str]] = ("steady", "burst", "two", "idle")
    apart: ClassVar[str] = "schema"
    """The option of the store's URL that names the place."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.app = Bide(self.url, keep_done="0s", keep_cancelled="0s")

    @property
    def url(self) -> str:
        given = self.setting.urls[self.needs[0]]
        return f"{given}{'&' if '?' in given else '?'}{urlencode({self.apart: self.setting.prefix})}"

    async def open(self) -> None:
        schema = store_maker(self.url, Settings())().features.schema
        # the first of a cell's processes makes what the others find; only SQLite would do that by itself
        if schema is not None and await schema.plan():
            await schema.migrate()
        self.closing.push_async_callback(self.app.close)
        await self.app.open()

    async def schedule(self, items: Sequence[Item]) -> None:
        await self.app.schedule_many(
            [self.app.new(_TOPIC, item.due, key=item.key, at=as_datetime(item.due)) for item in items]
        )

    async def reschedule(self, item: Item) -> bool:
        return (await self.app.reschedule(_TOPIC, item.key, at=as_datetime(item.due))).ok

    async def cancel(self, key: str) -> bool:
        return (await self.app.cancel(_TOPIC, key)).ok

    async def fire_now(self, key: str) -> bool:
        return (await self.app.fire_now(_TOPIC, key)).ok

    async def run(self, role: str, effect: Effect) -> None:
        @self.app.handler(_TOPIC)
        async def fire(task: Task[int]) -> None:
            await effect(task.key, task.record.planned_at)

        async with self.app.worker():
            await asyncio.Event().wait()


class InMemory(_Bide):
    """In the process itself: quick, and gone with it."""

    name = "bide-memory"
    title = "bide in memory"
    in_process = True
    shows = ("steady", "burst", "idle")
    flaws = (GONE,)
    url = "memory:"


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
    apart = "namespace"
    shows = ("steady", "burst", "two", "idle", "verbs", "trips")
    flaws = (_AGAIN,)

    async def clear(self) -> None:
        from redis.asyncio import Redis

        async with Redis.from_url(self.setting.urls["redis"]) as client:
            await unlink(client, f"{{{self.setting.prefix}[:}}]*")


class OnPostgres(_Bide):
    """On PostgreSQL, in a schema of its own."""

    name = "bide-postgres"
    title = "bide on PostgreSQL"
    needs = ("postgres",)
    shows: ClassVar[Sequence[str]] = ("steady", "burst", "two", "idle", "verbs", "trips")
    flaws: ClassVar[Sequence[Flaw]] = (_AGAIN,)

    async def clear(self) -> None:
        pool = await postgres_pool(self, 1)
        await pool.execute(f'DROP SCHEMA IF EXISTS "{self.setting.prefix}" CASCADE')


class OnMysql(_Bide):
    """On MySQL or MariaDB, in a database of its own."""

    name = "bide-mysql"
    title = "bide on MySQL or MariaDB"
    needs = ("mysql",)

    async def clear(self) -> None:
        import asyncmy

        connection = await asyncmy.connect(**mysql_server(self.setting.urls["mysql"]))
        try:
            async with connection.cursor() as cursor:
                await cursor.execute(f"DROP DATABASE IF EXISTS `{self.setting.prefix}`")
        finally:
            connection.close()


class RuleOnRedis(OnRedis, Recurrent):
    """A recurring task: one task, which is due again at the rule's next instant when it is done."""

    name = "bide-rule"
    title = "bide's recurring task on Redis"
    shows: ClassVar[Sequence[str]] = ("recurrence",)

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.app = Bide(self.url, keep_done="0s", lease="1s")

    async def schedule(self, items: Sequence[Item]) -> None:
        """The rule is declared by each process."""

    async def run(self, role: str, effect: Effect) -> None:
        @self.app.every(timedelta(milliseconds=self.every), topic=_TOPIC, catch_up="all")
        async def fire(task: Task[None]) -> None:
            assert task.occurrence is not None
            self.turn = round(task.occurrence.timestamp() * 1000)
            await effect("rule", self.turn)

        async with self.app.worker():
            await asyncio.Event().wait()
