"""Calls of a store of tables, for what is true of all that write at once, and of all that only read."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tests.waiting import until

from bide.core.errors import OutcomeUnknown
from bide.core.events import Event, EventKind
from bide.core.names import new_id
from bide.core.records import Filter, Lease, Page, Ref
from bide.testing.proxy import Act, FaultProxy
from bide.testing.store_suite.base import HOUR, NOW, add_all, new

Call = Callable[[Any], Awaitable[Any]]
"""Of an open store, with `Shares` and `KeepsEvents`; it may be made again and again."""

_EVENT = Event(at=NOW, topic="t", key="k", id=new_id(), kind=EventKind.CHANGE)

WRITES: dict[str, Call] = {  # and do not look first, which is safe to lose
    "add": lambda store: add_all(store, [new()]),
    "extend": lambda store: store.extend([Lease("t", "nobody", 1)], now=NOW, until=NOW + HOUR),
    "purge": lambda store: store.purge(now=NOW, limit=1),
    "announce": lambda store: store.announce("w", ["t"], NOW + HOUR, now=NOW),
    "record": lambda store: store.record([_EVENT]),
}
READS: dict[str, Call] = {
    "get": lambda store: store.get([Ref("t", "k")]),
    "find": lambda store: store.find(Filter(), Page()),
    "look": lambda store: store.lease({"t": 0}, now=NOW, until=NOW + HOUR, holder="w"),
    "tally": lambda store: store.tally(),
    "events": lambda store: store.events(),
}


async def refused_after_a_lost_answer(
    call: Call, store: Any, proxy: FaultProxy, drop_the_tables: Callable[[], object]
) -> None:
    """The answer of `call` is lost, and when it is sent again the tables are gone: that is no proof of anything."""
    await call(store)
    await proxy.refuse()
    lost = proxy.fault(Act.LOSE_REPLY)
    calling = asyncio.ensure_future(call(store))
    await until(lambda: bool(lost.hits), "the call to be sent")
    await asyncio.to_thread(drop_the_tables)
    await proxy.accept()
    with pytest.raises(OutcomeUnknown, match="an answer was lost"):
        await calling
