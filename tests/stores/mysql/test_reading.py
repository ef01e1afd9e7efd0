"""A page is read in one snapshot, which begins with its first question and takes no round trip of its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.stores.sql.fixtures import OpensStore

from bide.core.records import Cancel, Filter, Page
from bide.stores.mysql.connection import Connection, Rows
from bide.testing.store_suite.base import change_all, keys, new, put


async def test_what_is_cancelled_while_a_page_is_read_is_on_it(
    url: str, open_store: OpensStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = await open_store(url), await open_store(url)
    await put(store, new("a", topic="t0"), new("b", topic="t1"))
    everything, page = Filter(), Page(limit=10)
    assert keys((await store.find(everything, page)).tasks) == ["a", "b"]
    packets: list[tuple[Connection, bytes | str]] = []
    ask = Connection.ask

    async def asked(self: Connection, packet: bytes | str, meanwhile: Callable[[], None] | None = None) -> list[Rows]:
        packets.append((self, packet))
        first = len(packets) == 1
        answer = await ask(self, packet, meanwhile)
        if first:
            await change_all(other, [Cancel("t1", "b")])
        return answer

    monkeypatch.setattr(Connection, "ask", asked)
    assert keys((await store.find(everything, page)).tasks) == ["a", "b"], "as it was when the page was asked for"
    ours = [packet for connection, packet in packets if connection is packets[0][0] and isinstance(packet, bytes)]
    assert len(ours) == 3 + 2 + 1, "a question for each topic and one more, two pages, and the end of it"
    assert b"START TRANSACTION" in ours[0]
    assert b"SELECT" in ours[0]
    assert keys((await store.find(everything, page)).tasks) == ["a"]
