"""The Redis store: N shards, each a few keys that one script at a time changes. No leader, no lock, no repair job.

**The cost**, on the server: a schedule about 4 microseconds, a lease and its settle about 10, in batches; a plain task
takes about 260 bytes in addition to its payload. See docs/redis.md.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec

from bide.core.answers import Answer
from bide.core.errors import StoreError
from bide.core.events import Event
from bide.core.instants import Millis
from bide.core.payloads import slices
from bide.core.records import Change, Filter, Found, Lease, Leased, NewTask, Page, Record, Ref, Settlement, Tally, Topic
from bide.ports import COUNTED, Features, Finding, Listening, OnTaken, OnWake
from bide.stores.batches import gathered
from bide.stores.redis import reading, writing
from bide.stores.redis.address import Address, address_of
from bide.stores.redis.layout import VERSION, Layout, text_of
from bide.stores.redis.reading import Reader
from bide.stores.redis.runtime import Runtime, agree, server_of
from bide.stores.redis.script_client import Call
from bide.stores.redis.topology import Command, topology_of
from bide.stores.server import ServerStore, WhichClock

_AT_FIRST = 3.0
"""Seconds that opening waits for a server that cannot be reached."""
SHARDS = 16
"""The number of shards of a new namespace, unless the URL gives one."""
_LINES = 4
"""Groups of one server's shards that are called concurrently. With one group, the server and the caller take turns
working. With 256 callers: 11 µs a task with one group, 8.4 with two or four; bursts gain 8 % with four."""


# --- workers and events

_log = logging.getLogger("bide.redis")
_AT_ONCE = 500
"""The most events written in one call, so that no other call waits for long."""

_STREAM_ID = re.compile(rb"[0-9]{1,19}-[0-9]{1,19}")
_encode = msgspec.msgpack.encode
_decode_event = msgspec.msgpack.Decoder(Event).decode
_decode_worker = msgspec.msgpack.Decoder(tuple[int, msgspec.Raw]).decode
_decode_topics = lru_cache(1024)(msgspec.msgpack.Decoder(list[str]).decode)
"""Cached, because every worker reads the topics of all others every two seconds, and they hardly ever change."""

# Adds events, and drops the oldest if there are too many. KEYS: 1 the log, 2 its index by task;
# ARGV: 1 the number to keep, then for each event: topic NUL key, the event.
_RECORD = """
local kept = tonumber(ARGV[1])
for n = 2, #ARGV, 2 do
  local id = redis.call('XADD', KEYS[1], '*', 't', ARGV[n], 'e', ARGV[n + 1])
  redis.call('ZADD', KEYS[2], 0, ARGV[n] .. '\\0' .. id)
end
local over = redis.call('XLEN', KEYS[1]) - kept
if over > 0 then
  for _, entry in ipairs(redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', over)) do
    if entry[2][2] then redis.call('ZREM', KEYS[2], entry[2][2] .. '\\0' .. entry[1]) end
    redis.call('XDEL', KEYS[1], entry[1])
  end
end
return 1
"""

_ANNOUNCE = "#!lua flags=allow-oom\nreturn redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])"


class RedisStore(ServerStore[Runtime]):
    """Tasks in Redis or Valkey at `url`; see `address` for the accepted URLs.

    `clock`: by default the server's, whatever this machine's clock says; "caller" uses the `now` of each call, for
    tests and for clocks that run faster. `patience`: seconds for which a call is retried while a server is away.
    `silence`: seconds without an answer after which a connection is given up.
    """

    def __init__(
        self,
        url: str,
        *,
        clock: WhichClock = "server",
        patience: float = 10.0,
        silence: float = 2.0,
        events_kept: int = 10_000,
    ) -> None:
        self._address: Address = address_of(url)
        super().__init__(self._address.shown, clock, patience=patience, silence=silence)
        self._patience = patience
        self._silence = silence
        self._events_kept = events_kept

    def __repr__(self) -> str:
        return f"RedisStore({self._shown}, namespace={self._address.namespace!r})"

    @property
    def features(self) -> Features:
        return Features(wakes=self, workers=self, events=self, clock=self, parts=self, schema=self, diagnosis=self)

    async def _connect(self) -> Runtime:
        """Connect, check the server, and agree on the layout. Raises StoreUnavailable, StoreMismatch, SetupError."""
        address = self._address
        layout = Layout(address.namespace, address.shards or SHARDS)
        topology = topology_of(address, layout, patience=self._silence)
        try:
            # less patience: errors in an address show at once
            reader = Reader(layout, topology, patience=min(_AT_FIRST, self._patience))
            [info] = await reader.ask([(None, ("INFO",))])
            server = server_of(info)
            server.check(address)
            shards = await agree(reader, address.namespace, address.shards, SHARDS)
            if shards != layout.shards:
                await topology.close()
                layout = Layout(address.namespace, shards)
                topology = topology_of(address, layout, patience=self._silence)
            opened = Runtime(
                address, layout, topology, server,
                patience=self._patience, silence=self._silence, by_server=self._by_server,
            )  # fmt: skip
            await opened.prepare()
        except BaseException:
            await topology.close()
            raise
        return opened

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
        for part in writing.by_load(asked, opened.layout.shards):
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
                (shard, ("ZRANGEBYSCORE", layout.finished[shard], "-inf", int(ends), "LIMIT", 0, limit))
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
        key, packed = opened.layout.common("workers"), _encode((until, sorted(topics)))
        if not topics:
            if (late := opened.leaser.late) is not None:
                await late.leave(holder)
            said: Command = ("HDEL", key, holder)
        elif opened.server.is_modern:
            said = ("EVAL", _ANNOUNCE, 1, key, holder, packed)
        else:
            said = ("HSET", key, holder, packed)
        _, entries = await opened.reader.ask([(None, said), (None, ("HGETALL", key))])
        live: dict[str, list[Topic]] = {}
        over: list[bytes] = []
        for name, packed in zip(entries[::2], entries[1::2], strict=True):
            try:
                ends, raw = _decode_worker(packed)
                its = _decode_topics(bytes(raw))
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):  # not written by a worker
                ends, its = 0, []
            if ends > now:
                live[name.decode(errors="replace")] = its
            else:
                over.append(name)
        if over:
            await opened.reader.ask([(None, ("HDEL", key, *over))])
        opened.leaser.share(holder, topics, live)
        return live

    # --- features.events

    async def record(self, events: Sequence[Event]) -> None:
        reader, kept = self._open().reader, self._events_kept
        keys = reader.layout.common("events"), reader.layout.common("event-refs")
        for part in slices(events[-kept:], _AT_ONCE):
            lines: list[str | bytes] = []
            for event in part:
                lines += f"{event.topic}\0{event.key}", _encode(event)
            await reader.ask([(None, ("EVAL", _RECORD, 2, *keys, kept, *lines))])

    async def events(self, ref: Ref | None = None, *, limit: int = 100) -> list[Event]:
        reader = self._open().reader
        log, index = reader.layout.common("events"), reader.layout.common("event-refs")
        if ref is None:
            [entries] = await reader.ask([(None, ("XREVRANGE", log, "+", "-", "COUNT", limit))])
        else:
            prefix = f"{ref.topic}\0{ref.key}\0".encode()
            bounds = (b"[" + prefix, b"(" + prefix[:-1] + b"\1")
            [members] = await reader.ask([(None, ("ZRANGEBYLEX", index, *bounds))])
            known = [one for one in (member[len(prefix) :] for member in members) if _STREAM_ID.fullmatch(one)]
            ids = sorted(known, key=lambda one: [*map(int, one.split(b"-"))], reverse=True)[:limit]
            replies = await reader.ask([(None, ("XRANGE", log, one, one)) for one in ids])
            entries = [entry for reply in replies for entry in reply]
        found: list[Event] = []
        for _, fields in entries:
            try:
                found.append(_decode_event(fields[3]))
            except (IndexError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                _log.warning("an event of the log cannot be read and is skipped")
        return found

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

    async def diagnose(self) -> list[Finding]:
        return await self._open().diagnose()
