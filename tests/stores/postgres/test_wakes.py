"""Tidings: few, of what matters, and nothing is late for long where they cannot be had."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import asyncpg
import pytest
from tests.stores.sql.fixtures import OpensStore
from tests.waiting import pause, until

from bide.core.instants import In
from bide.stores.postgres import wakes
from bide.stores.postgres.connection import address_of
from bide.stores.postgres.queries import Names
from bide.stores.postgres.wakes import WakeMessages
from bide.stores.sql.leasing import POLL
from bide.testing.proxy import FaultProxy
from bide.testing.store_suite.base import DAY, NOW, lease, new, put, put_one


def test_only_what_wakes_before_the_cap_is_told() -> None:
    telling = WakeMessages(cap=1_000)
    assert telling.messages({"t": NOW + 1_001}, NOW) == []
    assert telling.messages({"t": NOW + 1_000, "u": NOW + 2_000}, NOW) == [f'{{"t":{NOW + 1_000}}}']


def test_what_listeners_have_just_heard_is_not_told_again() -> None:
    telling = WakeMessages(cap=60_000)
    assert telling.messages({"t": NOW + 5_000}, NOW)
    assert telling.messages({"t": NOW + 5_000}, NOW) == [], "they will look then anyhow"
    assert telling.messages({"t": NOW + 6_000}, NOW + 10) == []
    assert telling.messages({"t": NOW + 4_000}, NOW + 20), "earlier"
    assert telling.messages({"t": NOW + 6_000}, NOW + 200), "some may have looked since, and found nothing"
    assert telling.messages({"t": NOW + 6_000}, NOW + 5_900), "they may look before this is committed"
    assert telling.messages({"t": NOW}, NOW)
    assert telling.messages({"t": NOW}, NOW), "what is due now is told each time"
    assert telling.messages({"t": NOW + 5_000}, NOW)
    telling.forget(["t"])
    assert telling.messages({"t": NOW + 5_000}, NOW), "it was not told after all"


def test_many_topics_are_told_in_messages_that_the_server_takes() -> None:
    said = WakeMessages(cap=60_000).messages({f"{number:0200}": NOW for number in range(100)}, NOW)
    assert len(said) == 100
    assert all(len(one.encode()) < 8_000 for one in said)


async def test_a_batch_sends_one_message(url: str, open_store: OpensStore) -> None:
    store = await open_store(url)
    address = address_of(url)
    heard: list[str] = []
    connection = await asyncpg.connect(address.dsn)
    try:
        channel = Names(address.schema, address.prefix).channel
        await connection.add_listener(channel, lambda *said: heard.append(said[3]))
        await put(store, *(new(str(number)) for number in range(1_000)))
        await put(store, *(new(f"far {number}", due=In(DAY)) for number in range(10)))
        await until(lambda: bool(heard), "a message")
        await pause(0.05, why="no other message is to come")
        assert heard == [f'{{"t":{NOW}}}']
    finally:
        await connection.close()


async def test_a_deaf_subscription_is_replaced(
    through: Callable[..., Any], proxy: FaultProxy, url: str, open_store: OpensStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wakes, "ECHO_EVERY", 0.3)
    store, other = await through(), await open_store(url)
    heard: list[tuple[str, int]] = []
    listening = await store.listen(["t"], lambda topic, wake: heard.append((topic, wake)))

    async def told() -> Any:
        await put_one(other)
        return heard

    await until(told, "a message")
    proxy.hold()
    opened = store._opened
    await until(lambda: opened.notifications.replaced > 0 and not opened.notified, "it to be found deaf")
    monkeypatch.setattr(wakes, "ECHO_EVERY", 60.0)
    await proxy.heal()
    proxy.cut()  # what is held stays so
    await until(lambda: opened.notified, "another")
    heard.clear()
    await until(told, "a message after that")
    await listening.close()


async def test_doctor_listens_to_itself(url: str, open_store: OpensStore) -> None:
    store = await open_store(url)
    assert [one.ok for one in await store.diagnose() if "LISTEN" in one.what] == [True]


async def test_behind_a_pooling_proxy_workers_poll(url: str, open_store: OpensStore) -> None:
    store = await open_store(f"{url}&pooler=transaction", clock="server")
    listening = await store.listen(["t"], lambda topic, wake: None)
    leased = await lease(store)
    assert leased.again_by is not None
    assert leased.again_by <= leased.now + POLL
    found = [one for one in await store.diagnose() if "pooling" in one.what]
    assert found
    assert not found[0].ok
    await listening.close()


async def test_a_worker_that_is_notified_need_not_poll(url: str, open_store: OpensStore) -> None:
    store = await open_store(url, clock="server")
    unnotified = await lease(store)
    assert unnotified.again_by is not None
    assert unnotified.again_by <= unnotified.now + POLL
    listening = await store.listen(["t"], lambda topic, wake: None)
    notified = await lease(store)
    assert notified.again_by is None
    await listening.close()
