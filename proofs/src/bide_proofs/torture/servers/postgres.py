"""PostgreSQL: a primary and a standby that has every commit before it is answered, so that a failover loses none."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from bide.core.instants import Millis
from bide_proofs.torture.server import Trouble
from bide_proofs.torture.servers import suffering
from bide_proofs.torture.servers.node import Node
from bide_proofs.torture.servers.postgres_node import CONNECTIONS, DATABASE, USER, PostgresNode
from bide_proofs.torture.servers.private import PrivateServer, remove_all
from bide_proofs.torture.servers.processes import HOST

_LONGEST_AWAY = 1.0
_CROWDED = (0.5, 2.0)
_STRANGER = "stranger"
_OTHERS = (
    "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE backend_type = 'client backend'"
    f" AND pid <> pg_backend_pid() AND application_name <> '{_STRANGER}'"
)
_BACKENDS = (
    "SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend' AND application_name = 'bide' ORDER BY pid"
)


class PostgresServer(PrivateServer):
    """A pair of them, each behind a proxy; they replicate past it."""

    name = "postgres"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.nodes = [PostgresNode(f"server {number}", folder / f"server-{number}", self._clock) for number in (1, 2)]
        self.primary, self.standby = self.nodes
        self.proxies = tuple(node.proxy for node in self.nodes)
        self.direct = _url(*(node.port for node in self.nodes))
        self._version = ""

    async def _start(self) -> None:
        from bide.stores.postgres.schema import SCHEMA

        for node in self.nodes:
            await node.prepare()
        await self.primary.make()
        await self.primary.start()
        await self.standby.copy(self.primary)
        await self.standby.start()
        await self.primary.wait_for_standby()
        await SCHEMA.migrate(self.direct)
        self.urls = (_url(*(proxy.port for proxy in self.proxies)),)
        self._version = str(await self.primary.ask("SHOW server_version"))
        refused = next((node.disk.refused for node in self.nodes if node.disk.refused), "")
        self.cannot = {
            **({suffering.CLOCK: self._clock.refused} if self._clock.refused else {}),
            **({suffering.DISK: refused} if refused else {}),
        }

    async def stop(self) -> None:
        # the standby first: a primary that ends in order waits for it
        await remove_all((self.standby, self.primary))

    async def clock(self) -> Millis:
        """Milliseconds, by the primary."""
        return await self.primary.time()

    def _troubles(self) -> Mapping[str, Trouble]:
        async def primary(chance: random.Random) -> Node:
            return self.primary

        async def standby(chance: random.Random) -> Node:
            return self.standby

        return {
            suffering.KILL: suffering.killed(primary),
            suffering.OOM: self._one_killed,
            "kill -9 of the standby": suffering.killed(standby),
            suffering.RESTART: suffering.restarted(primary),
            suffering.STILL: suffering.stood_still(primary),
            suffering.FAILOVER: self._failover,
            suffering.CROWDED: self._crowded,
            suffering.DISK: suffering.disk_full(primary, lambda node: self.primary.disk, self._next_segment),
            suffering.CLOCK: suffering.clock_set(self._clock),
        }

    async def _failover(self, chance: random.Random) -> str:
        """The primary is killed for good, the standby promoted, and a new standby made in the old one's place."""
        old, new, away = self.primary, self.standby, chance.uniform(0, _LONGEST_AWAY)
        try:
            await old.kill()
            await asyncio.sleep(away)
        finally:
            await old.kill()
            await new.ask("SELECT pg_promote()")
            self.primary, self.standby = new, old
            await old.copy(new)
            await old.start()
            await new.wait_for_standby()
        return f"killed {old.name} for good, promoted {new.name} after {away:.1f} s, and made the other its standby"

    async def _one_killed(self, chance: random.Random) -> str:
        """What the kernel does where memory ends: SIGKILL to one of the processes. All others end, and recover."""
        node = self.primary
        connection = await node.connect()
        try:
            found = [int(row["pid"]) for row in await connection.fetch(_BACKENDS)]
        finally:
            await connection.close(timeout=60)
        there = sorted(set(found) & set(node.family()))
        if not there:
            return "nobody was connected whose process could be killed"
        node.kill_one(chance.choice(there))
        await asyncio.sleep(chance.uniform(0.5, 1.5))
        return f"killed one of the {len(there)} processes of {node.name} that serve clients"

    async def _next_segment(self) -> None:
        """The log of changes needs another file, as it does every megabyte."""
        import asyncpg

        # it is to be refused, and may end the server
        with contextlib.suppress(OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
            await self.primary.ask("SELECT pg_switch_wal()", "CREATE TABLE one_more ()", "DROP TABLE one_more")

    async def _crowded(self, chance: random.Random) -> str:
        """All clients are thrown out, and strangers take every connection that there is."""
        import asyncpg

        lasts, strangers = chance.uniform(*_CROWDED), 0
        async with AsyncExitStack() as open_to_us:

            async def another() -> Any:
                connection = await asyncpg.connect(
                    self.primary.url, timeout=60, server_settings={"application_name": _STRANGER}
                )
                open_to_us.callback(connection.terminate)
                return connection

            first = await another()
            until, loop = 0.0, asyncio.get_running_loop()
            while not until or loop.time() < until:
                try:
                    await another()
                    strangers += 1
                except asyncpg.TooManyConnectionsError:
                    # full, of them and of clients: whose places the next ones are quicker to take, or not
                    await first.fetchval(_OTHERS)
                    until = until or loop.time() + lasts
                    await asyncio.sleep(0.02)
        return f"threw all clients out, and let {strangers} strangers take the connections for {lasts:.1f} s"

    def about(self) -> dict[str, Any]:
        return {
            "version": f"PostgreSQL {self._version}",
            "durability": "fsync and synchronous_commit on, synchronous_standby_names '*': what was answered is on two "
            "disks; leases are committed without waiting (docs/sql.md), so a crash or a failover may undo the newest",
            "set-up": f"a primary and a synchronous standby, each behind a proxy, replication not; {CONNECTIONS} "
            "connections",
        }


def _url(*ports: int) -> str:
    hosts = ",".join(f"{HOST}:{port}" for port in ports)
    return f"postgresql://{USER}@{hosts}/{DATABASE}?target_session_attrs=read-write"
