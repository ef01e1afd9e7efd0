"""What an open store has: its servers, their clock, one caller for each kind of operation, the heads and the ears."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from uuid import uuid4

from bide.core.errors import StoreError
from bide.core.records import In, Record, Settlement, Verdict
from bide.stores.redis import writing
from bide.stores.redis.address import Address
from bide.stores.redis.caller import Caller
from bide.stores.redis.errors import Lost, NotSent
from bide.stores.redis.layout import Layout
from bide.stores.redis.leasing import Leaser
from bide.stores.redis.nodes import Nodes
from bide.stores.redis.reading import Reader
from bide.stores.redis.scripts import script
from bide.stores.redis.server import Server
from bide.stores.redis.wakes import Hearing
from bide.stores.server_time import ServerTime

_log = logging.getLogger("bide.redis")
_KINDS = ("add", "change", "lease", "extend", "settle", "purge")
_TELLING = frozenset({"add", "change", "settle"})
"""What may make something wake earlier; and what a caller is promised, so that replicas are waited for."""


class Opened:
    """Made by `open`, let go of by `close`."""

    def __init__(
        self,
        address: Address,
        layout: Layout,
        nodes: Nodes,
        time: ServerTime,
        server: Server,
        *,
        patience: float,
        silence: float,
        by_server: bool,
    ) -> None:
        self.address = address
        self.layout = layout
        self.nodes = nodes
        self.time = time
        self.server = server
        self.by_server = by_server
        self.reader = Reader(layout, nodes, time, patience=patience)
        name = uuid4().hex[:16]
        sharded = server.cluster and server.shards_channels
        channels = [layout.wake_channel(shard if sharded else None) for shard in range(layout.shards)]
        self.callers = {
            kind: Caller(
                script(kind, flags=server.knows_flags),
                f"{name}{kind[:2]}".encode(),
                layout,
                nodes,
                time,
                # one that is not extended in this round may be in the next; waiting longer would cost the others theirs
                patience=min(patience, silence) if kind == "extend" else patience,
                tells=("SPUBLISH" if sharded else "PUBLISH") if kind in _TELLING else "",
                channels=channels if kind in _TELLING else (),
                wait_replicas=address.wait_replicas if kind in _TELLING else 0,
                wait_for=silence / 4,  # nobody else's call on that connection may be taken for lost meanwhile
            )
            for kind in _KINDS
        }
        several = server.cluster and by_server
        part_of = nodes.part_of if several else None
        self.leaser = Leaser(
            self.callers["lease"], layout, time, give_back=self._give_back, by_server=by_server, part_of=part_of
        )
        self.hearing = Hearing(nodes, layout, name, self.leaser.told, sharded=sharded, patience=silence)
        self.leaser.tell = self.hearing.tell

    async def prepare(self) -> None:
        """Give every server the scripts, and look at its clock."""
        texts = [("SCRIPT", "LOAD", caller.script.text) for caller in self.callers.values()]
        for link in await self.nodes.masters():
            try:
                await link.ask(texts)
            except (NotSent, Lost) as error:
                _log.info("the scripts will be loaded when they are first needed: %s", error)
        await self.look_at_the_clock()

    async def look_at_the_clock(self) -> None:
        """Ask what time it is there. Every answer tells it; this is for the first time, and for doctor."""

        async def ask() -> int:
            [(seconds, micros)] = await self.reader.ask([(None, ("TIME",))])
            return int(seconds) * 1_000_000 + int(micros)

        await self.time.look(ask)
        if self.by_server:
            self.time.warn_of_skew(self.address.shown)

    async def _give_back(self, records: Sequence[Record]) -> None:
        """End leases of which nothing was begun: due again at once, counting nothing."""
        ends = [Settlement(record.topic, record.key, record.token, Verdict.DEFER, In(0)) for record in records]
        for answer in await writing.settle(self.callers["settle"], self.layout, ends, "", 0):
            if isinstance(answer, StoreError):
                _log.warning("a lease could not be given back, and ends by itself: %s", answer)

    async def close(self) -> None:
        try:
            await self.hearing.close()
            await self.leaser.close()
        finally:
            await self.nodes.close()
