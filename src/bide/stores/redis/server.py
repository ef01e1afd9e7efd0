"""What the server is and how it is set up, as far as it matters; and what makes bide refuse it."""

from __future__ import annotations

import re
from collections.abc import Mapping

from msgspec import Struct

from bide.core.errors import SetupError
from bide.stores.redis.address import Address
from bide.stores.redis.reading import Reader

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
