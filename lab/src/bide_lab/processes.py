"""The processes of a cell: clients of a strategy and its consumers, which do what the process of the lab orders.

An order is a line of JSON on a child's standard input, whose end means stop, and names a method of `Part` with its
arguments; each is answered by a line of JSON.

A `Part` on a server or on files of SQLite gets its connections and its names here as well.
"""

from __future__ import annotations

import asyncio
import gc
import math
import pkgutil
import sqlite3
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from urllib.parse import unquote, urlsplit

import msgspec

from bide_bench.processes import BenchFault, Child, resident_bytes
from bide_lab.journal import Journal
from bide_lab.strategies import chosen
from bide_lab.strategy import Item, Setting, Strategy, now

_PATIENCE = 30.0
"""Seconds for a process to begin."""
_GRACE = 5.0
"""Seconds for it to end."""
_PAUSE = 0.2
"""Seconds before a consumer that failed is started again, as its supervisor would."""
_BATCH = 500
"""Tasks that are scheduled at once when very many are."""
_LINE = 1 << 26
"""Bytes of an order or an answer at most."""
LabFault = BenchFault
"""A cell could not be played: says what went wrong, and in which process."""


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """The part of one process in a cell."""

    strategy: str
    source: str
    """The file that it is in."""
    setting: Setting
    journal: Path
    role: str = ""
    """Of a consumer; empty for a client. A strategy within one process has both."""
    seconds: float = 0.0
    """How long each effect takes."""
    slow: float = 0.0
    """How long the effect of a key takes that begins with "slow"."""

    @property
    def name(self) -> str:
        """The name in its error messages."""
        return f"{self.strategy} {self.role or 'client'}"


class Step(NamedTuple):
    """One call: when it is made and for which tasks. Times are milliseconds from the beginning of the play."""

    at: int
    verb: str
    items: Sequence[tuple[str, int | None]]
    """Keys, and when they are to be due."""


class Process(Child):
    """A child, as the process of the lab sees it. An order raises `LabFault` if it ended by itself."""

    spec: Spec
    killed = False
    _turn: asyncio.Lock

    @classmethod
    async def begin(cls, spec: Spec, *, log: Path) -> Process:
        """It runs and is connected. Raises `LabFault`."""
        process = await cls.start(
            f"the process {spec.name}", sys.executable, "-P", "-c", f"from {__name__} import main; main()",
            msgspec.json.encode(spec, enc_hook=str).decode(), errors=log,
        )  # fmt: skip
        process.spec, process._turn = spec, asyncio.Lock()
        try:
            await process.receive_any(within=_PATIENCE)
        except BaseException:
            await process.stop()
            raise
        return process

    async def order(self, do: str, **arguments: Any) -> dict[str, Any]:
        """The answer of a method of `Part`; empty if the child was killed."""
        async with self._turn:
            if not self.killed:
                self.send(msgspec.json.encode([do, arguments]).decode())
                try:
                    return await self.receive_any(within=math.inf)
                except LabFault:
                    if not self.killed:
                        raise
            return {}

    async def play(
        self, begin: int, steps: Sequence[Step], *, callers: int = 256, may_fail: bool = False
    ) -> dict[str, Any]:
        """See `Part.play`. Raises `LabFault` if a call failed and none `may_fail`."""
        answer = await self.order("play", begin=begin, steps=steps, callers=callers)
        if answer.get("failed") and not may_fail:
            raise LabFault(f"{answer['failed']} calls failed, the first with {answer['failure']}")
        return answer

    async def usage(self, *, collect: bool = False) -> dict[str, Any]:
        """See `Part.usage`."""
        return await self.order("usage", collect=collect)

    async def measure(self, function: Callable[..., Awaitable[Any]], *arguments: Any) -> dict[str, Any]:
        """The figures of `function(strategy, *arguments)`, called in the child."""
        name = f"{function.__module__}:{function.__qualname__}"
        return await self.order("measure", function=name, arguments=arguments)

    def kill(self) -> None:
        """SIGKILL: it has no chance to do anything more."""
        self.killed = True
        super().kill()

    async def stop(self, *, within: float = _GRACE) -> None:
        """It ends in order; if it does not, by SIGKILL."""
        with suppress(LabFault):
            await super().stop(within=within)


class Recorded:
    """The effect, which is written down when it is done."""

    def __init__(self, spec: Spec, journal: Journal) -> None:
        self._spec = spec
        self._journal = journal

    async def __call__(self, key: str, due: int) -> None:
        at = time.time_ns()
        if seconds := self._seconds(key):
            await asyncio.sleep(seconds)
        self._journal.effect(key, due, at)

    def blocking(self, key: str, due: int) -> None:
        at = time.time_ns()
        if seconds := self._seconds(key):
            time.sleep(seconds)
        self._journal.effect(key, due, at)

    def _seconds(self, key: str) -> float:
        return self._spec.slow if self._spec.slow and key.startswith("slow") else self._spec.seconds


class Part:
    """One process's strategy, and the orders that it is given."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._journal = Journal(spec.journal)
        self._strategy = next(one for one in chosen([spec.source]) if one.name == spec.strategy)(spec.setting)
        self._failure = ""
        """The last one of the consumer."""

    async def run(self) -> None:
        """Until told to stop."""
        orders = asyncio.StreamReader(limit=_LINE)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
        consumer: asyncio.Task[None] | None = None
        try:
            await self._strategy.open()
            if self._spec.role:
                consumer = asyncio.create_task(self._consume())
                await asyncio.sleep(0)
            answer: Mapping[str, Any] = {}
            while True:
                sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
                sys.stdout.flush()
                if not (line := await orders.readline()):
                    break
                do, arguments = msgspec.json.decode(line)
                answer = await getattr(self, do)(**arguments)
        finally:
            while consumer is not None and not consumer.done():  # a driver loses a cancellation that meets an answer
                consumer.cancel()
                await asyncio.wait([consumer], timeout=1)
            await self._strategy.close()
            self._journal.close()

    async def _consume(self) -> None:
        """A consumer that fails is started again by a supervisor, and so is this one, with connections of its own."""
        effect = Recorded(self._spec, self._journal)
        while True:
            try:
                await self._strategy.run(self._spec.role, effect)
                raise RuntimeError(f"{self._spec.strategy}.run({self._spec.role!r}) came to an end")
            except Exception as error:  # noqa: BLE001 - whatever it was, it is told and counted
                self._failure = f"{type(error).__name__}: {error}"
            await asyncio.sleep(_PAUSE)
            if not self._strategy.in_process:
                with suppress(Exception):  # it has failed already, and is thrown away
                    await self._strategy.close()
                self._strategy = type(self._strategy)(self._spec.setting)
                with suppress(OSError):  # the server may be away still: `run` says so, and we come back
                    await self._strategy.open()

    async def play(self, begin: int, steps: Sequence[Step], callers: int) -> dict[str, Any]:
        """Make the calls, each at its time or as soon after it as a caller is free.

        The `seconds` that they took in all, and how many `failed`.
        """
        left = iter(steps)
        failures: list[str] = []
        began = time.time_ns()

        async def caller() -> None:
            for at, verb, items in left:
                pause = (begin + at) / 1000 - time.time()
                if pause > 0:
                    await asyncio.sleep(pause)
                try:
                    await self._call(verb, [(key, None if due is None else begin + due) for key, due in items])
                except Exception as error:  # noqa: BLE001 - the caller has no answer, and is told so
                    failures.append(f"{type(error).__name__}: {error}")

        await asyncio.gather(*(caller() for _ in range(min(callers, len(steps)))))
        return {"seconds": (time.time_ns() - began) / 1e9, "failed": len(failures), "failure": "".join(failures[:1])}

    async def _call(self, verb: str, items: Sequence[tuple[str, int | None]]) -> None:
        strategy, asked = self._strategy, [Item(key, due or 0) for key, due in items]
        numbers = self._journal.begun(verb, items)
        word = "failed"
        try:
            if verb == "schedule":
                await strategy.schedule(asked)
                word = "ok"
            else:
                [item] = asked
                done = await (strategy.reschedule(item) if verb == "reschedule" else getattr(strategy, verb)(item.key))
                word = "ok" if done else "late"
        finally:
            self._journal.answered(numbers, word)

    async def fill(self, count: int, ahead: int) -> dict[str, Any]:
        """Schedule so many tasks, which no journal tells of, due in `ahead` milliseconds; the `seconds` that it took.

        They are made here, so that this memory grows by them and not by an order for them.
        """
        due, began = now() + ahead, time.monotonic()
        for begin in range(0, count, _BATCH):
            numbers = range(begin, min(count, begin + _BATCH))
            await self._strategy.schedule([Item(f"w{number:07d}", due) for number in numbers])
        return {"seconds": time.monotonic() - began}

    async def measure(self, function: str, arguments: Sequence[Any]) -> Any:
        return await pkgutil.resolve_name(function)(self._strategy, *arguments)

    async def usage(self, collect: bool) -> dict[str, Any]:
        """`at`, `cpu` in seconds, `resident` bytes, `threads`, the last `failure` of the consumer, `counts`.

        `collect`: garbage is collected before, which costs processor time.
        """
        if collect:
            gc.collect()
        return {
            "at": time.monotonic(), "cpu": time.process_time(), "resident": resident(),
            "threads": threading.active_count(), "failure": self._failure, "counts": dict(self._strategy.counts()),
        }  # fmt: skip


def resident() -> int:
    """Bytes of this process that are in memory now."""
    return resident_bytes(Path("/proc/self"))


def main() -> None:
    """In a child."""
    with suppress(KeyboardInterrupt):
        spec = msgspec.json.decode(sys.argv[1], type=Spec, dec_hook=lambda kind, given: kind(given))
        asyncio.run(Part(spec).run())


_CONNECTIONS = 64
"""To Redis, of one process; a caller that finds none free waits for one."""


class RedisStrategy(Strategy):
    """One connection pool, and keys that all begin with the cell's prefix."""

    needs: ClassVar[Sequence[str]] = ("redis",)
    redis: Any
    """A plain asyncio client of redis-py."""

    async def open(self) -> None:
        from redis.asyncio import BlockingConnectionPool, Redis

        # without a time-out of the client's, so that a blocking pop may wait for as long as it likes
        pool = BlockingConnectionPool.from_url(
            self.setting.urls["redis"], max_connections=_CONNECTIONS, timeout=None,
            socket_timeout=None, socket_connect_timeout=_PATIENCE,
        )  # fmt: skip
        self.redis = await self.closing.enter_async_context(Redis.from_pool(pool))

    def key(self, name: str) -> str:
        return f"{self.setting.prefix}:{name}"

    async def popped(self, queue: str) -> AsyncIterator[str]:
        """Members of a list, each as soon as it is there."""
        while True:
            yield (await self.redis.blpop([queue], 0))[1].decode()

    async def clear(self) -> None:
        await unlink(self.redis, f"{self.setting.prefix}:*")


async def unlink(redis: Any, pattern: str) -> None:
    """Delete all keys that match, some at a time."""
    keys = [key async for key in redis.scan_iter(match=pattern, count=1000)]
    for begin in range(0, len(keys), 1000):
        await redis.unlink(*keys[begin : begin + 1000])


class _Tables(Strategy):
    """One connection pool, and tables whose names all begin with the cell's prefix."""

    connections: ClassVar[int]
    """Of one process, at most."""
    pool: Any
    """The driver's."""

    def table(self, name: str) -> str:
        return f"{self.setting.prefix}_{name}"


class PostgresStrategy(_Tables):
    """A pool of asyncpg."""

    needs: ClassVar[Sequence[str]] = ("postgres",)
    connections: ClassVar[int] = 8

    async def open(self) -> None:
        self.pool = await postgres_pool(self, self.connections, command_timeout=60)

    async def clear(self) -> None:
        found = await self.pool.fetch(
            "SELECT tablename FROM pg_tables WHERE schemaname = current_schema() AND starts_with(tablename, $1)",
            f"{self.setting.prefix}_",
        )
        for one in found:
            await self.pool.execute(f'DROP TABLE "{one["tablename"]}"')


async def postgres_pool(owner: Strategy, connections: int, **more: float) -> Any:
    """One that is closed with its owner."""
    import asyncpg

    pool = await asyncpg.create_pool(owner.setting.urls["postgres"], min_size=1, max_size=connections, **more)
    owner.closing.push_async_callback(pool.close)
    return pool


def changed(status: str) -> bool:
    """True if a statement changed a row, by the answer of PostgreSQL: "UPDATE 1"."""
    return not status.endswith(" 0")


class MysqlStrategy(_Tables):
    """A pool of asyncmy."""

    needs: ClassVar[Sequence[str]] = ("mysql",)
    connections: ClassVar[int] = 4

    async def open(self) -> None:
        self.pool = await self.pool_of(self.setting.urls[self.needs[0]])

    async def pool_of(self, url: str, place: str = "") -> Any:
        """Connections to the server of a URL, or to `place`, HOST:PORT, as the same user; closed with the strategy."""
        import asyncmy

        more = {"database": urlsplit(url).path.removeprefix("/"), "autocommit": True}
        if place:
            host, _, port = place.partition(":")
            more |= {"host": host, "port": int(port)}
        pool: Any = await asyncmy.create_pool(**{**mysql_server(url), **more}, minsize=1, maxsize=self.connections)
        self.closing.push_async_callback(pool.wait_closed)
        self.closing.callback(pool.close)
        return pool

    async def change(self, statement: str, *values: Any) -> int:
        """Rows that it changed."""
        async with self.pool.acquire() as connection, connection.cursor() as cursor:
            return int(await cursor.execute(statement, values))

    async def change_many(self, statement: str, rows: Sequence[Sequence[Any]]) -> None:
        """One statement for all rows, as the driver folds them."""
        async with self.pool.acquire() as connection, connection.cursor() as cursor:
            await cursor.executemany(statement, rows)

    async def rows(self, statement: str, *values: Any, pool: Any = None) -> Sequence[Sequence[Any]]:
        """All that it finds, asked on a connection of `pool` if that is given."""
        async with (pool or self.pool).acquire() as connection, connection.cursor() as cursor:
            await cursor.execute(statement, values)
            found: Sequence[Sequence[Any]] = await cursor.fetchall()
            return found

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Any]:
        """A cursor; committed at the end of the block, and rolled back if that is left in another way."""
        async with self.pool.acquire() as connection:
            await connection.begin()
            try:
                async with connection.cursor() as cursor:
                    yield cursor
                await connection.commit()
            except BaseException:
                connection.close()  # the server rolls back, and no half-read answer is left to the next
                raise

    async def clear(self) -> None:
        for (one,) in await self.rows("SHOW TABLES LIKE %s", f"{self.setting.prefix}\\_%"):
            await self.change(f"DROP TABLE `{one}`")


def sqlite_file(owner: Strategy, name: str) -> sqlite3.Connection:
    """A file of the cell, on a connection that is closed with its owner, and that threads may share.

    Statements on it take tens of microseconds: a thread for each would cost more than it saves.
    """
    file = sqlite3.connect(owner.setting.folder / name, timeout=10.0, isolation_level=None, check_same_thread=False)
    owner.closing.enter_context(closing(file))
    file.execute("PRAGMA journal_mode = WAL")
    file.execute("PRAGMA synchronous = NORMAL")
    return file


def mysql_server(url: str) -> Mapping[str, Any]:
    """The server and the user of a URL, as the driver takes them."""
    parts = urlsplit(url)
    return {
        "host": parts.hostname or "127.0.0.1", "port": parts.port or 3306,
        "user": unquote(parts.username or "root"), "password": unquote(parts.password or ""),
    }  # fmt: skip
