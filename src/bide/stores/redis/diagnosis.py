"""What `doctor` looks at: settings of the server that cost tasks or time, and whether the clocks agree."""

from __future__ import annotations

from collections.abc import Mapping

from bide.ports import Finding
from bide.stores.redis.layout import Layout
from bide.stores.redis.nodes import Nodes
from bide.stores.redis.reading import Reader
from bide.stores.redis.server import Server, server_of
from bide.stores.server_time import ServerTime

_FULL = 0.8
"""Part of maxmemory from which on it is worth a warning."""


async def diagnose(reader: Reader, layout: Layout, nodes: Nodes, where: str, time: ServerTime) -> list[Finding]:
    """Look at every server with data; asked anew, since one may have been set up differently while we ran."""
    found = [Finding(ok=True, what=f"{where}: namespace {layout.namespace}, {layout.shards} shards")]
    for link in await nodes.masters():
        [text] = await link.ask([("INFO",)])
        server = server_of(text)
        for look in (_flags, _durability, _policy, _memory, _persistence):
            one = look(server, server.info)
            found.append(Finding(ok=one.ok, what=f"{link.name}: {one.what}", advice=one.advice, severe=one.severe))
    found.append(time.finding())
    counts = await reader.ask([(shard, ("HGET", layout.counts(shard), "damaged")) for shard in range(layout.shards)])
    damaged = sum(int(count or 0) for count in counts)
    if damaged:
        advice = "their bodies were missing or unreadable; docs/redis.md says what to do"
        found.append(Finding(ok=False, severe=True, what=f"{damaged} damaged tasks were set aside", advice=advice))
    return found


def _flags(server: Server, info: Mapping[str, str]) -> Finding:
    if server.knows_flags:
        return Finding(ok=True, what=server.shown)
    return Finding(
        ok=False,
        what=f"{server.shown} may refuse scripts that drain when its memory is full",
        advice="upgrade to Redis 7 or Valkey, where only new work is refused",
    )


def _durability(server: Server, info: Mapping[str, str]) -> Finding:
    if info.get("aof_enabled") == "1":
        return Finding(ok=True, what="appendonly is on; appendfsync decides what a power cut may cost")
    return Finding(
        ok=False,
        severe=True,
        what="appendonly is off: a crash loses what came since the last snapshot",
        advice="CONFIG SET appendonly yes, and appendfsync always or everysec",
    )


def _policy(server: Server, info: Mapping[str, str]) -> Finding:
    policy = info.get("maxmemory_policy", "noeviction")
    if policy == "noeviction":
        return Finding(ok=True, what="maxmemory-policy noeviction throws nothing away")
    if policy.startswith("volatile"):
        return Finding(
            ok=False,
            what=f"maxmemory-policy {policy} may throw away the answers that are kept for a repeated call",
            advice="CONFIG SET maxmemory-policy noeviction, or a call whose answer is lost may be done twice",
        )
    return Finding(
        ok=False,
        severe=True,
        what=f"maxmemory-policy {policy} throws tasks away",
        advice="CONFIG SET maxmemory-policy noeviction",
    )


def _memory(server: Server, info: Mapping[str, str]) -> Finding:
    limit, used = int(info.get("maxmemory", 0)), int(info.get("used_memory", 0))
    if not limit:
        return Finding(
            ok=False,
            what="maxmemory is not set: when the machine is full, the server dies instead of refusing new work",
            advice="CONFIG SET maxmemory to what the machine can spare",
        )
    part = used / limit
    advice = "" if part < _FULL else "give it more, or let it drain; at the limit schedule answers StoreFull"
    return Finding(ok=part < _FULL, what=f"memory is at {part:.0%} of maxmemory", advice=advice)


def _persistence(server: Server, info: Mapping[str, str]) -> Finding:
    names = ("rdb_last_bgsave_status", "aof_last_write_status", "aof_last_bgrewrite_status")
    failing = [name for name in names if info.get(name, "ok") != "ok"]
    if not failing:
        return Finding(ok=True, what="what it writes to disk arrives")
    return Finding(
        ok=False, severe=True, what=f"writing to disk fails: {', '.join(failing)}", advice="see its log, and its disk"
    )
