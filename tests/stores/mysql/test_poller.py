"""Polling for others' commits where nothing tells of them: in time, by few looks, and a deaf poller fools nobody."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
from tests.stores.sql.fixtures import OpensStore
from tests.waiting import elapse, until, virtual_time

from bide.core.records import In
from bide.ports import Listening
from bide.stores.listeners import Listeners
from bide.stores.mysql import MySqlStore
from bide.stores.mysql.address import address_of
from bide.stores.mysql.poller import POLL, Poller
from bide.stores.mysql.store import MySqlRuntime
from bide.testing.proxy import FaultProxy
from bide.testing.store_suite.acts import HOUR, lease, new, put_one
from bide.testing.virtual import run_virtual

Heard = list[tuple[str, int]]


@pytest.fixture(autouse=True)
def waits_for_its_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bide.stores.mysql.poller._SILENCE", 60.0)


async def listening_to(store: MySqlStore, *topics: str) -> tuple[Poller, Heard, Listening]:
    """A poller that hears already, and what it has told so far."""
    heard: Heard = []
    listening = await store.listen(topics, lambda topic, wake: heard.append((topic, wake)))
    poller = poller_of(store)
    await until(lambda: poller.hears, "the first look")
    return poller, heard, listening


def poller_of(store: MySqlStore) -> Poller:
    assert isinstance(store._opened, MySqlRuntime)
    assert isinstance(store._opened.notifications, Poller)
    return store._opened.notifications


async def test_what_others_commit_is_heard_once_it_is_due_within_a_second(
    url: str, open_store: OpensStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = await open_store(url, clock="server"), await open_store(url, clock="server")
    _, heard, _ = await listening_to(store, "t", "u")
    soon = await put_one(other, new("soon", topic="u", due=In(HOUR)))
    await put_one(other, new("not listened to", topic="v", due=In(0)))
    now = await put_one(other, new("now", due=In(0)))
    await until(lambda: ("t", now.wake_at) in heard, "what is due")
    assert {topic for topic, _ in heard} == {"t"}
    monkeypatch.setattr("bide.stores.mysql.poller._SOON", 2 * HOUR)  # an hour is soon now
    await until(lambda: ("u", soon.wake_at) in heard, "what will be due")


async def test_who_listens_need_not_look(url: str, open_store: OpensStore) -> None:
    store = await open_store(url, clock="server")
    before = await lease(store)
    assert before.again_by is not None, "nobody listens"
    assert before.again_by <= before.now + POLL
    poller, _, listening = await listening_to(store, "t")
    assert (await lease(store)).again_by is None
    assert (await lease(store, topic="u")).again_by is not None, "nobody listens to that"
    await listening.close()
    assert (await lease(store)).again_by is not None, "nobody listens any more"
    await until(lambda: not poller.hears, "the end of the looks")


async def test_where_the_clock_is_the_callers_there_is_no_look(url: str, open_store: OpensStore) -> None:
    store = await open_store(url)
    await store.listen(["t"], lambda topic, wake: None)
    assert poller_of(store)._task is None
    assert (await lease(store)).again_by is None


async def test_a_lease_is_a_look(url: str, open_store: OpensStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store = await open_store(url, clock="server")
    poller, _, _ = await listening_to(store, "t", "u")
    told: list[list[str]] = []
    monkeypatch.setattr(poller, "looked", lambda topics, sent: told.append(list(topics)))
    await lease(store, topic="t")
    assert ["t"] in told


@pytest.mark.parametrize(("still", "of_t"), [(10.0, 1), (0.5, 5)])
def test_the_poller_keeps_still_about_what_was_leased(monkeypatch: pytest.MonkeyPatch, still: float, of_t: int) -> None:
    """For two seconds `t` is leased every 50 ms, `u` by nobody; the connection is used now and then all the same."""
    looks: list[list[str]] = []

    async def look(connection: Any, head: Any, topics: Any) -> dict[str, int]:
        looks.append(sorted(topics))
        return {}

    async def connected(*of: Any, **more: Any) -> Any:
        return Mock(mariadb=True)

    async def listen(topics: list[str]) -> None:
        listeners = Listeners(logging.getLogger())
        poller = Poller(Mock(address=address_of("mysql://h/d"), listeners=listeners, by_server=True))
        monkeypatch.setattr(poller, "_look", look)
        await poller.listen(topics, lambda topic, wake: None)
        for _ in range(40):
            await elapse(0.05)
            poller.looked(["t"], virtual_time())
        await poller.close()

    monkeypatch.setattr("bide.stores.mysql.poller.connect", connected)
    monkeypatch.setattr("bide.stores.mysql.poller._STILL", still)
    run_virtual(lambda loop: listen(["t", "u"]))
    assert looks.count(["u"]) >= 9, "every 200 ms"
    assert sum("t" in one for one in looks) == 1, "but for the first"
    looks.clear()
    run_virtual(lambda loop: listen(["t"]))
    assert len(looks) == of_t


async def test_a_deaf_poller_wakes_who_relies_on_it(
    through: Callable[..., Any], proxy: FaultProxy, url: str, open_store: OpensStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bide.stores.mysql.poller._PAUSE", 0.1)
    store, other = await through(clock="server"), await open_store(url, clock="server")
    poller, heard, _ = await listening_to(store, "t")
    monkeypatch.setattr("bide.stores.mysql.poller._SILENCE", 0.3)
    proxy.hold()
    await until(lambda: bool(heard), "that it is deaf", patience=180)  # a look may have begun before the new silence
    assert not poller.hears
    monkeypatch.setattr("bide.stores.mysql.poller._SILENCE", 60.0)
    await proxy.heal()
    proxy.cut()  # what is held stays so
    assert (await lease(store)).again_by is not None or poller.hears, "it looks for itself, or need not"
    await until(lambda: poller.hears, "another connection")
    heard.clear()
    told = await put_one(other, new(due=In(0)))
    await until(lambda: ("t", told.wake_at) in heard, "what was committed after that")


async def test_a_defect_makes_deaf_and_not_silent(
    url: str, open_store: OpensStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("bide.stores.mysql.poller._PAUSE", 0.1)
    store = await open_store(url, clock="server")
    poller, heard, _ = await listening_to(store, "t")
    look = poller._look

    async def broken(connection: Any, head: Any, topics: Any) -> Any:
        monkeypatch.setattr(poller, "_look", look)
        raise ZeroDivisionError

    monkeypatch.setattr(poller, "_look", broken)
    await until(lambda: bool(heard), "that it is deaf")
    assert "a defect stopped a look" in caplog.text
    await until(lambda: poller.hears, "the next look")


async def test_closing_ends_it(url: str, open_store: OpensStore) -> None:
    store = await open_store(url, clock="server")
    poller, _, listening = await listening_to(store, "t")
    task = poller._task
    assert task is not None
    await store.close()
    assert task.done()
    assert not poller.hears
    await listening.close()


async def test_topics_nobody_listens_to_any_more_are_forgotten(url: str, open_store: OpensStore) -> None:
    store = await open_store(url, clock="server")
    poller, _, _ = await listening_to(store, "t")
    for number in range(100):
        await lease(store, topic=f"once {number}")
    await until(lambda: poller._looked.keys() == {"t"}, "the next look")
