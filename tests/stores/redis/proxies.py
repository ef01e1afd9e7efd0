"""A `FaultProxy` before every server of a deployment, Sentinels and replicas too, which fail as if they were one.

Clients of a Cluster and of Sentinels go where the servers tell them to. So a store that is opened at `Proxies.url` has
its connections led through the proxy of whichever server it means to reach, and fails if there is none: nothing of it
goes past them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import pytest

from bide.stores.redis import topology
from bide.stores.redis.address import Address, address_of
from bide.testing.proxy import Act, Chunk, FaultProxy, Hook, PlannedFault
from bide_proofs.servers.process import HOST
from bide_proofs.servers.redis import Connection

_APART = 1_000_000
"""By how much the numbers of two proxies' connections differ."""


class Proxies:
    """As a `FaultProxy`, for all servers behind `url`, which are on this machine: see there what each act does."""

    def __init__(self, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.each: dict[int, FaultProxy] = {port: FaultProxy(HOST, port) for port in sorted(_ports(url))}
        """By the port of the server that it stands before."""
        self._behind = url
        self._monkeypatch = monkeypatch
        self._opened = AsyncExitStack()

    @property
    def url(self) -> str:
        split = urlsplit(self._behind)
        hosts = ",".join(f"{HOST}:{self.each[port].port}" for _, port in address_of(self._behind).hosts)
        return split._replace(netloc=hosts).geturl()

    async def __aenter__(self) -> Self:
        for proxy in self.each.values():
            await self._opened.enter_async_context(proxy)
        ours = {(HOST, proxy.port) for proxy in self.each.values()}
        make = topology.make_connection

        def led(address: Address, host: str, port: int, **options: Any) -> Any:
            if not ours.issuperset(address.hosts) or (host, port) in ours:
                return make(address, host, port, **options)
            return make(address, HOST, self.each[port].port, **options)

        self._monkeypatch.setattr(topology, "make_connection", led)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._opened.aclose()

    def __iter__(self) -> Iterator[FaultProxy]:
        return iter(self.each.values())

    def watch(self, hook: Hook | None) -> None:
        """`FaultProxy.hook`, of all; no two connections have the same number."""
        for place, proxy in enumerate(self):
            proxy.hook = hook and _numbered(hook, place)

    def fault(self, act: Act, **which: Any) -> PlannedFault:
        """One fault: it happens so often in all, wherever that is."""
        first, *others = self
        planned = first.fault(act, **which)
        for proxy in others:
            proxy._faults.append(planned)
        return planned

    def slow(self, bytes_per_second: float | None) -> None:
        for proxy in self:
            proxy.slow(bytes_per_second)

    def hold(self) -> None:
        for proxy in self:
            proxy.hold()

    def cut(self) -> None:
        for proxy in self:
            proxy.cut()

    async def refuse(self) -> None:
        await asyncio.gather(*(proxy.refuse() for proxy in self))

    async def heal(self) -> None:
        await asyncio.gather(*(proxy.heal() for proxy in self))


def _numbered(hook: Callable[[Chunk], Act], place: int) -> Hook:
    return lambda chunk: hook(replace(chunk, connection=place * _APART + chunk.connection))


def _ports(url: str) -> set[int]:
    """Of every server that a client of `url` may be sent to."""
    address = address_of(url)
    found = {port for _, port in address.hosts}
    seed = address.hosts[0]
    if address.kind == "cluster":
        for _, _, *there in _asked(seed, "CLUSTER", "SLOTS"):
            found |= {int(port) for _, port, *_ in there}
    elif address.kind == "sentinel":
        found.add(int(_asked(seed, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", address.service)[1]))
        for fields in _asked(seed, "SENTINEL", "REPLICAS", address.service):
            found.add(int(fields[fields.index("port") + 1]))
    return found


def _asked(where: tuple[str, int], *words: str) -> Sequence[Any]:
    with Connection(*where) as connection:
        reply = connection.ask(*words)
    assert isinstance(reply, list)
    return reply
