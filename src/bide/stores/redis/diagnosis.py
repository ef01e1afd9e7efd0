"""What the server is and how it is set up: what makes bide refuse it, and what `doctor` says about it."""

from __future__ import annotations

import re
from collections.abc import Mapping

from msgspec import Struct

from bide.core.errors import SetupError
from bide.ports import Finding
from bide.stores.redis.address import Address
from bide.stores.redis.layout import Layout
from bide.stores.redis.reading import Reader
from bide.stores.redis.topology import Nodes
from bide.stores.server_time import ServerTime

_FULL = 0.8
"""Part of maxmemory from which on it is worth a warning."""
OLDEST = (6, 2)


class Server(Struct, frozen=True, kw_only=True):
    """What INFO says."""

    version: tuple[int, ...]
    """Of Redis; for Valkey the version of Redis that it is compatible with."""
    shown: str
    cluster: bool
    info: Mapping[str, str]

    @property
    def knows_flags(self) -> bool:
        """Script flags such as allow-oom: Redis 7, and every Valkey."""
        return self.version >= (7, 0)

    @property
    def shards_channels(self) -> bool:
        return self.version >= (7, 0)

    def check(self, address: Address) -> None:
        """Raises SetupError for a server on which bide could lose tasks, or cannot work at all."""
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
    """Ask the server what it is."""
    [text] = await reader.ask([(None, ("INFO",))])
    return server_of(text)


def server_of(text: bytes) -> Server:
    """What an answer to INFO says."""
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


async def diagnose(reader: Reader, layout: Layout, nodes: Nodes, where: str, time: ServerTime) -> list[Finding]:
    """Look at every server with data; asked anew, since one may have been set up differently while we ran."""
    found = [Finding(ok=True, what=f"{where}: namespace {layout.namespace}, {layout.shards} shards")]
    for link in await nodes.masters():
        [text] = await link.ask([("INFO",)])
        server = server_of(text)
        for look in (_flags, _durability, _policy, _memory, _persistence):
            one = look(server)
            found.append(Finding(ok=one.ok, what=f"{link.name}: {one.what}", advice=one.advice, severe=one.severe))
    found.append(time.finding())
    counts = await reader.ask([(shard, ("HGET", layout.counts(shard), "damaged")) for shard in range(layout.shards)])
    damaged = sum(int(count or 0) for count in counts)
    if damaged:
        advice = "their bodies were missing or unreadable; docs/redis.md says what to do"
        found.append(_bad(f"{damaged} damaged tasks were set aside", advice, severe=True))
    return found


def _bad(what: str, advice: str, *, severe: bool = False) -> Finding:
    return Finding(ok=False, what=what, advice=advice, severe=severe)


def _flags(server: Server) -> Finding:
    if server.knows_flags:
        return Finding(ok=True, what=server.shown)
    what = f"{server.shown} may refuse scripts that drain when its memory is full"
    return _bad(what, "upgrade to Redis 7 or Valkey, where only new work is refused")


def _durability(server: Server) -> Finding:
    if server.info.get("aof_enabled") == "1":
        return Finding(ok=True, what="appendonly is on; appendfsync decides what a power cut may cost")
    what = "appendonly is off: a crash loses what came since the last snapshot"
    return _bad(what, "CONFIG SET appendonly yes, and appendfsync always or everysec", severe=True)


def _policy(server: Server) -> Finding:
    policy = server.info.get("maxmemory_policy", "noeviction")
    if policy == "noeviction":
        return Finding(ok=True, what="maxmemory-policy noeviction throws nothing away")
    advice = "CONFIG SET maxmemory-policy noeviction"
    if policy.startswith("volatile"):
        what = f"maxmemory-policy {policy} may throw away the answers that are kept for a repeated call"
        return _bad(what, f"{advice}, or a call whose answer is lost may be done twice")
    return _bad(f"maxmemory-policy {policy} throws tasks away", advice, severe=True)


def _memory(server: Server) -> Finding:
    limit, used = int(server.info.get("maxmemory", 0)), int(server.info.get("used_memory", 0))
    if not limit:
        what = "maxmemory is not set: when the machine is full, the server dies instead of refusing new work"
        return _bad(what, "CONFIG SET maxmemory to what the machine can spare")
    part = used / limit
    advice = "" if part < _FULL else "give it more, or let it drain; at the limit schedule answers StoreFull"
    return Finding(ok=part < _FULL, what=f"memory is at {part:.0%} of maxmemory", advice=advice)


def _persistence(server: Server) -> Finding:
    names = ("rdb_last_bgsave_status", "aof_last_write_status", "aof_last_bgrewrite_status")
    failing = [name for name in names if server.info.get(name, "ok") != "ok"]
    if not failing:
        return Finding(ok=True, what="what it writes to disk arrives")
    return _bad(f"writing to disk fails: {', '.join(failing)}", "see its log, and its disk", severe=True)
