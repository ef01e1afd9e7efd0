"""An app over a service: the same handlers and verbs, every task done, by one holder at a time, at its time."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import msgspec
from tests.stores.http.serving import Service, only, opened, serving
from tests.waiting import pause, until

from bide import Bide, Retry, Task
from bide.core.instants import In
from bide.core.records import Ref, State
from bide.service.access import Caller, Verb
from bide.stores.http import HttpStore
from bide.stores.memory import MemoryStore
from bide.testing.proxy import FaultProxy
from bide.testing.store_suite.base import new


class Order(msgspec.Struct):
    number: int


async def test_verbs_and_handlers_are_those_of_the_library() -> None:
    seen: list[Any] = []
    async with serving(Service(MemoryStore)) as service:
        app = Bide(service.url)

        @app.handler("order.close", retry="quick")
        async def close(task: Task[Order]) -> Retry | None:
            seen.append((task.payload.number, task.attempt, task.id))
            return Retry(delay="0s") if task.attempt == 1 and task.key == "again" else None

        async with app:
            first = await close.schedule(Order(1), key="1", delay="1h", group="g")
            assert first.result == "created"
            assert (await app.reschedule("order.close", "1", delay="2h")).result == "moved"
            assert [answer.result for answer in await app.shift("g", "-30m")] == ["moved"]
            assert [task.key async for task in app.find(topic="order.close")] == ["1"]
            assert (await app.tally()).number("order.close", State.WAITING) == 1
            async with app.worker() as worker:
                assert (await app.fire_now("order.close", "1")).result == "moved"
                await app.schedule("order.close", {"number": 2}, key="again", delay="0s")
                await app.schedule_many([close.new(Order(number), delay="0s") for number in range(3, 103)])
                await worker.until_empty()
            assert worker.stats.done == 102
            assert worker.stats.lost == 0
            assert (await app.cancel("order.close", "1")).result == "finished"
            assert {event.kind.value for event in await app.events()} == {"retry", "change"}
    again = [(attempt, life) for number, attempt, life in seen if number == 2]
    assert [attempt for attempt, _ in again] == [1, 2]
    assert len({life for _, life in again}) == 1


async def test_a_service_that_restarts_loses_nothing() -> None:
    done: Counter[str] = Counter()
    memory = MemoryStore()
    async with serving(Service(lambda: memory)) as service:
        app = Bide(service.url, lease="1s", concurrency=20)

        @app.handler("work")
        async def work(task: Task[Any]) -> None:
            done[task.key] += 1
            await pause(0.002, why="what goes wrong meets some that run")

        async with app, app.worker() as worker:
            await app.schedule_many([app.new("work", key=str(number), delay="0s") for number in range(200)])
            await until(lambda: sum(done.values()) > 50, "some to be done")
            await service.restart()
            await worker.until_empty()
    assert set(done) == {str(number) for number in range(200)}


async def test_a_subscription_that_was_cut_is_made_again_and_nothing_is_missed() -> None:
    memory = MemoryStore()
    async with serving(Service(lambda: memory)) as service, FaultProxy("127.0.0.1", service.port) as way:
        store = HttpStore(f"http://127.0.0.1:{way.port}")
        await store.open()
        heard: list[tuple[str, int]] = []
        listening = await store.listen(["t"], lambda topic, wake: heard.append((topic, wake)))
        now = await store.time()
        way.cut()
        await memory.add([new("missed", due=In(0))], now=now)
        await until(lambda: bool(heard), "to be told to look")
        heard.clear()
        [answer] = await memory.add([new("heard", due=In(1_000))], now=now)
        await until(lambda: ("t", now + 1_000) in heard, "to hear of the next")
        assert answer.record is not None
        two = await store.listen(["u"], lambda topic, wake: heard.append((topic, wake)))
        await memory.add([new(topic="u", due=In(7))], now=now)
        await until(lambda: ("u", now + 7) in heard, "to hear of another topic")
        await two.close()
        await listening.close()
        assert store._opened is not None
        assert store._opened.wakes._task is None, "nobody listens, and so nothing is streamed"
        await store.close()


async def test_streams_end_when_the_service_is_about_to_stop() -> None:
    service = Service(MemoryStore)
    async with opened(service) as store:
        listening = await store.listen(["t"], lambda topic, wake: None)
        there = store._opened
        assert there is not None
        service.calls.drain()
        await until(lambda: there.wakes.replaced > 0, "the stream to end")
        await listening.close()


async def test_a_worker_whose_token_is_taken_away_goes_on_and_works_again_when_it_is_given_back() -> None:
    caller = Caller("shop")

    def caller_of(header: str | None) -> Caller:
        return only("t", caller)(header)

    done: list[str] = []
    async with serving(Service(MemoryStore, caller_of=caller_of)) as service:
        app = Bide(service.url, token="t", max_sleep="50ms")

        @app.handler("work")
        async def work(task: Task[Any]) -> None:
            done.append(task.key)

        async with app, app.worker():
            await app.schedule("work", key="1", delay="0s")
            await until(lambda: done == ["1"], "the first")
            caller = Caller("shop", frozenset({Verb.SCHEDULE}))
            await app.schedule("work", key="2", delay="0s")
            await until(lambda: service.asked[-3:].count("lease") > 1, "leases that are refused")
            caller = Caller("shop")
            await until(lambda: done == ["1", "2"], "the second")


async def test_a_client_with_few_rights_is_refused_nothing_that_it_did_not_ask_for() -> None:
    caller = Caller("shop", frozenset({Verb.SCHEDULE, Verb.CANCEL}))
    async with serving(Service(MemoryStore, caller_of=only("t", caller))) as service:
        async with Bide(service.url, token="t", actor="ann") as app:
            await app.schedule("work", key="1", delay="1h")
            assert (await app.cancel("work", "1")).result == "cancelled"
        assert {"add", "change"} <= {*service.asked}
        assert "record" not in service.asked, "the service notes changes itself, and this needs another right"


async def test_synchronous_code_has_the_same_verbs() -> None:
    async with serving(Service(MemoryStore)) as service:
        app = Bide(service.url)

        def script() -> str:
            app.sync.schedule("work", key="1", delay="1h")
            answer = app.sync.cancel("work", "1")
            app.sync.close()
            return answer.result

        assert await asyncio.to_thread(script) == "cancelled"


async def test_a_single_call_is_folded_with_those_of_other_clients() -> None:
    class Counting(MemoryStore):
        adds = 0

        async def add(self, tasks: Any, *, now: int) -> Any:
            Counting.adds += 1
            await until(lambda: service.asked.count("add") == 20, "all to be there")
            return await super().add(tasks, now=now)

    async with serving(Service(Counting)) as service:
        stores = [HttpStore(service.url) for _ in range(20)]
        for store in stores:
            await store.open()
        await asyncio.gather(*(store.add([new(str(n))], now=0) for n, store in enumerate(stores)))
        assert Counting.adds < 10
        assert all(await stores[0].get([Ref("t", str(n)) for n in range(20)]))
        for store in stores:
            await store.close()


async def test_a_trace_goes_over_the_wire_and_comes_back() -> None:
    async with serving(Service(MemoryStore)) as service:
        app = Bide(service.url)

        @app.handler("work", retry="never")
        async def work(task: Task[Any]) -> None:
            raise ValueError("日本" * 2_000)

        async with app, app.worker() as worker:
            await work.schedule(None, key="k", delay="0s")
            await worker.until_empty()
            assert (worker.stats.dead, worker.stats.lost) == (1, 0)
            task = await app.get("work", "k")
        assert task is not None
        assert len(task.error or "") == 2_000
        assert "in work\n" in (task.trace or "")
