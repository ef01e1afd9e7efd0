"""Hearing of others' commits where nothing tells of them: in time, by few looks, and nobody relies on a deaf ear."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.stores.mysql.conftest import OpensStore

from bide.core.records import In
from bide.ports import Listening
from bide.stores.mysql import MySqlStore
from bide.stores.mysql.ear import POLL, Ear
from bide.testing.proxy import FaultProxy
from bide.testing.store_suite.acts import DAY, lease, new, put_one, until

Heard = list[tuple[str, int]]


async def listening_to(store: MySqlStore, *topics: str) -> tuple[Ear, Heard, Listening]:
    """An ear that hears already, and what it has told so far."""
    heard: Heard = []
    listening = await store.listen(topics, lambda topic, wake: heard.append((topic, wake)))
    ear = ear_of(store)
    await until(lambda: ear.hears, "the first look")
    return ear, heard, listening


def ear_of(store: MySqlStore) -> Ear:
    assert store._opened is not None
    return store._opened.ear


def counting_looks(ear: Ear, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The topics of each look from now on."""
    looks: list[list[str]] = []
    look = ear._look

    async def counted(connection: Any, head: Any, topics: Any) -> Any:
        looks.append(sorted(topics))
        return await look(connection, head, topics)

    monkeypatch.setattr(ear, "_look", counted)
    return looks


@pytest.mark.real_time
async def test_what_others_commit_is_heard_once_it_is_due_within_a_second(url: str, open_store: OpensStore) -> None:
    store, other = await open_store(url, clock="server"), await open_store(url, clock="server")
    _, heard, _ = await listening_to(store, "t", "u")
    await put_one(other, new("far", topic="u", due=In(DAY)))
    await put_one(other, new("not listened to", topic="v", due=In(0)))
    now = await put_one(other, new("now", due=In(0)))
    await until(lambda: ("t", now.wake_at) in heard, "what is due")
    assert {topic for topic, _ in heard} == {"t"}
    soon = await put_one(other, new("soon", topic="u", due=In(1_500)))
    await until(lambda: ("u", soon.wake_at) in heard, "what will be due")
    assert time.time() * 1_000 < soon.wake_at


async def test_who_listens_need_not_look(url: str, open_store: OpensStore) -> None:
    store = await open_store(url, clock="server")
    before = await lease(store)
    assert before.again_by is not None, "nobody listens"
    assert before.again_by <= before.now + POLL
    ear, _, listening = await listening_to(store, "t")
    assert (await lease(store)).again_by is None
    assert (await lease(store, topic="u")).again_by is not None, "nobody listens to that"
    await listening.close()
    assert (await lease(store)).again_by is not None, "nobody listens any more"
    await until(lambda: not ear.hears, "the end of the looks")


async def test_where_the_clock_is_the_callers_there_is_no_look(url: str, open_store: OpensStore) -> None:
    store = await open_store(url)
    await store.listen(["t"], lambda topic, wake: None)
    assert ear_of(store)._task is None
    assert (await lease(store)).again_by is None


@pytest.mark.real_time
async def test_a_lease_is_a_look(url: str, open_store: OpensStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store = await open_store(url, clock="server")
    ear, _, _ = await listening_to(store, "t", "u")
    looks = counting_looks(ear, monkeypatch)
    for _ in range(20):
        await lease(store, topic="t")
        await asyncio.sleep(0.05)
    assert looks.count(["u"]) >= 3
    assert sum("t" in look for look in looks) <= 1, "but for the one that was due when the first lease came"


@pytest.mark.real_time
async def test_it_keeps_still_for_so_long_only(
    url: str, open_store: OpensStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bide.stores.mysql.ear._STILL", 0.5)
    store = await open_store(url, clock="server")
    ear, _, _ = await listening_to(store, "t")
    looks = counting_looks(ear, monkeypatch)
    for _ in range(30):
        await lease(store)
        await asyncio.sleep(0.05)
    assert 1 <= len(looks) <= 4, "its connection is used"


@pytest.mark.faults
async def test_a_deaf_ear_wakes_who_relies_on_it(
    through: Callable[..., Any], proxy: FaultProxy, url: str, open_store: OpensStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bide.stores.mysql.ear._SILENCE", 0.3)
    monkeypatch.setattr("bide.stores.mysql.ear._PAUSE", 0.1)
    store, other = await through(clock="server"), await open_store(url, clock="server")
    ear, heard, _ = await listening_to(store, "t")
    proxy.hold()
    await until(lambda: bool(heard), "that it is deaf")
    assert not ear.hears
    await proxy.heal()
    assert (await lease(store)).again_by is not None or ear.hears, "it looks for itself, or need not"
    await until(lambda: ear.hears, "another connection")
    heard.clear()
    told = await put_one(other, new(due=In(0)))
    await until(lambda: ("t", told.wake_at) in heard, "what was committed after that")


@pytest.mark.faults
async def test_a_defect_makes_deaf_and_not_silent(
    url: str, open_store: OpensStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("bide.stores.mysql.ear._PAUSE", 0.1)
    store = await open_store(url, clock="server")
    ear, heard, _ = await listening_to(store, "t")
    look = ear._look

    async def broken(connection: Any, head: Any, topics: Any) -> Any:
        monkeypatch.setattr(ear, "_look", look)
        raise ZeroDivisionError

    monkeypatch.setattr(ear, "_look", broken)
    await until(lambda: bool(heard), "that it is deaf")
    assert "a defect stopped a look" in caplog.text
    await until(lambda: ear.hears, "the next look")


async def test_closing_ends_it(url: str, open_store: OpensStore) -> None:
    store = await open_store(url, clock="server")
    ear, _, listening = await listening_to(store, "t")
    task = ear._task
    assert task is not None
    await store.close()
    assert task.done()
    assert not ear.hears
    await listening.close()


async def test_topics_nobody_listens_to_any_more_are_forgotten(url: str, open_store: OpensStore) -> None:
    store = await open_store(url, clock="server")
    ear, _, _ = await listening_to(store, "t")
    for number in range(100):
        await lease(store, topic=f"once {number}")
    await until(lambda: ear._looked.keys() == {"t"}, "the next look")
