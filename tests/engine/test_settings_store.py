"""Settings kept as hidden tasks: on every store, and out of the reach of every verb."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.engine.conftest import stores

from bide import BadInput, Bide, NewTask
from bide.core.instants import In
from bide.core.names import RESERVED_TOPIC, SHOWN_TOPIC, new_id
from bide.core.records import Filter, Page, Ref, State
from bide.engine.settings_store import SettingsStore


@stores("memory", "sqlite", "redis", "postgres", "mysql")
async def test_what_is_kept_is_hidden_on_every_store(store_url: str) -> None:
    async with Bide(store_url) as app:
        await keeps(app)


async def keeps(app: Bide) -> None:
    kept = SettingsStore(app.store, app.clock)
    assert await kept.get("a") is None
    assert await kept.all() == {}
    assert not await kept.remove("a")

    await kept.put("a", b"1")
    await kept.put("a", b"2")
    assert await kept.get("a") == b"2"
    assert not await kept.put_if_absent("a", b"3")
    assert await kept.put_if_absent("b:ü /%", bytes(range(256)))
    assert await kept.get("b:ü /%") == bytes(range(256))
    assert await kept.all() == {"a": b"2", "b:ü /%": bytes(range(256))}
    assert await kept.all("b:") == {"b:ü /%": bytes(range(256))}
    await asyncio.gather(*(kept.update("added up", lambda old: (old or b"") + b"x") for _ in range(20)))
    assert await kept.get("added up") == b"x" * 20, "each on top of those before, however many write at once"
    assert await kept.remove("added up")
    assert await kept.all("c") == {}

    assert sum(await asyncio.gather(*(kept.put_if_absent("raced", bytes([n])) for n in range(20)))) == 1
    assert await kept.remove("raced")
    assert not await kept.remove("raced")
    assert await kept.put_if_absent("raced", b"again"), "what was removed left no trace"

    await hidden(app)
    assert await kept.get("a") == b"2", "no verb has touched it"


async def hidden(app: Bide) -> None:
    """No verb reaches what is kept, and no list shows it."""
    at, ref = "2030-01-01T00:00Z", (RESERVED_TOPIC, "a")
    forged = NewTask(RESERVED_TOPIC, "a", new_id(), In(0))
    verbs: list[Callable[[], Awaitable[object]]] = [
        lambda: app.schedule(RESERVED_TOPIC, 1, key="a", delay="1h"),
        lambda: app.schedule_new(forged),
        lambda: app.schedule_many([forged]),
        lambda: app.reschedule(RESERVED_TOPIC, "a", delay="1h"),
        lambda: app.fire_now(RESERVED_TOPIC, "a"),
        lambda: app.cancel(RESERVED_TOPIC, "a"),
        lambda: app.redrive(RESERVED_TOPIC, "a"),
        lambda: app.get(RESERVED_TOPIC, "a"),
        lambda: app.get_many([("t", "k"), ref]),
        lambda: app.reschedule_many([(ref, at)]),
        lambda: app.fire_many([ref]),
        lambda: app.cancel_many([Ref(*ref)]),
        lambda: app.redrive_many([ref]),
        lambda: app.shift("g", "1h", topic=RESERVED_TOPIC),
        lambda: app.cancel_group("g", topic=RESERVED_TOPIC),
        lambda: app.events(RESERVED_TOPIC, "a"),
        lambda: app.find_page(Filter(topic=RESERVED_TOPIC), Page()),
        lambda: _all(app.find(topic=RESERVED_TOPIC)),
    ]
    for verb in verbs:
        with pytest.raises(BadInput, match="topic: 'bide:settings' is not accepted"):
            await verb()
    await app.schedule("t", 1, key="k", group="g", delay="1h")
    shown = [("t", "k")]
    for where in ({}, {"state": "waiting"}, {"group": "g"}, {"wake_from": at}, {"page": 1}):
        found = [(task.topic, task.key) async for task in app.find(**where)]
        assert found == ([] if "wake_from" in where else shown), where
    beside = SettingsStore(app.store, app.clock, SHOWN_TOPIC)
    for number in range(5):
        await beside.put(f"row {number}", b"", until=app.clock.now() + 3_600_000)
    await app.schedule("z", 1, key="k", delay="1h")
    for page in ({}, {"state": State.WAITING}, {"wake_before": app.clock.now() + 7_200_000}):
        found_page = await app.find_page(Filter(**page), Page(limit=2))
        assert [one.topic for one in found_page.tasks] == ["t", "z"], "no page is short for what is hidden"
        assert found_page.cursor is None
    assert (await app.cancel("z", "k")).ok
    tally = await app.tally(["0s", "3000000h"])
    assert {topic for topic, _ in tally.counts} == {"t", "z"}
    assert set(tally.forecast) == {"t"}
    assert all(event.topic != RESERVED_TOPIC for event in await app.events())
    assert len(await app.cancel_group("g")) == 1


async def _all(tasks: AsyncIterator[Any]) -> list[Any]:
    return [task async for task in tasks]


@stores("mysql")
async def test_names_and_topics_are_compared_byte_by_byte(store_url: str) -> None:
    async with Bide(store_url) as app:
        kept = SettingsStore(app.store, app.clock)
        await kept.put("Token", b"upper")
        assert await kept.get("token") is None
        task = await app.schedule("BIDE:SETTINGS", 1, key="Token", delay="1h")
        assert task.result == "created"
        assert await kept.get("Token") == b"upper"


async def test_many_settings_take_several_pages_and_a_page_of_them_alone_is_passed_over() -> None:
    async with Bide("memory:") as app:
        kept = SettingsStore(app.store, app.clock)
        for number in range(1_203):
            await kept.put(f"one:{number:04}", b"")
        await app.schedule("zzz", 1, key="k", delay="1h")
        assert list(await kept.all("one:")) == [f"one:{number:04}" for number in range(1_203)]
        page = await app.find_page(Filter(), Page(limit=100))
        assert [task.key for task in page.tasks] == ["k"], "not an empty page with a cursor"
        assert [task.key async for task in app.find(page=100)] == ["k"]


async def test_within_a_transaction_and_from_synchronous_code_too(tmp_path: Path) -> None:
    app = Bide(f"sqlite:///{tmp_path}/tasks.db")
    async with app:
        await SettingsStore(app.store, app.clock).put("a", b"1")
    await asyncio.to_thread(_synchronously, app)
    await asyncio.to_thread(_joined, app, tmp_path / "tasks.db")


def _synchronously(app: Bide) -> None:
    for verb in (app.sync.get, app.sync.cancel, app.sync.fire_now, app.sync.redrive):
        with pytest.raises(BadInput, match="bide:settings"):
            verb(RESERVED_TOPIC, "a")
    assert list(app.sync.find()) == []
    assert app.sync.tally().counts == {}


def _joined(app: Bide, path: Path) -> None:
    with sqlite3.connect(path, isolation_level=None) as connection:
        connection.execute("BEGIN IMMEDIATE")
        joined = app.sync.using(connection)
        for verb in (joined.get, joined.cancel, joined.fire_now, joined.redrive):
            with pytest.raises(BadInput, match="bide:settings"):
                verb(RESERVED_TOPIC, "a")
        with pytest.raises(BadInput, match="bide:settings"):
            joined.get_many([(RESERVED_TOPIC, "a")])
        assert list(joined.find()) == []
        connection.execute("ROLLBACK")
    app.sync.close()
