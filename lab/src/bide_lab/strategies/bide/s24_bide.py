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
from bide_lab.strategy import DONE_TWICE, GONE, RUN_TWICE, Effect, Flaw, Harm, Item, Recurrent, Setting, Strategy

_TOPIC = "lab"
_AGAIN = Flaw("what was done and not settled yet when its worker died is done again", "killed", DONE_TWICE, Harm.TWICE)


def url_of(setting: Setting, server: str, apart: str) -> str:
    """The URL of a place of its own on a server; `apart` is the option that names it."""
    given = setting.urls[server]
    return f"{given}{'&' if '?' in given else '?'}{urlencode({apart: setting.prefix})}"


async def clear_redis(setting: Setting) -> None:
    """Remove all keys of the namespace."""
    from redis.asyncio import Redis

    async with Redis.from_url(setting.urls["redis"]) as client:
        await unlink(client, f"{{{setting.prefix}[:}}]*")


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
        return url_of(self.setting, self.needs[0], self.apart)

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
    shows: ClassVar[Sequence[str]] = ("steady", "burst", "two", "idle", "verbs", "trips")
    flaws: ClassVar[Sequence[Flaw]] = (_AGAIN,)

    async def clear(self) -> None:
        await clear_redis(self.setting)


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


class RuleOnRedis(Recurrent):
    """A recurring task: one task, which is due again at the rule's next instant when it is done."""

    name = "bide-rule"
    title = "bide's recurring task on Redis"
    needs = ("redis",)
    flaws = (
        Flaw("a run that was done and not settled when its worker died is done again", "recurrence", RUN_TWICE,
             Harm.TWICE),
    )  # fmt: skip

    async def open(self) -> None:
        self.app = Bide(url_of(self.setting, "redis", "namespace"), lease="1s", keep_done="0s")
        self.closing.push_async_callback(self.app.close)
        await self.app.open()

    async def run(self, role: str, effect: Effect) -> None:
        @self.app.every(timedelta(milliseconds=self.every), topic=_TOPIC, catch_up="all")
        async def fire(task: Task[None]) -> None:
            assert task.occurrence is not None
            self.turn = round(task.occurrence.timestamp() * 1000)
            await effect("rule", self.turn)

        async with self.app.worker():
            await asyncio.Event().wait()

    async def clear(self) -> None:
        await clear_redis(self.setting)
