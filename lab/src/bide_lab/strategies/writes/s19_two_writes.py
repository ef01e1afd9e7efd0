"""S19: the order goes into the database, its timer into another store, and a crash fits between them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from bide_lab.processes import PostgresStrategy, postgres_pool
from bide_lab.strategies.bide.s24_bide import OnPostgres
from bide_lab.strategy import VERBS, Effect, Flaw, Harm, Item, Setting, Strategy, now, poll, when

_PERIOD = 0.1
_TRIES = 3
_PAUSE = 0.05
"""Seconds before the second write is tried again."""
_ALARM_AFTER = 5
"""Tries of the compensating daemon after which an alert is raised; it goes on trying."""
_PAGE = 100
_CONNECTIONS = 16
"""To PostgreSQL, of one process."""


class NoTimer(Exception):
    """The second write failed."""


class _Orders(Strategy):
    """The shop's own rows in PostgreSQL."""

    connections = _CONNECTIONS
    pool: Any
    orders: str

    async def prepare(self) -> None:
        await self.pool.execute(f"CREATE TABLE {self.orders} (id text PRIMARY KEY, due bigint NOT NULL)")

    async def place(self, connection: Any, items: Sequence[Item]) -> None:
        await connection.executemany(f"INSERT INTO {self.orders} VALUES ($1, $2)", items)

    async def committed(self) -> Mapping[str, int]:
        return {one["id"]: one["due"] for one in await self.pool.fetch(f"SELECT id, due FROM {self.orders}")}


class NoCare(_Orders, PostgresStrategy):
    """Row, then timer. What the second write raises is the caller's; the row stays."""

    name = "S19-none"
    title = "two writes, nothing done about the gap"
    loses = "what its holder had taken and not done when it died"
    needs = ("postgres", "redis")
    roles: ClassVar[Sequence[str]] = ("poller",)
    shows: ClassVar[Sequence[str]] = ("writer",)
    cannot: ClassVar[Mapping[str, str]] = dict.fromkeys(
        VERBS[1:], "it would be two writes again, with the same gap, and is not played"
    )
    flaws: ClassVar[Sequence[Flaw]] = (
        Flaw(
            "a writer that dies between the two writes leaves an order whose timer never fires", "writer",
            when("lost", "{lost} of {committed:.0f} orders have no timer after {kills:.0f} writers were killed"),
            Harm.LOST,
        ),
    )  # fmt: skip
    redis: Any

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.orders = self.table("orders")
        self.timers = f"{setting.prefix}:timers"

    async def open(self) -> None:
        self.redis = await self.closing.enter_async_context(self.redis_client())
        await super().open()

    def redis_client(self) -> Any:
        """It connects when it is used. Whether and how often it tries again is what the variants differ in."""
        from redis.asyncio import Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff

        return Redis.from_url(self.setting.urls["redis"], retry=Retry(NoBackoff(), 0))

    async def clear(self) -> None:
        await super().clear()
        await self.redis.unlink(self.timers)

    async def schedule(self, items: Sequence[Item]) -> None:
        await self.place(self.pool, items)
        await self.set_timers(items)

    async def set_timers(self, items: Sequence[Item]) -> None:
        """Raises NoTimer."""
        from redis.exceptions import RedisError

        try:
            await self.redis.zadd(self.timers, {item.key: item.due for item in items})
        except (RedisError, OSError) as error:
            raise NoTimer(f"{len(items)} timers were not set: {error}") from error

    async def run(self, role: str, effect: Effect) -> None:
        await poll(_PERIOD, partial(self.look, effect) if role == "poller" else self.catch_up)

    async def look(self, effect: Effect) -> bool:
        found = await self.redis.zrangebyscore(self.timers, 0, now(), start=0, num=_PAGE, withscores=True)
        for key, due in found:
            if await self.redis.zrem(self.timers, key):
                await effect(key.decode(), int(due))
        return len(found) == _PAGE

    async def catch_up(self) -> object:
        """Set the timers that are missing, in a process of its own; true if there may be more."""
        raise NotImplementedError


class Sync(NoCare):
    """The caller waits until both are there, or neither is."""

    name = "S19-sync"
    title = "two writes, retried, then the row is taken back"

    async def schedule(self, items: Sequence[Item]) -> None:
        await self.place(self.pool, items)
        for left in reversed(range(_TRIES)):
            try:
                await self.set_timers(items)
                break
            except NoTimer:
                if not left:
                    keys = [item.key for item in items]
                    await self.pool.execute(f"DELETE FROM {self.orders} WHERE id = ANY($1::text[])", keys)
                    raise
            await asyncio.sleep(_PAUSE)


class Async(NoCare):
    """The caller does not wait for a second write that fails: it is noted, and a daemon makes it."""

    name = "S19-async"
    title = "two writes, what failed is noted and done by a daemon"
    roles = ("compensator", "poller")

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.failed = self.table("failed")

    async def prepare(self) -> None:
        await super().prepare()
        await self.pool.execute(
            f"CREATE TABLE {self.failed} (id text PRIMARY KEY, due bigint, tries int NOT NULL DEFAULT 0)"
        )

    async def schedule(self, items: Sequence[Item]) -> None:
        await self.place(self.pool, items)
        try:
            await self.set_timers(items)
        except NoTimer:
            await self.pool.executemany(f"INSERT INTO {self.failed} (id, due) VALUES ($1, $2)", items)

    async def catch_up(self) -> None:
        for one in await self.pool.fetch(f"SELECT id, due, tries FROM {self.failed} LIMIT {_PAGE}"):
            tried = one["tries"] + 1
            try:
                await self.set_timers([Item(one["id"], one["due"])])
            except NoTimer:
                await self.pool.execute(f"UPDATE {self.failed} SET tries = $1 WHERE id = $2", tried, one["id"])
                self.counted["alarms"] += tried == _ALARM_AFTER
            else:
                await self.pool.execute(f"DELETE FROM {self.failed} WHERE id = $1", one["id"])
                self.counted["compensated"] += 1


class Open(NoCare):
    """The timer is written while the row is not committed yet: the transaction waits for another server."""

    name = "S19-open"
    title = "two writes, the second within the transaction of the first"
    flaws = (
        Flaw(
            "a writer that dies before the commit leaves a timer for an order that never was", "writer",
            when("fired_without_a_row", "{fired_without_a_row:.0f} timers fired for orders that do not exist"),
        ),
    )  # fmt: skip

    async def schedule(self, items: Sequence[Item]) -> None:
        async with self.pool.acquire() as connection, connection.transaction():
            await self.place(connection, items)
            await self.set_timers(items)


class Outbox(NoCare):
    """Order and timer are one transaction; what is in the outbox gets to Redis, again and again until it is there."""

    name = "S19-outbox"
    title = "one transaction and an outbox, whose relay sets the timer"
    roles = ("relay", "poller")
    flaws = ()

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.outbox = self.table("outbox")

    async def prepare(self) -> None:
        await super().prepare()
        await self.pool.execute(f"CREATE TABLE {self.outbox} (line bigserial PRIMARY KEY, id text, due bigint)")

    async def schedule(self, items: Sequence[Item]) -> None:
        async with self.pool.acquire() as connection, connection.transaction():
            await self.place(connection, items)
            await connection.executemany(f"INSERT INTO {self.outbox} (id, due) VALUES ($1, $2)", items)

    async def catch_up(self) -> int:
        """How many it was. If we die before the commit they are relayed again: the same members at the same scores."""
        async with self.pool.acquire() as connection, connection.transaction():
            lines = await connection.fetch(
                f"DELETE FROM {self.outbox} WHERE line IN (SELECT line FROM {self.outbox} "
                f"ORDER BY line LIMIT {_PAGE} FOR UPDATE SKIP LOCKED) RETURNING id, due"
            )
            if lines:
                await self.set_timers([Item(one["id"], one["due"]) for one in lines])
        self.counted["relayed"] += len(lines)
        return len(lines)


class OneTransaction(_Orders, OnPostgres):
    """Order and task are one transaction, and there is no second store."""

    name = "S19-bide"
    title = "one transaction with bide in it"
    shows = ("writer",)
    flaws = ()

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.orders = f"{setting.prefix}.orders"

    async def open(self) -> None:
        await super().open()
        self.pool = await postgres_pool(self, _CONNECTIONS)

    async def schedule(self, items: Sequence[Item]) -> None:
        async with self.pool.acquire() as connection, connection.transaction(), self.app.using(connection):
            await self.place(connection, items)
            await super().schedule(items)
