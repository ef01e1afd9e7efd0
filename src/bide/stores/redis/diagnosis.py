"""The server and its set-up: the checks that make bide refuse it, and those that `doctor` makes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from msgspec import Struct

from bide.core.errors import SetupError
from bide.ports import Finding
from bide.stores.redis.address import Address
from bide.stores.redis.reading import Reader
from bide.stores.redis.topology import Nodes
from bide.stores.server_time import ServerTime

_FULL = 0.8
"""Part of maxmemory from which on it is worth a warning."""
OLDEST = (6, 2)


class Server(Struct, frozen=True, kw_only=True):
    """The answer to INFO."""

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
    """Read an answer to INFO."""
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


async def diagnose(reader: Reader, nodes: Nodes, where: str, time: ServerTime) -> list[Finding]:
    """Look at every server with data; asked anew, since one may have been set up differently while we ran."""
    layout = reader.layout
    found = [Finding(ok=True, what=f"{where}: namespace {layout.namespace}, {layout.shards} shards")]
    for link in await nodes.masters():
        [text] = await link.ask([("INFO",)])
        found += [
            Finding(ok=one.ok, what=f"{link.name}: {one.what}", advice=one.advice, severe=one.severe)
            for one in _looks(server_of(text))
        ]
    found.append(time.finding())
    counts = await reader.ask([(shard, ("HGET", layout.counts(shard), "damaged")) for shard in range(layout.shards)])
    damaged = sum(int(count or 0) for count in counts)
    if damaged:
        advice = "their bodies were missing or unreadable; docs/redis.md says what to do"
        found.append(Finding(False, f"{damaged} damaged tasks were set aside", advice, severe=True))
    return found


def _looks(server: Server) -> Iterator[Finding]:
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
