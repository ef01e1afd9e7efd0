"""Which server to ask: the one there is, the master that Sentinel names, or the one that has a shard's slot.

Callers ask for `link(shard)`, and for `look_again` when a server said that it is the wrong one, or was lost.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from typing import Any

from redis.asyncio.connection import AbstractConnection, Connection, SSLConnection, UnixDomainSocketConnection
from redis.crc import key_slot
from redis.exceptions import ResponseError

from bide.core.errors import StoreUnavailable
from bide.stores.redis.address import Address
from bide.stores.redis.layout import Layout
from bide.stores.redis.link import Link, Lost, NotSent

try:
    from redis.driver_info import DriverInfo
except ImportError:  # a redis-py that reads its own version once
    _DRIVER: dict[str, Any] = {}
else:  # one that reads it out of its package's metadata for every connection, which takes longer than all the rest
    _DRIVER = {"driver_info": DriverInfo()}

_log = logging.getLogger("bide.redis")


Server = tuple[str, int]
"""Host and port; a socket's path and 0."""


class Nodes(ABC):
    """The servers of one store, and a link to each that was needed so far."""

    def __init__(self, address: Address, patience: float) -> None:
        self._address = address
        self._patience = patience
        self._links: dict[Server, Link] = {}
        self._looking = asyncio.Lock()
        self._looked = 0
        self._closed = False
        """For a call that looks for its server after `close`: it never connects."""

    @abstractmethod
    def _where(self, shard: int | None) -> Server | None:
        """The server that has the shard (None: what belongs to the whole namespace), as far as known."""

    @abstractmethod
    async def _look(self) -> None:
        """Find out who has what now. Raises NotSent, StoreUnavailable."""

    async def look_again(self) -> None:
        """A link led to the wrong server, or to none: look, once for all who ask at the same time."""
        looked = self._looked
        async with self._looking:
            if looked == self._looked:
                await self._look()
                self._looked += 1

    async def _found(self, shard: int | None) -> Server:
        where = self._where(shard)
        if where is None:
            await self.look_again()
            where = self._where(shard)
            if where is None:
                raise NotSent(f"{self._address.shown}: no server serves the slot of shard {shard}")
        return where

    async def link(self, shard: int | None) -> Link:
        """To the server that has the shard. Raises NotSent, StoreUnavailable."""
        return self.at(*await self._found(shard))

    def ready(self, shard: int) -> Link | None:
        """The same, if it is known and connected."""
        where = self._where(shard)
        link = None if where is None else self._links.get(where)
        return link if link is not None and link.ready else None

    def at(self, host: str, port: int) -> Link:
        """To one server by its address: also for a call that is to be asked there for once."""
        link = self._links.get((host, port))
        if link is None:
            link = self._links[host, port] = self._link_to(host, port)
        return link

    def part_of(self, shard: int) -> int:
        """Shards with the same number fail together; others do not wait for them."""
        return 0

    async def masters(self) -> list[Link]:
        """One link to every server that holds data."""
        return [await self.link(None)]

    async def connection(self, shard: int | None) -> AbstractConnection:
        """A connection of one's own to where `link` leads, not yet connected: for a subscription."""
        return make_connection(self._address, *await self._found(shard))

    async def close(self) -> None:
        self._closed = True
        for link in list(self._links.values()):
            await link.close()

    def _link_to(self, host: str, port: int, *, to_look: bool = False, for_sentinel: bool = False) -> Link:
        """A new link to a server; `to_look`: for one question, whose answer is not waited for as long."""
        name = f"{host}:{port}" if port else host
        return Link(
            f"sentinel {name}" if for_sentinel else name,
            lambda: make_connection(self._address, host, port, for_sentinel=for_sentinel),
            patience=min(1.0, self._patience) if to_look else self._patience,
            closed=self._closed,
        )


def nodes_of(address: Address, layout: Layout, *, patience: float) -> Nodes:
    if address.kind == "cluster":
        return ClusterNodes(address, patience, layout)
    if address.kind == "sentinel":
        return SentinelNodes(address, patience)
    return OneNode(address, patience)


def make_connection(address: Address, host: str, port: int, *, for_sentinel: bool = False) -> AbstractConnection:
    """A connection that is not yet connected. Answers in bytes; no timeouts of its own, the link has them."""
    options: dict[str, Any] = {
        "db": 0 if for_sentinel or address.kind == "cluster" else address.db,
        "username": address.sentinel_username if for_sentinel else address.username,
        "password": address.sentinel_password if for_sentinel else address.password,
        "socket_timeout": None,
        "socket_connect_timeout": 5,
        "protocol": 2,
        "client_name": "bide",
        "health_check_interval": 0,
        **_DRIVER,
    }
    if address.path is not None:
        return UnixDomainSocketConnection(path=address.path, **options)
    kind = SSLConnection if address.tls else Connection
    if address.tls:
        options |= address.tls_options
    return kind(host=host, port=port, socket_keepalive=True, **options)


class OneNode(Nodes):
    """One server. There is no other to look for; one that became a replica may be made a master again."""

    def _where(self, shard: int | None) -> Server:
        return self._address.hosts[0] if self._address.path is None else (self._address.path, 0)

    async def _look(self) -> None:
        return


class SentinelNodes(Nodes):
    """The master that a majority of Sentinels agrees on: asked for at the start, and whenever it is lost or demoted."""

    _master: Server | None = None

    def _where(self, shard: int | None) -> Server | None:
        return self._master

    async def _look(self) -> None:
        """Ask each Sentinel in turn, until one answers."""
        troubles = []
        for host, port in self._address.hosts:
            try:
                found = await self._ask(host, port)
            except (NotSent, Lost, StoreUnavailable) as error:
                troubles.append(str(error))
                continue
            if found is None:
                troubles.append(f"{host}:{port} knows no service {self._address.service!r}")
                continue
            if found != self._master:  # else it may be in use
                _log.info("the master of %s is %s:%d", self._address.service, *found)
                before, self._master = self._master, found
                if before is not None:
                    await self.at(*before).drop("another server is the master now")
            return
        raise NotSent(f"no Sentinel names a master: {'; '.join(troubles)}")

    async def _ask(self, host: str, port: int) -> Server | None:
        link = self._link_to(host, port, to_look=True, for_sentinel=True)
        try:
            [reply] = await link.ask([("SENTINEL", "get-master-addr-by-name", self._address.service)])
        finally:
            await link.close()
        if isinstance(reply, ResponseError):
            raise NotSent(f"sentinel {host}:{port}: {reply}")
        return None if reply is None else (reply[0].decode(), int(reply[1]))


class ClusterNodes(Nodes):
    """The masters of a Cluster, each with the slots it serves now."""

    def __init__(self, address: Address, patience: float, layout: Layout) -> None:
        super().__init__(address, patience)
        self._slots = [key_slot(tag.encode()) for tag in layout.tags]
        self._common = key_slot(f"{{{layout.namespace}}}:".encode())
        self._owner: dict[int, Server] = {}

    def _where(self, shard: int | None) -> Server | None:
        return self._owner.get(self._common if shard is None else self._slots[shard])

    async def _look(self) -> None:
        troubles = []
        for host, port in dict.fromkeys([*self._owner.values(), *self._address.hosts]):
            link = self._link_to(host, port, to_look=True)
            try:
                [reply] = await link.ask([("CLUSTER", "SLOTS")])
            except (NotSent, Lost) as error:
                troubles.append(str(error))
                continue
            finally:
                await link.close()
            if isinstance(reply, ResponseError):
                raise StoreUnavailable(f"{host}:{port} is no Cluster: {reply} (use redis:// for a single server)")
            wanted = {*self._slots, self._common}
            owner = {}
            for first, last, master, *_ in reply:
                where = (master[0].decode() or host, int(master[1]))
                owner.update({slot: where for slot in wanted if first <= slot <= last})
            self._owner = owner
            return
        raise NotSent(f"no server of the Cluster answers: {'; '.join(troubles)}")

    def part_of(self, shard: int) -> int:
        return hash(self._owner.get(self._slots[shard], shard))

    async def masters(self) -> list[Link]:
        await self._found(None)
        return [self.at(*where) for where in dict.fromkeys(self._owner.values())]
