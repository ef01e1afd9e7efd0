"""Many tasks in one call: leases, taken at once and by waiting; lists, groups and batches; nothing half done."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest
import pytest_asyncio
from tests.service.calling import Api, Asked, Gated, Running, at, running
from tests.service.conftest import KEPT
from tests.service.instance import served
from tests.waiting import not_before, until
from yarl import URL

from bide import Bide
from bide.core.errors import BadInput
from bide.core.instants import instant
from bide.service.access import EventQuota
from bide.service.serving import PER_TASK, ServeConfig, ServiceInstance, TopicConfig, read_config
from bide.stores.memory import MemoryStore
from bide.testing.faults import FaultyStore

SOON = 0.3
"""Seconds: what comes due while somebody waits, unless the machine is slow."""


HELD = {"topic": "a", "key": "b", "token": 1}


class Many:
    """Calls one instance, many at once."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self._url = url
        self._session = session

    async def __call__(self, method: str, path: str, ask: Any = None) -> tuple[int, Any]:
        """The status and the JSON."""
        async with self._session.request(method, URL(self._url + path, encoded=True), json=ask) as reply:
            return reply.status, await reply.json()

    async def post(self, path: str, ask: Any) -> Any:
        status, answer = await self("POST", path, ask)
        assert status == 200, answer
        return answer

    async def put(self, topic: str, key: str, **ask: Any) -> None:
        status, answer = await self("PUT", at(topic, key), ask)
        assert status in (200, 201), answer

    async def lease(self, topic: str, room: int = 1, **ask: Any) -> list[Any]:
        """For longer than any test takes."""
        asked = {"topics": {topic: room}, "lease_for": "1h", **ask}
        tasks: list[Any] = (await self.post("/v1/lease", asked))["tasks"]
        return tasks


@contextlib.asynccontextmanager
async def calling(url: str) -> AsyncIterator[Many]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        yield Many(url, session)


@pytest_asyncio.fixture
async def many(service: Running) -> AsyncIterator[Many]:
    async with calling(service.url) as found:
        yield found


async def waiting(service: Running, count: int) -> None:
    """Until so many wait in the long poll."""
    await until(lambda: service.serving._long_poll.waiting == count, f"{count} who wait")


# --- lease


def test_lease_at_once(api: Api, topic: str) -> None:
    assert api.lease(topic) == []
    api.put(topic, "later")
    api.put(topic, "42", delay="0s", payload={"number": 42})
    asked = Asked()
    [task] = api.lease(topic, 10, lease_for="30m")
    assert (task["key"], task["state"], task["attempt"], task["payload"]) == ("42", "leased", 1, {"number": 42})
    asked.check(task["wake_at"], 1_800_000)
    assert api.lease(topic, 10) == []


def test_lease_takes_as_many_of_each_topic_as_there_is_room_for(plain: Api, topic: str) -> None:
    for one in (topic, f"{topic}.b", f"{topic}.c"):
        for key in "abcd":
            plain.put(one, key, delay="0s")
    tasks = plain.done("POST", "/v1/lease", {"topics": {topic: 3, f"{topic}.b": 1}})["tasks"]
    assert sorted(task["topic"] for task in tasks) == [topic] * 3 + [f"{topic}.b"]


async def test_a_wait_ends_when_something_is_due(many: Many, topic: str, service: Running) -> None:
    await many.put(topic, "42", delay=f"{SOON}s")
    [task] = await many.lease(topic, wait="60s")
    not_before(time.time() * 1000 + 50, instant(task["due_at"]), "the task")


async def test_a_wait_that_runs_out(many: Many, topic: str) -> None:
    await many.put(topic, "42", delay="1h")
    began = time.monotonic()
    assert await many.lease(topic, wait=f"{SOON}s") == []
    not_before(time.monotonic(), began + SOON - 0.05, "the end of the wait")


async def test_a_wait_sees_another_topic_too(many: Many, topic: str, service: Running) -> None:
    leasing = asyncio.ensure_future(many.post("/v1/lease", {"topics": {topic: 1, f"{topic}.b": 1}, "wait": "60s"}))
    await waiting(service, 1)
    await many.put(f"{topic}.b", "42", delay="0s")
    assert [task["topic"] for task in (await leasing)["tasks"]] == [f"{topic}.b"]


async def test_who_hangs_up_while_waiting_holds_nothing(many: Many, topic: str, service: Running) -> None:
    leasing = asyncio.ensure_future(many.lease(topic, wait="60s"))
    await waiting(service, 1)
    leasing.cancel()
    await waiting(service, 0)
    await many.put(topic, "42", delay="0s")
    [task] = await many.lease(topic, wait="60s")  # a lease that was under way may have taken it, and is giving it back
    assert task["attempt"] == 1


async def test_who_waited_longest_is_first(many: Many, topic: str, service: Running) -> None:
    leases = []
    for place in range(1, 5):
        leases.append(asyncio.ensure_future(many.lease(topic, wait="60s")))
        await waiting(service, place)
    for place, leasing in enumerate(leases):
        await many.put(topic, str(place), delay="0s")
        [task] = await leasing
        assert task["key"] == str(place)


async def test_two_hundred_wait_and_each_gets_one(many: Many, topic: str, service: Running) -> None:
    leases = [asyncio.ensure_future(many.lease(topic, wait="60s")) for _ in range(200)]
    await waiting(service, 200)
    await many.post("/v1/schedule", [{"topic": topic, "key": str(key), "delay": "0s"} for key in range(200)])
    got = await asyncio.gather(*leases)
    assert sorted(int(task["key"]) for tasks in got for task in tasks) == list(range(200))
    assert {len(tasks) for tasks in got} == {1}


async def test_who_hangs_up_while_the_store_leases_gives_it_back(topic: str) -> None:
    slow = Gated()
    with running(slow, **KEPT) as service:
        async with calling(service.url) as many:
            await many.put(topic, "42", delay="0s")
            slow.held.add("lease")
            leasing = asyncio.ensure_future(many.lease(topic))
            await until(lambda: slow.calls.get("lease", 0), "the lease")
            leasing.cancel()
            await waiting(service, 0)
            slow.held.clear()
            [task] = await many.lease(topic, wait="60s")
            assert task["attempt"] == 1


async def test_those_who_ask_again_and_again_leave_nothing_at_the_desk(topic: str) -> None:
    with running("memory:", **KEPT) as service:
        async with calling(service.url) as many:
            longest = asyncio.ensure_future(many.lease(topic, wait="60s"))
            await waiting(service, 1)
            for _ in range(50):
                assert await many.lease(topic) == []
            long_poll = service.serving._long_poll
            assert [len(queue) for group in long_poll._groups.values() for queue in group.queues.values()] == [1]
            longest.cancel()
            await waiting(service, 0)
            assert not long_poll._groups


async def test_topics_that_nobody_asks_for_any_more_are_listened_to_no_longer_also_while_somebody_waits(
    topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bide.engine.delivery.long_poll._FORGET_AFTER", 0.0)
    with running("memory:", **KEPT) as service:
        async with calling(service.url) as many:
            longest = asyncio.ensure_future(many.lease(topic, wait="60s"))
            await waiting(service, 1)
            for number in range(20):
                assert await many.lease(f"{topic}.{number}") == []
            listening = service.serving._long_poll._listening
            await until(lambda: set(listening) <= {topic, f"{topic}.19"}, "the others to be let go")
            assert topic in listening
            longest.cancel()
            await waiting(service, 0)


async def test_more_wanted_than_one_lease_asks_for_starves_no_topic_and_spins_nothing(topic: str) -> None:
    store = FaultyStore(MemoryStore())
    with running(store, **KEPT) as service:
        async with calling(service.url) as many:
            big = [asyncio.ensure_future(many.lease(f"{topic}.big", 1_000, wait="60s")) for _ in range(12)]
            await waiting(service, 12)
            small = asyncio.ensure_future(many.lease(topic, wait="60s"))
            await waiting(service, 13)
            before = store.calls["lease"]
            await many.put(topic, "42", delay=f"{SOON}s")
            assert [task["key"] for task in await small] == ["42"]
            assert store.calls["lease"] - before < 100, "one that spins asks a thousand times"
            for leasing in big:
                leasing.cancel()
            await waiting(service, 0)


async def test_who_comes_as_the_last_two_leave_is_served(topic: str) -> None:
    async with served("memory:", **KEPT) as instance:
        long_poll = instance.serving._long_poll

        def lease(wait: float) -> asyncio.Task[list[Any]]:
            return asyncio.create_task(long_poll.lease({topic: 1}, holder="a", lease_for=60_000, wait=wait))

        leaving = [lease(60), lease(60)]
        await until(lambda: long_poll.waiting == 2, "two who wait")
        [group] = long_poll._groups.values()
        first, second = group.queues[topic]
        long_poll._answer(group, first)
        coming = lease(0)  # its turn is between those of the two
        long_poll._answer(group, second)
        assert await asyncio.gather(coming, *leaving) == [[], [], []]


async def test_who_waits_is_answered_when_the_instance_drains(topic: str) -> None:
    with running("memory:", **KEPT) as service:
        async with calling(service.url) as many:
            leasing = asyncio.ensure_future(many.lease(topic, wait="60s"))
            await waiting(service, 1)
            await asyncio.to_thread(service.run, service.serving.drain())
            assert await leasing == []


# --- settle and extend


def test_each_outcome(api: Api, topic: str) -> None:
    for key in ("done", "retry", "defer", "dead", "again"):
        api.put(topic, key, delay="0s")
    leased = {task["key"]: task for task in api.lease(topic, 10)}
    batch: list[dict[str, Any]] = [
        {"outcome": "done", "key": "done"},
        {"outcome": "retry", "key": "retry", "delay": "10m", "error": "out of paper"},
        {"outcome": "defer", "key": "defer", "at": "2031-01-01T00:00:00Z"},
        {"outcome": "dead", "key": "dead", "error": "no such order"},
        {"outcome": "done", "key": "again", "delay": "1h"},
        {"outcome": "done", "key": "none", "token": 7},
    ]
    batch = [{"topic": topic, "token": leased.get(one["key"], {}).get("token"), **one} for one in batch]
    assert api.done("POST", "/v1/settle", batch) == {"settled": [True] * 5 + [False]}
    found = {key: api.get(topic, key) for key in leased}
    shown = {key: (task["state"], task["attempt"], task["error"]) for key, task in found.items()}
    assert shown == {
        "done": ("done", 1, None), "retry": ("waiting", 1, "out of paper"), "defer": ("waiting", 0, None),
        "dead": ("dead", 1, "no such order"), "again": ("waiting", 0, None),
    }  # fmt: skip
    assert found["defer"]["wake_at"] == "2031-01-01T00:00:00.000Z"
    assert found["again"]["id"] != leased["again"]["id"]
    assert found["retry"]["id"] == leased["retry"]["id"]
    assert api.done("POST", "/v1/settle", batch) == {"settled": [False] * 6}


def test_who_settles_does_not_push_all_others_out_of_the_log_of_events(topic: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(EventQuota, "MOST", 20)
    monkeypatch.setattr(EventQuota, "A_SECOND", 0.0)
    with running("memory:") as service, contextlib.closing(Api(service.url)) as api:
        for number in range(30):
            api.put(topic, str(number), delay="0s")
        ended = [
            {"topic": topic, "key": task["key"], "token": task["token"], "outcome": "retry"}
            for task in api.lease(topic, 30)
        ]
        assert api.done("POST", "/v1/settle", ended) == {"settled": [True] * 30}
        service.run(service.app.recorder.flush())
        assert len(service.run(service.app.events(limit=100))) == 20
        assert service.app.recorder.dropped == 10


def test_a_token_that_is_old_changes_nothing(api: Api, topic: str) -> None:
    api.put(topic, "42", delay="0s")
    [task] = api.lease(topic)
    assert not api.settle({**task, "token": task["token"] - 1}, "done")
    held = {"topic": topic, "key": "42", "token": task["token"]}
    asked = {"leases": [{**held, "token": task["token"] - 1}, held], "lease_for": "3h"}
    assert api.done("POST", "/v1/extend", asked) == {"extended": [False, True]}
    extended = api.get(topic, "42")
    assert instant(extended["wake_at"]) > instant(task["wake_at"]) + 3_000_000
    assert extended["state"] == "leased"
    assert api.settle(task, "done")
    assert api.done("POST", "/v1/extend", asked) == {"extended": [False, False]}


def test_the_policy_of_the_topic_is_the_files(topic: str) -> None:
    config = ServeConfig(topics={topic: TopicConfig(retry=["20m"], keep_done="0s")})
    with running("memory:", config, **KEPT) as service, contextlib.closing(Api(service.url)) as api:
        api.put(topic, "42", delay="0s")
        [task] = api.lease(topic)
        assert api.settle(task, "retry")
        waiting = api.get(topic, "42")
        assert 1_100_000 < instant(waiting["wake_at"]) - instant(waiting["due_at"]) < 1_300_000
        api.done("POST", "/v1/fire", [{"topic": topic, "key": "42"}])
        [task] = api.lease(topic)
        assert api.settle(task, "retry")
        assert api.get(topic, "42")["state"] == "dead"
        api.put(topic, "43", delay="0s")
        [task] = api.lease(topic)
        assert api.settle(task, "done")
        assert api.get(topic, "43") is None


WEBHOOK = '[topics.t]\nwebhook = "https://shop.example/"\n'


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("[topics.fine]\n[topics.t]\nlosses = -1", "topics.t.losses"),
        ("[topics.t]\nlosses = 0", "topics.t.losses"),
        ("[topics.t]\nconcurrency = 0", "topics.t.concurrency"),
        ('[topics.t]\nkeep_done = "soon"', "topics.t.keep_done"),
        (f'{WEBHOOK}secrets_file = "nowhere"', "topics.t.secrets_file"),
        (f'{WEBHOOK}timeout = "0s"', "topics.t.timeout"),
        ('[topics.t]\nwebhook = "https://10.0.0.1/"', "topics.t.webhook"),
        ('[topics.t]\ntimeout = "3s"', "topics.t: 'timeout' is not accepted; give a webhook or a sink with it"),
        ('[topics.t]\nsink = "a:b"\nheaders = {a = "b"}', "topics.t: 'headers' is not accepted; give a webhook"),
        ('[topics.t]\nretry = "often"', "topics.t.retry"),
        ("[webhooks]\nper_host = 0", "webhooks.per_host"),
        ('[webhooks]\nallow = ["nonsense/33"]', "allow[0]"),
    ],
)
def test_a_wrong_setting_of_the_file_is_named_with_its_topic(text: str, field: str, tmp_path: Path) -> None:
    path = tmp_path / "bide.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(BadInput, match=re.escape(field)):
        ServiceInstance(Bide("memory:"), read_config(str(path)), host="127.0.0.1")


def test_a_webhook_has_as_many_slots_as_its_host() -> None:
    app, topics = Bide("memory:"), {"one": "https://shop.example/", "each": PER_TASK}
    config = ServeConfig(topics={topic: TopicConfig(webhook=url) for topic, url in topics.items()})
    ServiceInstance(app, config, host="127.0.0.1")
    assert {topic: route.concurrency for topic, route in app.routes.items()} == {"one": 20, "each": 100}


WRONG: dict[tuple[str, str], list[Any]] = {
    ("lease", "topics"): [
        {"topics": topics} for topics in ({}, {"": 1}, ["a"], {str(number): 1 for number in range(101)})
    ],
    ("lease", "topics[...]"): [{"topics": {"a": room}} for room in (0, 1_001, 1.5)],
    ("lease", "wait"): [{"topics": {"a": 1}, "wait": wait} for wait in ("61s", "-1s", "long")],
    ("lease", "lease_for"): [{"topics": {"a": 1}, "lease_for": length} for length in ("0s", "2d", "500ms")],
    ("settle", "[0].outcome"): [[{**HELD, "outcome": "failed"}]],
    ("settle", "[0].at"): [[{**HELD, "outcome": "done", "at": "soon"}]],
    ("settle", "[0].delay"): [[{**HELD, "outcome": "done", "delay": "soon"}]],
    ("settle", "[0].at, delay"): [[{**HELD, "outcome": "defer"}], [{**HELD, "outcome": "dead", "delay": "1h"}]],
    ("settle", "[0].token"): [[{**HELD, "token": token, "outcome": "done"}] for token in (-1, 2**63, "1")],
    ("settle", "[0]"): [[{"topic": "a", "key": "b", "outcome": "done"}]],
    ("settle", "[0].key"): [[{**HELD, "key": "", "outcome": "done"}]],
    ("extend", "leases[0]"): [{"leases": [{"topic": "a", "key": "b"}]}],
    ("extend", "lease_for"): [{"leases": [], "lease_for": "1ms"}],
    ("shift", "body"): [{"group": "a"}, {"by": "1h"}],
    ("shift", "group"): [{"group": "", "by": "1h"}],
    ("shift", "by"): [{"group": "a", "by": by} for by in ("soon", 5)],
    ("shift", "deadlines"): [{"group": "a", "by": "1h", "deadlines": "yes"}],
}
"""What is asked, by the call and the field that is wrong."""


@pytest.mark.parametrize(("call", "field"), WRONG, ids=str)
def test_what_is_wrong_is_named(plain: Api, call: str, field: str) -> None:
    for ask in WRONG[call, field]:
        reply = plain("POST", f"/v1/{call}", ask)
        assert reply.status == 422, ask
        assert reply.json["field"] == field, ask
        assert reply.json["accepted"]


HOUR = 3_600_000


def refs(topic: str, *keys: str) -> list[dict[str, Any]]:
    return [{"topic": topic, "key": key} for key in keys]


def words(items: Any) -> list[str]:
    return [item["answer"] for item in items]


# --- batches


def test_schedule_many_answers_in_order(api: Api, topic: str) -> None:
    api.put(topic, "b")
    asked = [{**ref, "delay": "2h", "payload": place} for place, ref in enumerate(refs(topic, "c", "b", "a", "b"))]
    items = api.done("POST", "/v1/schedule", asked)
    assert words(items) == ["created", "replaced", "created", "replaced"]
    assert [item["task"]["key"] for item in items] == ["c", "b", "a", "b"]
    assert api.get(topic, "b")["payload"] == 3


def test_a_key_is_given_where_there_is_none(plain: Api, topic: str) -> None:
    [one, other] = plain.done("POST", "/v1/schedule", [{"topic": topic, "delay": "1h"}] * 2)
    keys = {one["task"]["key"], other["task"]["key"]}
    assert len(keys) == 2
    assert all(len(key) == 36 and key[14] == "7" for key in keys)


def test_each_verb_for_many(api: Api, topic: str) -> None:
    api.put(topic, "a")
    api.put(topic, "b")
    dead = api.dead(topic, "dead")
    asked = refs(topic, "none", "a", "dead", "b")
    moved = api.done("POST", "/v1/reschedule", [{**ref, "delay": "2h"} for ref in asked])
    assert words(moved) == ["not_found", "moved", "finished", "moved"]
    assert moved[0] == {"answer": "not_found", "task": None}
    assert moved[2]["task"] == dead
    fired = api.done("POST", "/v1/fire", asked)
    assert words(fired) == ["not_found", "moved", "finished", "moved"]
    assert {task["key"] for task in api.lease(topic, 10)} == {"a", "b"}
    assert words(api.done("POST", "/v1/fire", asked)) == ["not_found", "under_way", "finished", "under_way"]
    redriven = api.done("POST", "/v1/redrive", asked)
    assert words(redriven)[:1] + words(redriven)[2:3] == ["not_found", "redriven"]
    assert redriven[2]["task"]["id"] != dead["id"]
    assert redriven[2]["task"]["attempt"] == 0
    cancelled = api.done("POST", "/v1/cancel", asked)
    assert words(cancelled) == ["not_found", "cancelled_while_leased", "cancelled", "cancelled_while_leased"]


def test_redrive_after_a_while(plain: Api, topic: str) -> None:
    plain.dead(topic, "42")
    asked = Asked()
    [item] = plain.done("POST", "/v1/redrive", [{"topic": topic, "key": "42", "delay": "1h"}])
    assert item["task"]["state"] == "waiting"
    asked.check(item["task"]["wake_at"], HOUR)


def test_each_item_has_its_own_condition(plain: Api, topic: str) -> None:
    tokens = {key: plain.put(topic, key)["token"] for key in ("a", "b")}
    asked = [{"topic": topic, "key": key, "if_token": tokens[key] - (key == "a")} for key in ("a", "b")]
    assert words(plain.done("POST", "/v1/fire", asked)) == ["stale_token", "moved"]
    asked = [{**one, "if_token": one["if_token"] + (one["key"] == "a")} for one in asked]
    assert words(plain.done("POST", "/v1/cancel", asked)) == ["cancelled", "stale_token"]


@pytest.mark.parametrize("call", ["schedule", "reschedule", "fire", "cancel", "redrive"])
def test_an_empty_batch_has_an_empty_answer(plain: Api, call: str) -> None:
    assert plain.done("POST", f"/v1/{call}", []) == []


WRONG_ITEMS: list[tuple[str, dict[str, Any], str]] = [
    ("schedule", {}, "[1].at, delay"),
    ("schedule", {"delay": "1h", "key": "a\n"}, "[1].key"),
    ("schedule", {"delay": "1h", "payload_base64": "?"}, "[1].payload_base64"),
    ("schedule", {"delay": "1h", "key": 7}, "[1].key"),
    ("reschedule", {"delay": "soon"}, "[1].delay"),
    ("fire", {"key": ""}, "[1].key"),
    ("fire", {"if_token": "x"}, "[1].if_token"),
    ("cancel", {"key": "k" * 201}, "[1].key"),
    ("redrive", {"delay": "-1h"}, "[1].delay"),
]


@pytest.mark.parametrize(("call", "wrong", "field"), WRONG_ITEMS, ids=str)
def test_one_wrong_item_is_named_and_nothing_is_done(
    plain: Api, topic: str, call: str, wrong: dict[str, Any], field: str
) -> None:
    before = plain.put(topic, "a")
    more = {"delay": "3h"} if call in ("schedule", "reschedule") else {}
    first = {"topic": topic, "key": "a", **more}
    reply = plain("POST", f"/v1/{call}", [first, {"topic": topic, "key": "b", **wrong}])
    assert reply.status == 422
    named = reply.json["field"]
    assert named.startswith(field.partition(".")[0])
    assert set(named[4:].split(", ")) <= set(field[4:].split(", "))
    assert plain.get(topic, "a") == before
    assert plain.get(topic, "b") is None


def test_a_batch_has_a_limit(plain: Api, topic: str) -> None:
    reply = plain("POST", "/v1/cancel", refs(topic, *map(str, range(10_001))))
    assert reply.status == 422
    assert "10000" in reply.json["accepted"]
    assert plain("POST", "/v1/cancel", refs(topic, *map(str, range(10_000)))).status == 200


# --- groups


def test_shift_moves_the_waiting_of_a_group(api: Api, topic: str) -> None:
    group = topic
    before = {key: api.put(topic, key, group=group) for key in ("a", "b")}
    api.put(topic, "other")
    api.put(topic, "leased", delay="0s", group=group)
    api.lease(topic)
    elsewhere = api.put(f"{topic}.more", "c", group=group)
    items = api.done("POST", "/v1/shift", {"group": group, "topic": topic, "by": "-30m"})
    assert {item["task"]["key"]: item["answer"] for item in items} == {
        "a": "moved", "b": "moved", "leased": "under_way",
    }  # fmt: skip
    for key, task in before.items():
        assert instant(api.get(topic, key)["wake_at"]) == instant(task["wake_at"]) - HOUR // 2
    assert api.get(f"{topic}.more", "c") == elsewhere
    items = api.done("POST", "/v1/shift", {"group": group, "by": "90s"})
    assert sorted(words(items)) == ["moved", "moved", "moved", "under_way"]
    assert instant(api.get(f"{topic}.more", "c")["wake_at"]) == instant(elsewhere["wake_at"]) + 90_000


def test_shift_and_deadlines(plain: Api, topic: str) -> None:
    plain.put(topic, "a", group=topic, deadline="2h")
    assert words(plain.done("POST", "/v1/shift", {"group": topic, "by": "3h"})) == ["refused"]
    assert words(plain.done("POST", "/v1/shift", {"group": topic, "by": "3h", "deadlines": True})) == ["moved"]


def test_cancel_a_group(api: Api, topic: str) -> None:
    for key in ("a", "b"):
        api.put(topic, key, group=topic)
        api.put(f"{topic}.more", key, group=topic)
    api.put(topic, "other", group=f"{topic}.other")
    items = api.done("POST", "/v1/cancel", {"group": topic, "topic": topic})
    assert words(items) == ["cancelled", "cancelled"]
    assert words(api.done("POST", "/v1/cancel", {"group": topic})) == ["cancelled", "cancelled"]
    assert api.done("POST", "/v1/cancel", {"group": topic}) == []
    assert api.get(topic, "other")["state"] == "waiting"


# --- lists


def found(api: Api, **query: str) -> list[str]:
    """The keys of every page."""
    keys: list[str] = []
    while True:
        page = api.done("GET", "/v1/tasks?" + "&".join(f"{name}={quote(text)}" for name, text in query.items()))
        keys += [task["key"] for task in page["tasks"]]
        if page["cursor"] is None:
            return keys
        assert page["tasks"]
        query["cursor"] = page["cursor"]


def test_find_by_each_filter(api: Api, topic: str) -> None:
    wakes = {}
    for place, key in enumerate(("a", "b", "c")):
        wakes[key] = api.put(topic, key, at=f"2031-01-01T0{place}:00:00Z", group=topic if key != "b" else None)
    api.dead(topic, "dead")
    api.done("DELETE", at(topic, "c"))
    assert sorted(found(api, topic=topic)) == ["a", "b", "c", "dead"]
    assert sorted(found(api, topic=topic, state="waiting")) == ["a", "b"]
    assert found(api, topic=topic, state="dead") == ["dead"]
    assert found(api, topic=topic, state="cancelled") == ["c"]
    assert found(api, topic=topic, state="leased") == []
    assert found(api, topic=topic, group=topic, state="waiting") == ["a"]
    assert found(api, topic=topic, wake_before="2031-01-01T01:00:00Z") == ["a"]
    assert found(api, topic=topic, wake_from="2031-01-01T01:00:00Z") == ["b"]
    assert found(api, topic=topic, wake_from="2031-01-01T01:00:00+01:00", wake_before="2031-01-01T00:00:00.001Z") == [
        "a"
    ]
    assert topic in {task["topic"] for task in api.done("GET", "/v1/tasks?limit=1000&state=dead")["tasks"]}


def test_pages_have_every_task_once(api: Api, topic: str) -> None:
    keys = [f"{number:03}" for number in range(57)]
    asked = [{**ref, "delay": f"{3600 + place}s", "group": topic} for place, ref in enumerate(refs(topic, *keys))]
    api.done("POST", "/v1/schedule", asked)
    for query in ({"topic": topic}, {"group": topic}, {"topic": topic, "state": "waiting"}):
        assert sorted(found(api, limit="10", **query)) == keys
    page = api.done("GET", f"/v1/tasks?topic={topic}&limit=57")
    assert len(page["tasks"]) == 57
    assert api.done("GET", f"/v1/tasks?topic={topic}.none") == {"tasks": [], "cursor": None}


LIMITS = [
    "", "0", "1001", "00001", "000011000000", "0001" + "9" * 30, "1" * 5_004, "ten", "-1", "%2B1", "%EF%BC%91",
    "%D9%A3",
]  # fmt: skip
"""That are no number of at most four digits from 1 to 1,000."""


@pytest.mark.parametrize(
    ("field", "queries"),
    [
        ("limit", [f"limit={limit}" for limit in LIMITS]),
        ("state", ["state=asleep", "state="]),
        ("topic", ["topic=", "topic=%00", "topic=a&topic=b"]),
        ("group", ["group=" + "g" * 201]),
        (
            "wake_before",
            ["wake_before=soon", "wake_before=2031-01-01", "limit=1&wake_before=2031-01-01T00:00:00+01:00"],
        ),
        ("wake_from", ["wake_from=1700000000"]),
        ("cursor", ["cursor=x", "cursor=", "cursor=AAAA", "cursor=%C3%BC"]),
        ("query", ["page=2", "topic=%FF", "topic=a%zz", "topic", "&&"]),
    ],
)
def test_a_query_that_cannot_be(plain: Api, field: str, queries: list[str]) -> None:
    for query in queries:
        reply = plain("GET", f"/v1/tasks?{query}")
        assert reply.status == 422, (query, reply)
        assert reply.json["field"] == field, query
        assert reply.json["accepted"]
