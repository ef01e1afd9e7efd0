"""An open store: its servers, their set-up and clock, and a script client for each kind of operation.

Also the data of the namespace as a whole: its layout, the register of workers, and the log of events.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any
from uuid import uuid4

import msgspec
from msgspec import Struct

from bide.core.errors import SetupError, StoreCorrupt, StoreError, StoreMismatch
from bide.core.events import Event
from bide.core.instants import In, Millis
from bide.core.records import OutcomeKind, Record, Ref, Settlement, Topic
from bide.ports import Finding
from bide.stores.clocks import ServerTime
from bide.stores.listeners import Listeners
from bide.stores.redis import writing
from bide.stores.redis.address import Address
from bide.stores.redis.layout import VERSION, Layout
from bide.stores.redis.leasing import LateAnswers, Leaser
from bide.stores.redis.reading import Reader
from bide.stores.redis.script_client import ScriptClient, script
from bide.stores.redis.topology import Lost, NotSent, Topology
from bide.stores.redis.wakes import Subscriptions

# --- the server, and doctor

_FULL = 0.8
"""The part of maxmemory from which on `doctor` warns."""
OLDEST = (6, 2)


class Server(Struct, frozen=True, kw_only=True):
    """A server, by its answer to INFO."""

    version: tuple[int, ...]
    """The version of Redis; for Valkey, the Redis version that it is compatible with."""
    shown: str
    cluster: bool
    info: Mapping[str, str]

    @property
    def knows_flags(self) -> bool:
        """True if the server supports script flags such as allow-oom: Redis 7, and every Valkey."""
        return self.version >= (7, 0)

    @property
    def shards_channels(self) -> bool:
        return self.version >= (7, 0)

    def check(self, address: Address) -> None:
        """Raise SetupError for a server on which bide could lose tasks or cannot work."""
        if self.version < OLDEST:
            raise SetupError(f"{address.shown}: {self.shown} is too old; bide needs Redis 6.2 or newer, or Valkey")
        policy = self.info.get("maxmemory_policy", "noeviction")
        if policy.startswith("allkeys"):
            raise SetupError(
                f"{address.shown}: maxmemory-policy is {policy}, which throws tasks away when memory is short; "
                "set it to noeviction (CONFIG SET maxmemory-policy noeviction)"
            )
        if self.cluster and address.kind != "cluster":
            raise SetupError(f"{address.shown}: this server is part of a Cluster; use redis+cluster://{address.shown}")


async def examine(reader: Reader) -> Server:
    """Query the server's INFO."""
    [text] = await reader.ask([(None, ("INFO",))])
    return server_of(text)


def server_of(text: bytes) -> Server:
    """Parse an answer to INFO."""
    info = dict(line.split(":", 1) for line in text.decode().splitlines() if ":" in line)
    version = tuple(int(part) for part in re.findall(r"\d+", info.get("redis_version", "0"))[:3])
    valkey = info.get("valkey_version")
    product = "Valkey" if valkey or info.get("server_name") == "valkey" else "Redis"
    return Server(
        version=version,
        shown=f"{product} {valkey or info.get('redis_version', '?')}",
        cluster=info.get("cluster_enabled") == "1",
        info=info,
    )


async def diagnose(reader: Reader, topology: Topology, where: str, time: ServerTime) -> list[Finding]:
    """Check every server with data. Queries INFO again, because a server's settings may have changed since `open`."""
    layout = reader.layout
    found = [Finding(ok=True, what=f"{where}: namespace {layout.namespace}, {layout.shards} shards")]
    for connection in await topology.masters():
        [text] = await connection.ask([("INFO",)])
        found += [
            Finding(ok=one.ok, what=f"{connection.name}: {one.what}", advice=one.advice, severe=one.severe)
            for one in _findings(server_of(text))
        ]
    found.append(time.finding())
    counts = await reader.ask([(shard, ("HGET", layout.counts(shard), "damaged")) for shard in range(layout.shards)])
    damaged = sum(int(count or 0) for count in counts)
    if damaged:
        advice = "their bodies were missing or unreadable; docs/redis.md says what to do"
        found.append(Finding(False, f"{damaged} damaged tasks were set aside", advice, severe=True))
    return found


def _findings(server: Server) -> Iterator[Finding]:
    """The findings of one server's INFO."""
    info = server.info
    yield _found(
        server.knows_flags,
        server.shown,
        f"{server.shown} may refuse scripts that drain when its memory is full",
        "upgrade to Redis 7 or Valkey, where only new work is refused",
    )
    yield _found(
        info.get("aof_enabled") == "1",
        "appendonly is on; appendfsync decides what a power cut may cost",
        "appendonly is off: a crash loses what came since the last snapshot",
        "CONFIG SET appendonly yes, and appendfsync always or everysec",
        severe=True,
    )
    policy, advice = info.get("maxmemory_policy", "noeviction"), "CONFIG SET maxmemory-policy noeviction"
    if policy.startswith("volatile"):
        what = f"maxmemory-policy {policy} may throw away the answers that are kept for a repeated call"
        yield Finding(False, what, f"{advice}, or a call whose answer is lost may be done twice")
    else:
        good, bad = "maxmemory-policy noeviction throws nothing away", f"maxmemory-policy {policy} throws tasks away"
        yield _found(policy == "noeviction", good, bad, advice, severe=True)
    limit, used = int(info.get("maxmemory", 0)), int(info.get("used_memory", 0))
    if limit:
        what = f"memory is at {used / limit:.0%} of maxmemory"
        advice = "give it more, or let it drain; at the limit schedule answers StoreFull"
        yield _found(used / limit < _FULL, what, what, advice)
    else:
        what = "maxmemory is not set: when the machine is full, the server dies instead of refusing new work"
        yield Finding(False, what, "CONFIG SET maxmemory to what the machine can spare")
    names = ("rdb_last_bgsave_status", "aof_last_write_status", "aof_last_bgrewrite_status")
    failing = [name for name in names if info.get(name, "ok") != "ok"]
    good, bad = "what it writes to disk arrives", f"writing to disk fails: {', '.join(failing)}"
    yield _found(not failing, good, bad, "see its log, and its disk", severe=True)


def _found(ok: bool, good: str, bad: str, advice: str, *, severe: bool = False) -> Finding:
    return Finding(True, good) if ok else Finding(False, bad, advice, severe=severe)


# --- the open store

_log = logging.getLogger("bide.redis")
_KINDS = ("add", "change", "lease", "extend", "settle", "purge")
_CONFIRMED = frozenset({"add", "change", "settle"})
"""The kinds whose answers are promises, so that they wait for replicas."""
_NOTIFYING = _CONFIRMED | {"lease"}
"""The kinds that change when other workers should lease."""
EVENTS_KEPT = 10_000
_MOST_SHARDS = 1024
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


class Runtime:
    """The state of a store between `open` and `close`."""

    def __init__(
        self,
        address: Address,
        layout: Layout,
        topology: Topology,
        time: ServerTime,
        server: Server,
        *,
        patience: float,
        silence: float,
        by_server: bool,
    ) -> None:
        self.address = address
        self.layout = layout
        self.topology = topology
        self.time = time
        self.server = server
        self.by_server = by_server
        self.reader = Reader(layout, topology, patience=patience)
        name = uuid4().hex[:16]
        sharded = server.cluster and server.shards_channels
        channels = [layout.wake_channel(shard if sharded else None) for shard in range(layout.shards)]
        self.clients = {
            kind: ScriptClient(
                script(kind, flags=server.knows_flags),
                f"{name}{kind[:2]}".encode(),
                layout,
                topology,
                time,
                # a lease not extended in this round may be in the next; a longer wait would cost the other leases
                patience=min(patience, silence) if kind == "extend" else patience,
                publish=("SPUBLISH" if sharded else "PUBLISH") if kind in _NOTIFYING else "",
                channels=channels if kind in _NOTIFYING else (),
                wait_replicas=address.wait_replicas if kind in _CONFIRMED else 0,
                wait_for=silence / 4,  # short, so that no other call on the connection is taken for lost
            )
            for kind in _KINDS
        }
        listeners = Listeners(_log)
        leasing, late = self.clients["lease"], None
        if server.cluster and by_server:
            late = LateAnswers(leasing, time, topology.part_of, give_back=self._give_back, notify=listeners.notify)
        self.leaser = Leaser(leasing, layout, time, late, by_server=by_server)
        self.subscriptions = Subscriptions(
            topology, layout, name, listeners, self.leaser, sharded=sharded, patience=silence
        )

    async def prepare(self) -> None:
        """Load the scripts on every server, and read the clock."""
        texts = [("SCRIPT", "LOAD", client.script.text) for client in self.clients.values()]
        for connection in await self.topology.masters():
            try:
                await connection.ask(texts)
            except (NotSent, Lost) as error:
                _log.info("the scripts will be loaded when they are first needed: %s", error)
        await self.read_clock()

    async def read_clock(self) -> None:
        """Query the server's time. Every answer carries it; this is for the first reading, and for doctor."""

        async def ask() -> int:
            [(seconds, micros)] = await self.reader.ask([(None, ("TIME",))])
            return int(seconds) * 1_000_000 + int(micros)

        await self.time.read(ask)
        if self.by_server:
            self.time.warn_of_skew(self.address.shown)

    async def write(
        self, kind: str, asked: Sequence[Any], words: writing.Words, take: writing.Take, *before: int, now: str
    ) -> list[Any]:
        """Write a batch; return one answer for each item, or the error of its shard."""
        calls, places = writing.sorted_out(asked, self.layout, words, *before)
        answers: list[Any] = [None] * len(asked)
        wakes = kind in ("add", "change")

        def read(call: int, reply: Any) -> None:
            mine = places[call]
            if type(reply) is not list:
                for place in mine:
                    answers[place] = reply
                return
            take(asked, mine, reply, answers)
            if wakes:
                self.leaser.note_written(answers, mine)

        await self.clients[kind].run(calls, read, now=now)
        return answers

    async def _give_back(self, records: Sequence[Record]) -> None:
        """End leases whose handlers have not begun: the tasks are due again at once, and no attempt is counted."""
        ends = [Settlement(record.topic, record.key, record.token, OutcomeKind.DEFER, In(0)) for record in records]
        for answer in await self.write("settle", ends, writing.settlement_writer(0), writing.take_accepted, now=""):
            if isinstance(answer, StoreError):
                _log.warning("a lease could not be given back, and ends by itself: %s", answer)

    async def close(self) -> None:
        try:
            await self.subscriptions.close()
            await self.leaser.close()
        finally:
            await self.topology.close()


# --- data of the namespace as a whole


async def agree(reader: Reader, namespace: str, shards: int | None, default: int) -> int:
    """Record the layout if the namespace is new; return its number of shards. Raises StoreMismatch if it differs."""
    key = Layout(namespace, 1).common("layout")
    read = (None, ("HMGET", key, "version", "shards"))
    [found] = await reader.ask([read])
    if None in found:  # read first, so that a worker can open and drain an existing namespace when memory is full
        *_, found = await reader.ask(
            [(None, ("HSETNX", key, "version", VERSION)), (None, ("HSETNX", key, "shards", shards or default)), read]
        )
    try:
        version, there = (int(one) for one in found)
        if not 1 <= there <= _MOST_SHARDS:
            raise ValueError
    except ValueError:
        raise StoreCorrupt(
            f"namespace {namespace}: its layout cannot be read: {found!r}; give it back what it was, in the fields "
            f"version ({VERSION}) and shards of the key {key.decode()}"
        ) from None
    if version != VERSION:
        raise StoreMismatch(
            f"namespace {namespace}: its layout is version {version}, this bide works with {VERSION}; "
            f"{'upgrade bide here' if version > VERSION else 'drain it with the older bide, then begin a new one'}"
        )
    if shards is not None and shards != there:
        raise StoreMismatch(
            f"namespace {namespace}: it has {there} shards, and ?shards={shards} was asked for; leave that out, or "
            "give another namespace: the number is fixed when the first client opens it"
        )
    return there


async def announce(
    reader: Reader, holder: str, topics: Collection[Topic], until: Millis, now: Millis, *, flags: bool
) -> dict[str, list[Topic]]:
    """Register a worker's topics, and return the live workers. Removes expired workers.

    `flags`: the server supports script flags, so that this works when its memory is full.
    """
    key, packed = reader.layout.common("workers"), _encode((until, sorted(topics)))
    said: tuple[Any, ...] = ("HDEL", key, holder)
    if topics:
        said = ("EVAL", _ANNOUNCE, 1, key, holder, packed) if flags else ("HSET", key, holder, packed)
    _, entries = await reader.ask([(None, said), (None, ("HGETALL", key))])
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
        await reader.ask([(None, ("HDEL", key, *over))])
    return live


async def record(reader: Reader, events: Sequence[Event], kept: int) -> None:
    arguments: list[Any] = []
    for event in events[-kept:]:
        arguments += [f"{event.topic}\0{event.key}", _encode(event)]
    keys = (reader.layout.common("events"), reader.layout.common("event-refs"))
    for first in range(0, len(arguments), 2 * _AT_ONCE):
        part = arguments[first : first + 2 * _AT_ONCE]
        await reader.ask([(None, ("EVAL", _RECORD, 2, *keys, kept, *part))])


async def events(reader: Reader, ref: Ref | None, limit: int) -> list[Event]:
    log, index = reader.layout.common("events"), reader.layout.common("event-refs")
    if ref is None:
        [entries] = await reader.ask([(None, ("XREVRANGE", log, "+", "-", "COUNT", limit))])
    else:
        prefix = f"{ref.topic}\0{ref.key}\0".encode()
        bounds = (b"[" + prefix, b"(" + prefix[:-1] + b"\1")
        [members] = await reader.ask([(None, ("ZRANGEBYLEX", index, *bounds))])
        known = [one for one in (member[len(prefix) :] for member in members) if _STREAM_ID.fullmatch(one)]
        ids = sorted(known, key=_stream_order, reverse=True)[:limit]
        replies = await reader.ask([(None, ("XRANGE", log, one, one)) for one in ids])
        entries = [entry for reply in replies for entry in reply]
    found: list[Event] = []
    for _, fields in entries:
        try:
            found.append(_decode_event(fields[3]))
        except (IndexError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            _log.warning("an event of the log cannot be read, and is passed over")
    return found


def _stream_order(entry: bytes) -> tuple[int, int]:
    millis, _, number = entry.partition(b"-")
    return int(millis), int(number)
