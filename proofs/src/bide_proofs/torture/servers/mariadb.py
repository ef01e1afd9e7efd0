"""MariaDB: a primary and a replica that has every commit before it is answered, so that a failover loses none."""

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
from bide_proofs.torture.servers.mariadb_node import CONNECTIONS, DATABASE, USER, MariaDbNode
from bide_proofs.torture.servers.node import Node
from bide_proofs.torture.servers.private import PrivateServer, remove_all
from bide_proofs.torture.servers.processes import HOST

_LONGEST_AWAY = 1.0
_CROWDED = (0.5, 2.0)
_FEWEST = 10
"""The fewest connections that MariaDB can be told to take."""


class MariaDbServer(PrivateServer):
    """A pair of them, each behind a proxy; they replicate past it."""

    name = "mariadb"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.nodes = [MariaDbNode(number, folder / f"server-{number}", self._clock) for number in (1, 2)]
        self.primary, self.replica = self.nodes
        self.proxies = tuple(node.proxy for node in self.nodes)
        self.direct = _url(*(node.port for node in self.nodes))
        self._version = ""

    async def _start(self) -> None:
        from bide.stores.mysql.schema import SCHEMA

        for node in self.nodes:
            await node.prepare()
        for node in self.nodes:
            await node.start()
        await self.primary.ask("SET GLOBAL rpl_semi_sync_master_enabled = 0")
        await SCHEMA.migrate(self.direct)
        await self.replica.follow(self.primary)
        await self.primary.wait_for(self.replica)
        self.urls = (_url(*(proxy.port for proxy in self.proxies)),)
        self._version = str(await self.primary.value("SELECT VERSION()"))
        refused = next((node.disk.refused for node in self.nodes if node.disk.refused), "")
        self.cannot = {
            suffering.OOM: suffering.KILLED_FOR_MEMORY,
            **({suffering.CLOCK: self._clock.refused} if self._clock.refused else {}),
            **({suffering.DISK: refused} if refused else {}),
        }

    async def stop(self) -> None:
        await remove_all(self.nodes)

    async def clock(self) -> Millis:
        """Milliseconds, by the primary."""
        return await self.primary.time()

    def _troubles(self) -> Mapping[str, Trouble]:
        async def primary(chance: random.Random) -> Node:
            return self.primary

        async def replica(chance: random.Random) -> Node:
            return self.replica

        return {
            suffering.KILL: suffering.killed(primary),
            "kill -9 of the replica": suffering.killed(replica),
            suffering.RESTART: suffering.restarted(primary),
            suffering.STILL: suffering.stood_still(primary),
            suffering.FAILOVER: self._failover,
            suffering.CROWDED: self._crowded,
            suffering.DISK: suffering.disk_full(primary, lambda node: self.primary.disk),
            suffering.CLOCK: suffering.clock_set(self._clock),
        }

    async def _failover(self, chance: random.Random) -> str:
        """The primary is killed for good, the replica promoted, and a new replica made in the old one's place."""
        old, new, away = self.primary, self.replica, chance.uniform(0, _LONGEST_AWAY)
        # one that was killed has forgotten what it had heard and not done, and asks for it again
        await old.wait_for(new)
        try:
            await old.kill()
            await asyncio.sleep(away)
        finally:
            await old.kill()
            await new.promote()
            self.primary, self.replica = new, old
            old.leads = False
            await old.make()
            await old.start()
            await old.follow(new)
            await new.wait_for(old)
        return f"killed {old.name} for good, promoted {new.name} after {away:.1f} s, and made the other its replica"

    async def _crowded(self, chance: random.Random) -> str:
        """Strangers have every connection that there may be, and all clients are thrown out."""
        lasts, node = chance.uniform(*_CROWDED), self.primary
        async with AsyncExitStack() as open_to_us:

            async def another() -> Any:
                connection = await node.connect()
                open_to_us.callback(connection.close)
                return connection

            there = await node.ask(f"SELECT id FROM information_schema.processlist WHERE user = '{USER}'")
            administrator = await another()
            for _ in range(_FEWEST):
                await another()
            async with administrator.cursor() as cursor:
                try:
                    await cursor.execute(f"SET GLOBAL max_connections = {_FEWEST}")
                    for row in there:
                        with contextlib.suppress(Exception):  # it has gone by itself since
                            await cursor.execute(f"KILL {next(iter(row.values()))}")
                    await asyncio.sleep(lasts)
                finally:
                    await cursor.execute(f"SET GLOBAL max_connections = {CONNECTIONS}")
        return f"threw all clients out, and let strangers have all {_FEWEST} connections for {lasts:.1f} s"

    def about(self) -> dict[str, Any]:
        return {
            "version": f"MariaDB {self._version}",
            "durability": "innodb_flush_log_at_trx_commit 1, sync_binlog 1, semi-synchronous replication after the "
            "flush of the log: what was answered is on two disks, unless the replica was away for longer than 3 s; a "
            "failover waits until it is not",
            "set-up": f"a primary and a replica, each behind a proxy, replication not; {CONNECTIONS} connections; only "
            "the tables are on the disk that can be full",
        }


def _url(*ports: int) -> str:
    return f"mysql://{USER}@{','.join(f'{HOST}:{port}' for port in ports)}/{DATABASE}"
