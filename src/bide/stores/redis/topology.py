"""Which server to ask: the one there is, the master that Sentinel names, or the one that has a shard's slot.

Each answers `link(shard)`, and is told with `look_again` when a server said that it is the wrong one, or was lost.
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


class Nodes(ABC):
    """The servers of one store."""

    def __init__(self, address: Address, patience: float) -> None:
        self._address = address
        self._patience = patience
        self._closed = False
        """For a call that looks for its server after `close`: it never connects."""

    @abstractmethod
    async def link(self, shard: int | None) -> Link:
        """To the server that has the shard (None: what belongs to the whole namespace). Raises NotSent."""

    @abstractmethod
    def ready(self, shard: int) -> Link | None:
        """The same, if it is known and connected."""

    @abstractmethod
    async def look_again(self, link: Link | None) -> None:
        """That link led to the wrong server, or to none: find out who has what now."""

    @abstractmethod
    def at(self, host: str, port: int) -> Link:
        """To one server by its address, for the one call that is to be asked there."""

    def part_of(self, shard: int) -> int:
        """Shards with the same number fail together; others do not wait for them."""
        return 0

    async def masters(self) -> list[Link]:
        """One link to every server that holds data."""
        return [await self.link(None)]

    @abstractmethod
    def connection(self, shard: int | None) -> AbstractConnection:
        """A connection of one's own to where `link` leads, not yet connected: for a subscription."""

    @abstractmethod
    async def close(self) -> None: ...

    def _link_to(self, host: str, port: int, *, to_look: bool = False, for_sentinel: bool = False) -> Link:
        """A new link to a server; `to_look`: for one question, whose answer is not waited for as long."""
        return Link(
            f"{'sentinel ' if for_sentinel else ''}{host}:{port}",
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


def make_connection(
    address: Address, host: str | None = None, port: int = 0, *, for_sentinel: bool = False
) -> AbstractConnection:
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
    return kind(host=host or address.hosts[0][0], port=port or address.hosts[0][1], socket_keepalive=True, **options)


class OneNode(Nodes):
    """One server."""

    def __init__(self, address: Address, patience: float) -> None:
        super().__init__(address, patience)
        self._link = Link(address.shown, lambda: make_connection(address), patience=patience)

    async def link(self, shard: int | None) -> Link:
        return self._link

    def ready(self, shard: int) -> Link | None:
        return self._link if self._link.ready else None

    async def look_again(self, link: Link | None) -> None:
        """There is no other; a server that became a replica may be made a master again."""

    def at(self, host: str, port: int) -> Link:
        return self._link

    def connection(self, shard: int | None) -> AbstractConnection:
        return make_connection(self._address)

    async def close(self) -> None:
        await self._link.close()


class SentinelNodes(Nodes):
    """The master that a majority of Sentinels agrees on: asked for at the start, and whenever it is lost or demoted."""

    def __init__(self, address: Address, patience: float) -> None:
        super().__init__(address, patience)
        self._master: tuple[str, int] | None = None
        self._link: Link | None = None
        self._looking: asyncio.Lock = asyncio.Lock()
        self._old: list[Link] = []

    async def link(self, shard: int | None) -> Link:
        if self._link is None:
            async with self._looking:
                if self._link is None:
                    await self._look()
        assert self._link is not None
        return self._link

    def ready(self, shard: int) -> Link | None:
        return self._link if self._link is not None and self._link.ready else None

    async def look_again(self, link: Link | None) -> None:
        async with self._looking:
            if link is self._link or link is None:
                await self._look()

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
            if found != self._master or self._link is None:  # else it is the same, and may be in use
                _log.info("the master of %s is %s:%d", self._address.service, *found)
                if self._link is not None:
                    await self._link.drop("another server is the master now")
                    self._old.append(self._link)
                self._master = found
                self._link = self._link_to(*found)
            return
        raise NotSent(f"no Sentinel names a master: {'; '.join(troubles)}")

    async def _ask(self, host: str, port: int) -> tuple[str, int] | None:
        link = self._link_to(host, port, to_look=True, for_sentinel=True)
        try:
            [reply] = await link.ask([("SENTINEL", "get-master-addr-by-name", self._address.service)])
        finally:
            await link.close()
        if isinstance(reply, ResponseError):
            raise NotSent(f"sentinel {host}:{port}: {reply}")
        return None if reply is None else (reply[0].decode(), int(reply[1]))

    def at(self, host: str, port: int) -> Link:
        assert self._link is not None
        return self._link

    def connection(self, shard: int | None) -> AbstractConnection:
        if self._master is None:
            raise NotSent("the master is not known yet")
        return make_connection(self._address, *self._master)

    async def close(self) -> None:
        self._closed = True
        for link in (*self._old, *([self._link] if self._link else ())):
            await link.close()


class ClusterNodes(Nodes):
    """The masters of a Cluster, each with the slots it serves now."""

    def __init__(self, address: Address, patience: float, layout: Layout) -> None:
        super().__init__(address, patience)
        self._slots = [key_slot(tag.encode()) for tag in layout.tags]
        self._common = key_slot(f"{{{layout.namespace}}}:".encode())
        self._links: dict[tuple[str, int], Link] = {}
        self._owner: dict[int, tuple[str, int]] = {}
        self._seeds = list(address.hosts)
        self._looking = asyncio.Lock()
        self._looked = 0

    def _where(self, shard: int | None) -> tuple[str, int] | None:
        return self._owner.get(self._common if shard is None else self._slots[shard])

    async def link(self, shard: int | None) -> Link:
        where = self._where(shard)
        if where is None:
            await self._look_since(self._looked)
            where = self._where(shard)
            if where is None:
                raise NotSent(f"{self._address.shown}: no server serves the slot of shard {shard}")
        return self.at(*where)

    def ready(self, shard: int) -> Link | None:
        where = self._owner.get(self._slots[shard])
        link = None if where is None else self._links.get(where)
        return link if link is not None and link.ready else None

    async def look_again(self, link: Link | None) -> None:
        await self._look_since(self._looked)

    async def _look_since(self, looked: int) -> None:
        """Once for all who ask at the same time."""
        async with self._looking:
            if looked == self._looked:
                await self._look()

    async def _look(self) -> None:
        troubles = []
        for host, port in dict.fromkeys([*self._owner.values(), *self._seeds]):
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
            self._looked += 1
            return
        raise NotSent(f"no server of the Cluster answers: {'; '.join(troubles)}")

    def at(self, host: str, port: int) -> Link:
        link = self._links.get((host, port))
        if link is None:
            link = self._links[host, port] = self._link_to(host, port)
        return link

    def part_of(self, shard: int) -> int:
        return hash(self._owner.get(self._slots[shard], shard))

    async def masters(self) -> list[Link]:
        if not self._owner:
            await self._look_since(self._looked)
        return [self.at(*where) for where in dict.fromkeys(self._owner.values())]

    def connection(self, shard: int | None) -> AbstractConnection:
        where = self._where(shard)
        if where is None:
            raise NotSent(f"no server serves the slot of shard {shard}")
        return make_connection(self._address, *where)

    async def close(self) -> None:
        self._closed = True
        for link in list(self._links.values()):
            await link.close()
