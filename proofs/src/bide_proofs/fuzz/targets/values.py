"""The keys of a namespace in a real Redis, changed at random by somebody else.

**What is accepted.** Damage to entries (a body, a field, a member, a score) is the matter of that task alone: every
call goes on, whatever is sound and due is leased, and after that the next wake lies ahead, so that no worker asks again
and again. Damage to a key (another type, text for a number) may fail the calls that need it, with StoreCorrupt or
StoreMismatch, and the tasks of the other shards are still leased. Of what is remembered of a caller's last call it may
be said that the outcome is not known. Nothing else is raised.

**What nobody can see.** A body whose bytes were changed into those of another sound body is that other task from then
on; a deleted key, or one with fewer fields, is a task that is not there. Tasks that were touched are left out of what
has to be leased.
"""

from __future__ import annotations

import asyncio
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import redis

from bide.core.errors import OutcomeUnknown, PartlyFailed, StoreCorrupt, StoreError, StoreMismatch
from bide.core.events import Event, EventKind
from bide.core.names import new_id
from bide.core.records import At, Cancel, Filter, Move, NewTask, Page, Record, Redrive, Ref, Settlement, State, Verdict
from bide.stores.redis import RedisStore
from bide.stores.redis.layout import Layout
from bide.testing.clock import FIRST_INSTANT as NOW
from bide_proofs.fuzz.drawing import Draw
from bide_proofs.fuzz.running import Case, Target, check, clear
from bide_proofs.fuzz.targets.cursors import page
from bide_proofs.fuzz.targets.stored import worked_on

PROGRAM = "redis-server"
SHARDS = 3
_HOUR = 3_600_000
_LATER = NOW + 2 * _HOUR
_REFS = [Ref(topic, f"k{number}") for topic in ("t", "u") for number in range(8)]
_CLEAR = (StoreCorrupt, StoreMismatch)


class Damage:
    """What was done: to which keys as a whole, and to which tasks."""

    def __init__(self) -> None:
        self.shards: set[int] = set()
        self.common = False
        self.unordered = False
        """An index by name, in which all scores have to be the same, has several: then it has no order."""
        self.answers = False
        """What is remembered of a caller's last call: whether it was done cannot be known then, and is not said."""
        self.refs: set[Ref] = set()

    @property
    def of_keys(self) -> bool:
        return bool(self.shards) or self.common


def damaged(draw: Draw, client: Any, layout: Layout) -> Damage:
    """One to three changes."""
    done = Damage()
    for _ in range(draw.of(1, 1, 2, 3)):
        keys: list[bytes] = sorted(client.keys("*"))
        key = draw.choice(keys)
        kind = client.type(key)
        before = len(done.refs), len(done.shards), done.common
        what = (
            _whole(draw, client, key, done, layout)
            if draw.chance(0.25)
            else _entry(draw, client, key, kind, done, layout)
        )
        draw.note((key, what))
        draw.count(what.partition(" ")[0] if before != (len(done.refs), len(done.shards), done.common) else "odd entry")
    return done


def _shard_of(key: bytes) -> int | None:
    number = key.partition(b"}")[0].rpartition(b":")[2]
    return int(number) if number.isdigit() else None


def _whole(draw: Draw, client: Any, key: bytes, done: Damage, layout: Layout) -> str:
    """The key is something else, or gone."""
    done.answers = done.answers or b"}:a:" in key
    shard = _shard_of(key)
    if shard is None:
        done.common = True
    else:
        done.shards.add(shard)
    kind = draw.of("deleted", "string", "list", "hash", "set", "zset")
    client.delete(key)
    if kind == "string":
        client.set(key, draw.of(b"", b"x", b"-5", b"1e400", draw.randbytes(30)))
    elif kind == "list":
        client.rpush(key, b"x")
    elif kind == "hash":
        client.hset(key, draw.of("odd", "damaged"), draw.randbytes(9))
    elif kind == "set":
        client.sadd(key, draw.randbytes(5))
    elif kind == "zset":
        client.zadd(key, {draw.randbytes(5): draw.of(0, 1e300, float("inf"))})
    return f"key {kind}"


def _entry(draw: Draw, client: Any, key: bytes, kind: bytes, done: Damage, layout: Layout) -> str:
    """One entry of the key is changed, lost, or put in."""
    letter, _, name = key.partition(b"}:")[2].partition(b":")
    topic = name.decode("utf-8", "replace")
    odd = draw.of(b"odd", b"\xff\xfe", b"", b"k1\0", "é".encode(), draw.randbytes(8))

    def touched(member: bytes) -> None:
        text = member.decode("utf-8", "replace")
        done.refs |= {
            ref
            for ref in _REFS
            if (letter in (b"g", b"f") and ref.key in text) or (ref.topic, ref.key) == (topic, text)
        }

    if kind == b"hash":
        fields: dict[bytes, bytes] = client.hgetall(key)
        field = draw.choice(sorted(fields))
        touched(field)
        what = draw.of("lost", "changed", "changed", "put in", "renamed")
        if what in ("lost", "renamed"):
            client.hdel(key, field)
        if what == "renamed":
            client.hset(key, odd, fields[field])
        elif what == "changed":
            client.hset(key, field, draw.bytes(fields[field]))
        elif what == "put in":
            client.hset(key, odd, draw.bytes(fields[field]))
        if letter == b"layout":
            done.common = True
        return f"body {what}"
    if kind == b"zset":
        members: list[tuple[bytes, float]] = client.zrange(key, 0, -1, withscores=True)
        member, _ = draw.choice(members)
        touched(member)
        what = draw.of("lost", "score", "put in", "put in")
        if what == "lost":
            client.zrem(key, member)
        elif what == "score":
            done.unordered = done.unordered or letter == b"g"
            client.zadd(key, {member: draw.of(0, -1, NOW, 1e18, float("inf"), float("-inf"), 0.5, draw.number())})
        else:
            done.unordered = done.unordered or letter == b"g"
            client.zadd(key, {draw.of(odd, member, b"g\0t\0k1", b"t\0gone"): draw.of(0, NOW, float("-inf"), 1e300)})
        return f"index {what}"
    if kind == b"stream":
        client.xadd(key, {draw.of(b"t", odd): odd, draw.of(b"e", b"x"): draw.randbytes(9)})
        return "event put in"
    if kind == b"set":
        client.sadd(key, odd)
        return "topics put in"
    value = client.get(key) if kind == b"string" else b""
    if letter == b"n":
        if draw.chance(0.5):
            client.set(key, draw.of(0, 1, NOW, 2**53 - 1))
            return "counter set back"
        done.shards.add(_shard_of(key) or 0)
        client.set(key, draw.of(b"", b"x", b"1e400", b"-1", draw.randbytes(8)))
        return "counter text"
    if kind == b"string":
        done.answers = True
        client.set(key, draw.bytes(value or b""))
        done.shards.add(_shard_of(key) or 0)
        return "answer changed"
    return "nothing"


async def play(draw: Draw, store: RedisStore, done: Damage) -> None:
    """Everything that can be asked of the namespace."""
    layout = Layout("f", SHARDS)
    calm = [ref for ref in _REFS if ref not in done.refs and layout.shard_of(*ref) not in done.shards]

    async def may(call: Any) -> Any:
        """What it answers; None where damage to a key is told as such."""
        try:
            return await call
        except OutcomeUnknown as unknown:
            check(done.answers, f"it is not known whether it was done: {unknown}")
            return None
        except PartlyFailed as partly:
            told = (*_CLEAR, OutcomeUnknown) if done.answers else _CLEAR
            check(done.of_keys, f"damage to entries fails others: {partly}")
            for one in partly.answers:
                check(not isinstance(one, StoreError) or isinstance(one, told), f"of a batch: {one!r}")
            return None
        except _CLEAR as error:
            clear(error)
            check(done.of_keys, f"damage to entries fails all: {error}")
            return None

    got = await may(store.get(_REFS))
    for record in got or ():
        if record is not None:
            worked_on(record)
    for ref, record in zip(_REFS, got or (), strict=False):
        check(record is not None or ref not in calm or done.common, f"{ref} is not found")
    for where in (
        Filter(topic="t"),
        Filter(group="g"),
        Filter(state=State.WAITING),
        Filter(state=State.DEAD),
        Filter(),
    ):
        await may(_listed(store, where))
    await may(store.tally([0, NOW, _LATER]))
    if not done.of_keys and not done.unordered:
        await page(store, draw)
    taken: dict[Ref, Record] = {}
    quiet = 0
    for _ in range(60):
        leased = await may(store.lease({"t": 3, "u": 3}, now=_LATER, until=_LATER + _HOUR, holder="x"))
        quiet = quiet + 1 if leased is None or not leased.tasks else 0
        for one in leased.tasks if leased is not None else ():
            check(one.ref not in taken, f"leased twice: {one.ref}")
            taken[one.ref] = one
            worked_on(one)
        if (
            leased is not None
            and not leased.tasks
            and not (leased.next_wake is not None and leased.next_wake <= _LATER)
        ):
            break
        if quiet > 25:
            check(done.of_keys, "nothing is to be had, and it is said to be due: whoever works on it asks for ever")
            break
    missing = {ref for ref in calm if ref != Ref("t", "k0")} - set(taken)
    check(not missing or done.common, f"sound, due, and not leased: {missing}")
    outcomes = [
        Settlement(one.topic, one.key, one.token, draw.of(Verdict.DONE, Verdict.RETRY), At(_LATER + _HOUR), error="\0é")
        for one in taken.values()
    ]
    settled = await may(store.settle(outcomes, now=_LATER)) or []
    for one, accepted in zip(outcomes, settled, strict=False):
        check(accepted or Ref(one.topic, one.key) not in calm, f"a live lease of {one.key} is not accepted")
    await may(
        store.change(
            [Move("t", "k3", At(_LATER)), Cancel("u", "k4"), Redrive("t", "k0", new_id(), At(_LATER))], now=_LATER
        )
    )
    added = await may(
        store.add([NewTask("t", key, new_id(), At(_LATER), b"{}", "g") for key in ("k1", "another")], now=_LATER)
    )
    if added is not None:
        [one] = await may(store.get([Ref("t", "another")])) or [None]
        check((one is not None and one.payload == b"{}") or done.of_keys, "what was just added is not there")
    await may(store.purge(now=_LATER + 30 * _HOUR, limit=100))
    await may(store.announce("w", ["t"], _LATER, now=NOW))
    await may(store.events(limit=10))
    await may(store.events(Ref("t", "k1"), limit=10))
    for finding in await may(store.diagnose()) or ():
        check(finding.what, "what was found")


async def _listed(store: RedisStore, where: Filter) -> list[Record]:
    records: list[Record] = []
    cursor: str | None = None
    for _ in range(60):
        found = await store.find(where, Page(limit=7, cursor=cursor))
        records += found.tasks
        cursor = found.cursor
        if cursor is None:
            return records
    raise AssertionError("a list without an end")


async def case(url: str, client: Any, draw: Draw) -> None:
    await asyncio.to_thread(client.flushall)
    store = RedisStore(f"{url}?namespace=f&shards={SHARDS}", clock="caller")
    await store.open()
    try:
        tasks = [
            NewTask(*ref, new_id(), At(NOW + number), b"{}", draw.of(None, "g")) for number, ref in enumerate(_REFS)
        ]
        await store.add(tasks, now=NOW)
        held = await store.lease({"t": 2, "u": 1}, now=NOW + 5, until=NOW + 10_000, holder="w")
        for one in held.tasks:
            if one.key == "k0" and one.topic == "t":
                dead = Settlement(one.topic, one.key, one.token, Verdict.DEAD, keep_until=_LATER * 2, error="bad")
                await store.settle([dead], now=NOW + 5)
        await store.record([Event(at=NOW, topic="t", key="k1", id="i", kind=EventKind.DEAD, what="bad")] * 2)
        await store.announce("v", ["t"], _LATER, now=NOW)
        if draw.chance(0.3):
            await store.close()
        done = damaged(draw, client, Layout("f", SHARDS))
        try:
            await store.open()
        except _CLEAR as error:
            clear(error)
            check(done.common, f"it does not open: {error}")
            draw.count("not opened")
            return
        await play(draw, store, done)
    finally:
        await store.close()


@asynccontextmanager
async def opened(_: Path) -> AsyncIterator[Case]:
    """A server of our own, on a socket in a folder of its own: there is no port to be had by two."""
    with tempfile.TemporaryDirectory(prefix="bide-fz-") as folder:
        path = f"{folder}/s"
        server = subprocess.Popen(  # noqa: ASYNC220 - it is only begun
            [PROGRAM, "--port", "0", "--unixsocket", path, "--save", "", "--appendonly", "no", "--dir", folder],
            stdout=subprocess.DEVNULL,
        )
        client = redis.Redis(unix_socket_path=path)
        try:
            for _attempt in range(500):
                try:
                    client.ping()
                    break
                except redis.ConnectionError:
                    await asyncio.sleep(0.02)
            yield partial(case, f"unix://{path}", client)
        finally:
            client.close()
            server.terminate()
            server.wait()


TARGETS = (Target("values", "keys of a real Redis damaged at random", opened, limit=20.0, weight=5.0, needs=PROGRAM),)
