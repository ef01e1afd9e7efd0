"""The store away, full, or slow: bounded answers that say when to come back; and many calls that become few."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import aiohttp
import pytest
from tests.servers.fixtures import StartsRedis
from tests.service.calling import Api, Reply, at, running
from tests.service.conftest import KEPT
from tests.service.test_api_leases import calling
from yarl import URL

from bide.core.errors import OutcomeUnknown, StoreCorrupt, StoreFull, StoreUnavailable
from bide.stores.memory import MemoryStore
from bide.stores.redis import RedisStore
from bide.testing.faults import FaultyStore

CALLS: list[tuple[str, str, Any]] = [
    ("PUT", "/v1/topics/a/tasks/b", {"delay": "1h"}),
    ("GET", "/v1/topics/a/tasks/b", None),
    ("PATCH", "/v1/topics/a/tasks/b", {"delay": "1h"}),
    ("DELETE", "/v1/topics/a/tasks/b", None),
    ("POST", "/v1/schedule", [{"topic": "a", "delay": "1h"}]),
    ("POST", "/v1/cancel", {"group": "a"}),
    ("GET", "/v1/tasks", None),
    ("POST", "/v1/lease", {"topics": {"a": 1}}),
    ("POST", "/v1/lease", {"topics": {"a": 1}, "wait": "60s"}),
    ("POST", "/v1/settle", [{"topic": "a", "key": "b", "token": 1, "outcome": "done"}]),
    ("POST", "/v1/extend", {"leases": [{"topic": "a", "key": "b", "token": 1}]}),
]
WITHIN = 15
"""Seconds."""


@pytest.mark.faults
def test_a_store_that_goes_away_and_comes_back(redis_server: StartsRedis) -> None:
    server = redis_server()
    with running(RedisStore(f"{server.url}?shards=2", patience=1.0), **KEPT) as service:
        api = Api(service.url)
        api.put("a", "b")
        server.kill()

        def ask(call: tuple[str, str, Any]) -> Reply:
            with closing(Api(service.url)) as one:
                return one(*call)

        began = time.monotonic()
        with ThreadPoolExecutor(len(CALLS)) as threads:  # each waits for as long as the store is given to come back
            replies = list(threads.map(ask, CALLS))
        assert time.monotonic() - began < WITHIN
        for (_, path, _), reply in zip(CALLS, replies, strict=True):
            batch = reply.json if path == "/v1/schedule" and reply.status == 200 else None
            assert (batch[0]["problem"]["status"] if batch else reply.status) in (503, 504), (path, reply)
            if reply.status == 503:
                assert int(reply.headers["retry-after"]) >= 1
        server.start()
        until = time.monotonic() + WITHIN
        while (reply := api("GET", at("a", "b"))).status != 200:
            assert reply.status in (503, 504)
            assert time.monotonic() < until
            time.sleep(0.05)
        api.put("a", "c", delay="0s")
        assert [task["key"] for task in api.lease("a", 10, wait="10s")] == ["c"]
        api.close()


@pytest.mark.faults
def test_a_full_store_still_drains(redis_server: StartsRedis) -> None:
    server = redis_server(options={"maxmemory": "20mb", "maxmemory-policy": "noeviction"})
    with running(f"{server.url}?shards=2", **KEPT) as service:
        api = Api(service.url)
        for key in ("leased", "cancelled"):
            api.put("a", key, delay="0s" if key == "leased" else "1h")
        payload = "x" * 100_000
        reply = api("PUT", at("big", "0"), {"delay": "1h", "payload": payload})
        for number in range(1, 1_000):
            if reply.status != 201:
                break
            reply = api("PUT", at("big", str(number)), {"delay": "1h", "payload": payload})
        assert reply.status == 507, reply
        assert int(reply.headers["retry-after"]) >= 1
        assert reply.json["type"] == "urn:bide:store-full"
        [task] = api.lease("a")
        assert api.settle(task, "done")
        assert api("DELETE", at("a", "cancelled")).answer == (200, "cancelled")
        api.close()


@pytest.mark.parametrize(
    ("error", "status"),
    [(StoreUnavailable("away"), 503), (StoreFull("full"), 507), (StoreCorrupt("odd"), 503),
     (OutcomeUnknown("lost"), 504), (RuntimeError("a defect with a secret"), 500)],
    ids=lambda given: type(given).__name__,
)  # fmt: skip
def test_what_the_store_raises_has_a_status(error: Exception, status: int) -> None:
    failing = False
    store = FaultyStore(MemoryStore(), fault=lambda point: error if failing and point.endswith("before") else None)
    with running(store, **KEPT) as service:
        api = Api(service.url)
        api.put("a", "b")
        failing = True
        for method, path, ask in CALLS:
            began = time.monotonic()
            reply = api(method, path, ask)
            assert reply.status == status, (method, path, reply)
            assert time.monotonic() - began < WITHIN
            assert ("retry-after" in reply.headers) is (status in (503, 507))
            assert b"secret" not in reply.body
        reply = api("GET", "/v1/events")
        assert reply.status == status
        failing = False
        assert api.get("a", "b")["state"] == "waiting"
        api.close()


async def test_two_hundred_calls_are_few_of_the_store() -> None:
    store = FaultyStore(MemoryStore(), latency=lambda _: 0.01)
    with running(store, **KEPT) as service:
        async with calling(service.url) as many:
            await many.put("a", "first", delay="1h")
            before = dict(store.calls)
            await asyncio.gather(*(many.put("a", str(number), delay="1h") for number in range(200)))
            assert store.calls["add"] - before["add"] < 40

        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

            async def get(number: int) -> int:
                async with session.get(URL(service.url + at("a", str(number)), encoded=True)) as reply:
                    return reply.status

            before = dict(store.calls)
            assert set(await asyncio.gather(*map(get, range(200)))) == {200}
            assert store.calls["get"] - before.get("get", 0) < 40


async def test_a_slow_store_answers_those_who_wait_for_something_else() -> None:
    store = FaultyStore(MemoryStore(), latency=lambda name: 0.7 if name == "find" else 0.0)
    with running(store, **KEPT) as service:
        async with calling(service.url) as many, aiohttp.ClientSession() as session:

            async def find() -> int:
                async with session.get(service.url + "/v1/tasks?limit=1") as reply:
                    return reply.status

            finding = asyncio.ensure_future(find())
            while not store.calls.get("find"):  # noqa: ASYNC110 - it is another loop's
                await asyncio.sleep(0.005)
            await many.put("a", "b", delay="0s")
            assert [task["key"] for task in await many.lease("a", wait="10s")] == ["b"]
            assert not finding.done()
            assert await finding == 200
