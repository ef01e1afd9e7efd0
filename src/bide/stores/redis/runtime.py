"""An open store: its servers, their set-up and clock, and a script client for each kind of operation.

Also the agreement on the layout of the namespace.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from uuid import uuid4

from msgspec import Struct
from msgspec.structs import replace

from bide.core.errors import SetupError, StoreCorrupt, StoreError, StoreMismatch
from bide.core.instants import In
from bide.core.records import OutcomeKind, Record, Settlement
from bide.ports import Finding
from bide.stores.listeners import Listeners
from bide.stores.redis import writing
from bide.stores.redis.address import Address
from bide.stores.redis.layout import VERSION, Layout
from bide.stores.redis.leasing import LateAnswers, Leaser
from bide.stores.redis.reading import Reader
from bide.stores.redis.script_client import ScriptClient, script
from bide.stores.redis.topology import Topology
from bide.stores.redis.wakes import Subscriptions
from bide.stores.resending import Lost, NotSent
from bide.stores.server import ServerTime

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
    def is_modern(self) -> bool:
        """True if it supports script flags such as allow-oom, and sharded channels: Redis 7, and every Valkey."""
        return self.version >= (7, 0)

    def check(self, address: Address) -> None:
        """Raise SetupError for a server on which bide could lose tasks or cannot work."""
        if self.version < OLDEST:
            raise SetupError(f"{address.shown}: {self.shown} is too old; bide needs Redis 6.2 or newer, or Valkey")
        policy = self.info.get("maxmemory_policy", "noeviction")
        if policy.startswith("allkeys"):
            raise SetupError(
                f"{address.shown}: maxmemory-policy is {policy}, which evicts tasks when memory is short; "
                "set it to noeviction (CONFIG SET maxmemory-policy noeviction)"
            )
        if self.cluster and address.kind != "cluster":
            raise SetupError(f"{address.shown}: this server is part of a Cluster; use redis+cluster://{address.shown}")


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


def _findings(server: Server) -> Iterator[Finding]:
    """The findings of one server's INFO."""
    info = server.info
    yield _found(
        server.is_modern,
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
        good, bad = "maxmemory-policy noeviction evicts nothing", f"maxmemory-policy {policy} evicts tasks"
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
    good, bad = "writes to disk succeed", f"writing to disk fails: {', '.join(failing)}"
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
_MOST_SHARDS = 1024


class Runtime:
    """The state of a store between `open` and `close`."""

    def __init__(
        self,
        address: Address,
        layout: Layout,
        topology: Topology,
        server: Server,
        *,
        patience: float,
        silence: float,
        by_server: bool,
    ) -> None:
        self.address = address
        self.layout = layout
        self.topology = topology
        self.time = ServerTime()
        self.server = server
        self.by_server = by_server
        self.reader = Reader(layout, topology, patience=patience)
        name = uuid4().hex[:16]
        sharded = server.cluster and server.is_modern
        channels = [layout.wake_channel(shard if sharded else None) for shard in range(layout.shards)]
        self.clients = {
            kind: ScriptClient(
                script(kind, flags=server.is_modern),
                f"{name}{kind[:2]}".encode(),
                layout,
                topology,
                self.time,
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
            late = LateAnswers(leasing, self.time, topology.part_of, self._give_back, listeners.notify)
        self.leaser = Leaser(leasing, layout, self.time, late, by_server=by_server)
        self.subscriptions = Subscriptions(topology, layout, name, listeners, self.leaser, sharded, silence)

    async def prepare(self) -> None:
        """Load the scripts on every server, and read the clock."""
        texts = [("SCRIPT", "LOAD", client.script.text) for client in self.clients.values()]
        for connection in await self.topology.masters():
            try:
                await connection.ask(texts)
            except (NotSent, Lost) as error:
                _log.info("the scripts will be loaded when they are first needed: %s", error)
        await self.read_clock()

    async def read_clock(self) -> int:
        """Query the server's time. Every answer carries it; this is for the first reading, and for doctor."""

        async def ask() -> int:
            [(seconds, micros)] = await self.reader.ask([(None, ("TIME",))])
            return int(seconds) * 1_000_000 + int(micros)

        micros = await self.time.read(ask)
        if self.by_server:
            self.time.warn_of_skew(self.address.shown)
        return micros

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
                _log.warning("a lease could not be released; it expires by itself: %s", answer)

    async def diagnose(self) -> list[Finding]:
        """Check every server with data. Queries INFO again, because a server's settings may have changed since."""
        layout = self.layout
        what = f"{self.address.shown}: namespace {layout.namespace}, {layout.shards} shards"
        found = [Finding(ok=True, what=what)]
        for connection in await self.topology.masters():
            [text] = await connection.ask([("INFO",)])
            found += [replace(one, what=f"{connection.name}: {one.what}") for one in _findings(server_of(text))]
        counts = await self.reader.ask(
            [(shard, ("HGET", layout.counts[shard], "damaged")) for shard in range(layout.shards)]
        )
        damaged = sum(int(count or 0) for count in counts)
        if damaged:
            advice = "their bodies were missing or unreadable; docs/redis.md says what to do"
            found.append(Finding(False, f"{damaged} damaged tasks were set aside", advice, severe=True))
        return found

    async def close(self) -> None:
        try:
            await self.subscriptions.close()
            if self.leaser.late is not None:
                await self.leaser.late.close()
        finally:
            await self.topology.close()


# --- the layout


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
