"""The Redis store: N shards, each a few keys that one script at a time changes. No leader, no lock, no repair job.

**The cost**, on the server: a schedule about 4 microseconds, a lease and its settle about 10, in batches; a plain task
takes about 260 bytes in addition to its payload. See docs/redis.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from bide.core.answers import Answer
from bide.core.errors import BadInput, StoreError, StoreUnavailable
from bide.core.events import Event
from bide.core.instants import Millis
from bide.core.records import Change, Filter, Found, Lease, Leased, NewTask, Page, Record, Ref, Settlement, Tally, Topic
from bide.ports import COUNTED, Clock, Features, Listening, OnTaken, OnWake
from bide.ports import Finding as Examined
from bide.stores.batches import gathered
from bide.stores.clocks import ServerTime, StoreClock
from bide.stores.redis import reading, runtime, writing
from bide.stores.redis.address import Address, address_of
from bide.stores.redis.layout import VERSION, Layout, text_of
from bide.stores.redis.reading import Reader
from bide.stores.redis.runtime import Runtime, examine
from bide.stores.redis.script_client import Call
from bide.stores.redis.topology import topology_of

_AT_FIRST = 3.0
"""Seconds that opening waits for a server that cannot be reached."""
LONGEST_PATIENCE = 45.0
"""Seconds: a shard keeps its answers for 600, and a resend must arrive well before that."""
SHARDS = 16
"""The number of shards of a new namespace, unless the URL gives one."""
_LINES = 4
"""Groups of one server's shards that are called concurrently. With one group, the server and the caller take turns
working. With 256 callers: 11 µs a task with one group, 8.4 with two or four; bursts gain 8 % with four."""


class RedisStore:
    """Tasks in Redis or Valkey at `url`; see `address` for the accepted URLs.

    `clock`: by default the server's, whatever this machine's clock says; "caller" uses the `now` of each call, for
    tests and for clocks that run faster. `patience`: seconds for which a call is retried while a server is away.
    `silence`: seconds without an answer after which a connection is given up.
    """

    def __init__(
        self,
        url: str,
        *,
        clock: Literal["server", "caller"] = "server",
        patience: float = 10.0,
        silence: float = 2.0,
        events_kept: int = runtime.EVENTS_KEPT,
    ) -> None:
        self._address: Address = address_of(url)
        if clock not in ("server", "caller"):
            raise BadInput("clock", clock, '"server" or "caller"')
        if not 0 < patience <= LONGEST_PATIENCE:
            raise BadInput("patience", patience, f"seconds above 0, at most {LONGEST_PATIENCE}")
        if not 0 < silence <= LONGEST_PATIENCE:
            raise BadInput("silence", silence, f"seconds above 0, at most {LONGEST_PATIENCE}")
        self._by_server = clock == "server"
        self._patience = patience
        self._silence = silence
        self._events_kept = events_kept
        self._opened: Runtime | None = None
        self._changing = asyncio.Lock()
        """Serializes `open` and `close`: after two concurrent opens, only one connection would ever be closed."""

    def __repr__(self) -> str:
        return f"RedisStore({self._address.shown}, namespace={self._address.namespace!r})"

    @property
    def features(self) -> Features:
        return Features(wakes=self, workers=self, events=self, clock=self, parts=self, schema=self, diagnosis=self)

    # --- open and close

    async def open(self) -> None:
        """Connect, check the server, and agree on the layout. Raises StoreUnavailable, StoreMismatch, SetupError."""
        async with self._changing:
            if self._opened is None:
                self._opened = await self._connect()

    async def _connect(self) -> Runtime:
        address = self._address
        layout = Layout(address.namespace, address.shards or SHARDS)
        time = ServerTime()
        topology = topology_of(address, layout, patience=self._silence)
        try:
            # less patience: errors in an address show at once
            reader = Reader(layout, topology, patience=min(_AT_FIRST, self._patience))
            server = await examine(reader)
            server.check(address)
            shards = await runtime.agree(reader, address.namespace, address.shards, SHARDS)
            if shards != layout.shards:
                await topology.close()
                layout = Layout(address.namespace, shards)
                topology = topology_of(address, layout, patience=self._silence)
            opened = Runtime(
                address, layout, topology, time, server,
                patience=self._patience, silence=self._silence, by_server=self._by_server,
            )  # fmt: skip
            await opened.prepare()
        except BaseException:
            await topology.close()
            raise
        return opened

    async def close(self) -> None:
        async with self._changing:
            if self._opened is not None:
                opened, self._opened = self._opened, None
                await opened.close()

    def _open(self) -> Runtime:
        if self._opened is None:
            raise StoreUnavailable(f"{self._address.shown}: the store is not open")
        return self._opened

    def _now(self, now: Millis) -> str:
        """The time for a script; empty if the script should use the server's clock."""
        return "" if self._by_server else str(now)

    # --- clients

    async def add(self, tasks: Sequence[NewTask], *, now: Millis) -> list[Answer]:
        return await self._write("add", tasks, writing.new_writer(), writing.take_added, now)

    async def change(self, changes: Sequence[Change], *, now: Millis) -> list[Answer]:
        return await self._write("change", changes, writing.write_change, writing.take_changed, now)

    async def settle(self, outcomes: Sequence[Settlement], *, now: Millis) -> list[bool]:
        return await self._write("settle", outcomes, writing.settlement_writer(now), writing.take_accepted, now)

    async def extend(self, leases: Sequence[Lease], *, now: Millis, until: Millis) -> list[bool]:
        return await self._write("extend", leases, writing.write_lease, writing.take_accepted, now, until - now)

    async def _write(
        self, kind: str, asked: Sequence[Any], words: writing.Words, take: writing.Take, now: Millis, *before: int
    ) -> list[Any]:
        opened = self._open()
        answers: list[Any] = []
        for part in writing.slices(asked, opened.layout.shards):
            answers += await opened.write(kind, part, words, take, *before, now=self._now(now))
        return gathered(answers)

    def part_of(self, topic: Topic, key: str) -> int:
        """See `Partitioned`: shards are divided by server, and each server's shards into `_LINES` groups."""
        opened = self._open()
        shard = opened.layout.shard_of(topic, key)
        return opened.topology.part_of(shard) * _LINES + shard % _LINES

    # --- reads

    async def get(self, refs: Sequence[Ref]) -> list[Record | None]:
        return await self._open().reader.get(refs) if refs else []

    async def find(self, where: Filter, page: Page) -> Found:
        return await reading.find(self._open().reader, where, page)

    async def tally(
        self, edges: Sequence[Millis] | None = None, *, upto: int = COUNTED, topics: Collection[Topic] | None = None
    ) -> Tally:
        return await reading.tally(self._open().reader, edges, topics)

    # --- workers

    async def lease(self, wants: Mapping[Topic, int], *, now: Millis, until: Millis, holder: str) -> Leased:
        return await self._open().leaser.lease(wants, now, until, holder)

    async def purge(self, *, now: Millis, limit: int) -> int:
        """Forget expired ended tasks. Reads them first, because a script must be given the keys of their topics."""
        opened = self._open()
        if limit <= 0:
            return 0
        layout, ends = opened.layout, now if not self._by_server else opened.time.seconds() * 1000
        found = await opened.reader.ask(
            [
                (shard, ("ZRANGEBYSCORE", layout.finished(shard), "-inf", int(ends), "LIMIT", 0, limit))
                for shard in range(layout.shards)
            ]
        )
        calls: list[Call] = []
        left = limit
        for shard, members in enumerate(found):
            topics: dict[str, list[str]] = {}
            for member in members[:left]:
                topic, _, key = text_of(member).partition("\0")
                topics.setdefault(topic, []).append(key)
            left -= len(members[:left])
            if topics:
                arguments: list[str | bytes | int] = []
                for keys in topics.values():
                    arguments += [len(keys), *keys]
                calls.append(Call(shard, list(topics), arguments))
        replies: list[Any] = [None] * len(calls)
        await opened.clients["purge"].run(calls, replies.__setitem__, now=self._now(now))
        for reply in replies:
            if isinstance(reply, StoreError):
                raise reply
        return sum(reply[2] for reply in replies)

    # --- features.wakes

    async def listen(self, topics: Collection[Topic], on_wake: OnWake, on_taken: OnTaken | None = None) -> Listening:
        return await self._open().subscriptions.listen(topics, on_wake, on_taken)

    # --- features.workers

    async def announce(
        self, holder: str, topics: Collection[Topic], until: Millis, *, now: Millis
    ) -> dict[str, list[Topic]]:
        opened = self._open()
        if not topics:
            await opened.leaser.leave(holder)
        flags = opened.server.knows_flags
        live = await runtime.announce(opened.reader, holder, topics, until, now, flags=flags)
        opened.leaser.share(holder, topics, live)
        return live

    # --- features.events

    async def record(self, events: Sequence[Event]) -> None:
        reader = self._open().reader
        if events:
            await runtime.record(reader, events, self._events_kept)

    async def events(self, ref: Ref | None = None, *, limit: int = 100) -> list[Event]:
        return await runtime.events(self._open().reader, ref, limit)

    # --- features.clock

    async def time(self) -> Millis:
        opened = self._open()
        await opened.read_clock()
        return int(opened.time.seconds() * 1000)

    def clock(self) -> Clock | None:
        return StoreClock(self._open().time) if self._by_server else None

    # --- features.schema

    async def schema_version(self) -> tuple[int, int]:
        opened = self._open()
        [found] = await opened.reader.ask([(None, ("HGET", opened.layout.common("layout"), "version"))])
        return int(found), VERSION

    async def plan(self) -> list[str] | None:
        """None: `open` records the layout, which has only one version so far."""
        return None

    async def migrate(self) -> None:
        """Do nothing: `open` records the layout, which has only one version so far."""
        self._open()

    # --- features.diagnosis

    async def diagnose(self) -> list[Examined]:
        opened = self._open()
        return await runtime.diagnose(opened.reader, opened.topology, opened.address.shown, opened.time)
