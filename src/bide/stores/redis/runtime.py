"""An open store: its servers, their clock, and a script client for each kind of operation.

Also what belongs to the namespace as a whole: its layout, the register of workers, and the log of events.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Sequence
from typing import Any
from uuid import uuid4

import msgspec

from bide.core.errors import StoreCorrupt, StoreError, StoreMismatch
from bide.core.events import Event
from bide.core.instants import Millis
from bide.core.records import In, Record, Ref, Settlement, Topic, Verdict
from bide.stores.listeners import Listeners
from bide.stores.redis import writing
from bide.stores.redis.address import Address
from bide.stores.redis.diagnosis import Server
from bide.stores.redis.layout import VERSION, Layout
from bide.stores.redis.leasing import Leaser
from bide.stores.redis.link import Lost, NotSent
from bide.stores.redis.reading import Reader
from bide.stores.redis.script_client import ScriptClient, script
from bide.stores.redis.topology import Nodes
from bide.stores.redis.wakes import Subscriptions
from bide.stores.server_time import ServerTime

_log = logging.getLogger("bide.redis")
_KINDS = ("add", "change", "lease", "extend", "settle", "purge")
_TELLING = frozenset({"add", "change", "settle"})
"""The kinds that may make something wake earlier, and that promise something to a caller: replicas are waited for."""
EVENTS_KEPT = 10_000
_MOST_SHARDS = 1024
_AT_ONCE = 500
"""Events that are written in one call, so that nobody else waits for long."""

_STREAM_ID = re.compile(rb"[0-9]{1,19}-[0-9]{1,19}")
_encode = msgspec.msgpack.encode
_decode_event = msgspec.msgpack.Decoder(Event).decode
_decode_worker = msgspec.msgpack.Decoder(tuple[int, list[str]]).decode

# Adds events, and drops the oldest when there are too many. KEYS 1 the log, 2 its index by task;
# ARGV 1 how many are kept, then for each event: topic NUL key, the event.
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
    """All that is there between `open` and `close`."""

    def __init__(
        self,
        address: Address,
        layout: Layout,
        nodes: Nodes,
        time: ServerTime,
        server: Server,
        *,
        patience: float,
        silence: float,
        by_server: bool,
    ) -> None:
        self.address = address
        self.layout = layout
        self.nodes = nodes
        self.time = time
        self.server = server
        self.by_server = by_server
        self.reader = Reader(layout, nodes, time, patience=patience)
        name = uuid4().hex[:16]
        sharded = server.cluster and server.shards_channels
        channels = [layout.wake_channel(shard if sharded else None) for shard in range(layout.shards)]
        self.callers = {
            kind: ScriptClient(
                script(kind, flags=server.knows_flags),
                f"{name}{kind[:2]}".encode(),
                layout,
                nodes,
                time,
                # one that is not extended in this round may be in the next; waiting longer would cost the others theirs
                patience=min(patience, silence) if kind == "extend" else patience,
                tells=("SPUBLISH" if sharded else "PUBLISH") if kind in _TELLING else "",
                channels=channels if kind in _TELLING else (),
                wait_replicas=address.wait_replicas if kind in _TELLING else 0,
                wait_for=silence / 4,  # nobody else's call on that connection may be taken for lost meanwhile
            )
            for kind in _KINDS
        }
        listeners = Listeners(_log)
        several = server.cluster and by_server
        part_of = nodes.part_of if several else None
        self.leaser = Leaser(
            self.callers["lease"],
            layout,
            time,
            give_back=self._give_back,
            tell=listeners.tell,
            by_server=by_server,
            part_of=part_of,
        )
        self.subscriptions = Subscriptions(
            nodes, layout, name, listeners, self.leaser.told, sharded=sharded, patience=silence
        )

    async def prepare(self) -> None:
        """Give every server the scripts, and look at its clock."""
        texts = [("SCRIPT", "LOAD", caller.script.text) for caller in self.callers.values()]
        for link in await self.nodes.masters():
            try:
                await link.ask(texts)
            except (NotSent, Lost) as error:
                _log.info("the scripts will be loaded when they are first needed: %s", error)
        await self.look_at_the_clock()

    async def look_at_the_clock(self) -> None:
        """Ask what time it is there. Every answer tells it; this is for the first time, and for doctor."""

        async def ask() -> int:
            [(seconds, micros)] = await self.reader.ask([(None, ("TIME",))])
            return int(seconds) * 1_000_000 + int(micros)

        await self.time.look(ask)
        if self.by_server:
            self.time.warn_of_skew(self.address.shown)

    async def write(
        self, kind: str, asked: Sequence[Any], words: writing.Words, take: writing.Take, *before: int, now: str
    ) -> list[Any]:
        """One answer for each, or the error that befell its shard."""
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
                self.leaser.wrote(answers, mine)

        await self.callers[kind].run(calls, read, now=now)
        return answers

    async def _give_back(self, records: Sequence[Record]) -> None:
        """End leases of which nothing was begun: due again at once, counting nothing."""
        ends = [Settlement(record.topic, record.key, record.token, Verdict.DEFER, In(0)) for record in records]
        for answer in await self.write("settle", ends, writing.settlement_writer(0), writing.take_accepted, now=""):
            if isinstance(answer, StoreError):
                _log.warning("a lease could not be given back, and ends by itself: %s", answer)

    async def close(self) -> None:
        try:
            await self.subscriptions.close()
            await self.leaser.close()
        finally:
            await self.nodes.close()


# --- of the namespace as a whole


async def agree(reader: Reader, namespace: str, shards: int | None, default: int) -> int:
    """Record the layout if the namespace is new; the number of shards it has. Raises StoreMismatch if ours differs."""
    key = Layout(namespace, 1).common("layout")
    look = (None, ("HMGET", key, "version", "shards"))
    [found] = await reader.ask([look])
    if None in found:  # looked at first: where memory is full, a worker may still open what is there, and drain it
        *_, found = await reader.ask(
            [(None, ("HSETNX", key, "version", VERSION)), (None, ("HSETNX", key, "shards", shards or default)), look]
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
    """Say what a worker works on; answer which workers live. The first to see an expired one takes it out.

    `flags`: the server knows script flags, so that this works when its memory is full.
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
            ends, its = _decode_worker(packed)
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
