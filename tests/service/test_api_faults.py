"""The store away, full, or slow: bounded answers that say when to come back; and many calls that become few."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
from tests.servers.fixtures import StartsRedis
from tests.service.calling import Api, Gated, Reply, at, running
from tests.service.conftest import KEPT
from tests.service.test_api_leases import calling
from tests.waiting import until, wait_until

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


def test_a_store_that_goes_away_and_comes_back(redis_server: StartsRedis) -> None:
    server = redis_server()
    with running(RedisStore(f"{server.url}?shards=2", patience=1.0), **KEPT) as service:
        api = Api(service.url)
        api.put("a", "b")
        server.kill()

        def ask(call: tuple[str, str, Any]) -> Reply:
            with closing(Api(service.url)) as one:
                return one(*call)

        with ThreadPoolExecutor(len(CALLS)) as threads:  # each waits for as long as the store is given to come back
            replies = list(threads.map(ask, CALLS))
        for (_, path, _), reply in zip(CALLS, replies, strict=True):
            batch = reply.json if path == "/v1/schedule" and reply.status == 200 else None
            assert (batch[0]["problem"]["status"] if batch else reply.status) in (503, 504), (path, reply)
            if reply.status == 503:
                assert int(reply.headers["retry-after"]) >= 1
        server.start()

        def back() -> bool:
            reply = api("GET", at("a", "b"))
            assert reply.status in (200, 503, 504)
            return reply.status == 200

        wait_until(back, "the store to be back")
        api.put("a", "c", delay="0s")
        assert [task["key"] for task in api.lease("a", 10, wait="60s")] == ["c"]
        api.close()


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
            reply = api(method, path, ask)
            assert reply.status == status, (method, path, reply)
            assert ("retry-after" in reply.headers) is (status in (503, 507))
            assert b"secret" not in reply.body
        reply = api("GET", "/v1/events")
        assert reply.status == status
        failing = False
        assert api.get("a", "b")["state"] == "waiting"
        api.close()


async def test_two_hundred_calls_are_few_of_the_store() -> None:
    store = Gated()
    with running(store, **KEPT) as service:
        async with calling(service.url) as many:
            for verb, call in (("add", many.add), ("get", many.get)):
                store.held.add(verb)
                before = store.calls.get(verb, 0)
                asked = [asyncio.ensure_future(call("a", str(number))) for number in range(200)]
                await until(lambda: len(service.server.server_state.tasks) == 200, "all to have arrived")
                store.held.clear()
                assert set(await asyncio.gather(*asked)) <= {200, 201}
                assert store.calls[verb] - before < 10


async def test_a_slow_store_answers_those_who_wait_for_something_else() -> None:
    store = Gated()
    with running(store, **KEPT) as service:
        async with calling(service.url) as many:
            store.held.add("tally")
            counting = asyncio.ensure_future(many.topics())
            await until(lambda: store.calls.get("tally", 0), "the call that is slow")
            await many.put("a", "b", delay="0s")
            assert [task["key"] for task in await many.lease("a", wait="60s")] == ["b"]
            assert not counting.done()
            store.held.clear()
            assert await counting == 200
