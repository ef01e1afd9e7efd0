"""What belongs to the namespace as a whole: its layout, who works on what, and the log of what was odd."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from bide.core.errors import StoreCorrupt, StoreMismatch
from bide.core.events import Event
from bide.core.instants import Millis
from bide.core.records import Ref, Topic
from bide.stores.redis.layout import VERSION, Layout
from bide.stores.redis.reading import Reader

EVENTS_KEPT = 10_000
_MOST_SHARDS = 1024
_AT_ONCE = 500
"""Events that are written in one call, so that nobody else waits for long."""

_STREAM_ID = re.compile(rb"[0-9]{1,19}-[0-9]{1,19}")
_log = logging.getLogger("bide.redis")
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
    reader: Reader, key: bytes, holder: str, topics: Collection[Topic], until: Millis, now: Millis, *, flags: bool
) -> dict[str, list[Topic]]:
    """Say what a worker works on; answer which workers live. The first to see an expired one takes it out.

    `flags`: the server knows script flags, so that this works when its memory is full.
    """
    packed = _encode((until, sorted(topics)))
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


async def record(reader: Reader, layout: Layout, events: Sequence[Event], kept: int) -> None:
    arguments: list[Any] = []
    for event in events[-kept:]:
        arguments += [f"{event.topic}\0{event.key}", _encode(event)]
    keys = (layout.common("events"), layout.common("event-refs"))
    for first in range(0, len(arguments), 2 * _AT_ONCE):
        part = arguments[first : first + 2 * _AT_ONCE]
        await reader.ask([(None, ("EVAL", _RECORD, 2, *keys, kept, *part))])


async def events(reader: Reader, layout: Layout, ref: Ref | None, limit: int) -> list[Event]:
    log = layout.common("events")
    if ref is None:
        [entries] = await reader.ask([(None, ("XREVRANGE", log, "+", "-", "COUNT", limit))])
    else:
        prefix = f"{ref.topic}\0{ref.key}\0".encode()
        bounds = (b"[" + prefix, b"(" + prefix[:-1] + b"\1")
        [members] = await reader.ask([(None, ("ZRANGEBYLEX", layout.common("event-refs"), *bounds))])
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
