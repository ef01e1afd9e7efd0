"""Several instances behind one address: each call comes to another of them than the one before."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio
from aiohttp import ClientSession, web
from tests.stores.http.serving import HOST, Service, serving

from bide.core.errors import OutcomeUnknown
from bide.core.instants import In
from bide.core.records import Cancel, Filter, Move, OnConflict, Result
from bide.ports import remote
from bide.stores.http import HttpStore
from bide.stores.memory import MemoryStore
from bide.testing.store_suite.base import NOW, do, done, extend, listed, new, put_one, settle, take


class Dealing:
    """A proxy that deals requests in turn."""

    def __init__(self, instances: list[Service]) -> None:
        self.instances = instances
        self.dealt = 0
        self.lost = 0
        """Answers of `add` that are still to be thrown away."""
        self.url = ""

    async def deal(self, request: web.Request) -> web.StreamResponse:
        instance = self.instances[self.dealt % len(self.instances)]
        self.dealt += 1
        async with (
            ClientSession() as session,
            session.post(instance.url + request.path, data=await request.read(), headers=request.headers) as answer,
        ):
            body, kind, status = await answer.read(), answer.content_type, answer.status
        if self.lost and status == 200 and request.path.endswith("/add"):
            self.lost -= 1
            return web.Response(status=502)
        return web.Response(body=body, status=status, content_type=kind)


@pytest_asyncio.fixture(params=[2, 3], ids=["two", "three"])
async def dealing(request: pytest.FixtureRequest, memory: MemoryStore) -> AsyncIterator[Dealing]:
    async with AsyncExitStack() as stack:
        services = [Service(lambda: memory, trusting=True) for _ in range(request.param)]
        instances = [await stack.enter_async_context(serving(service)) for service in services]
        dealing = Dealing(instances)
        app = web.Application(client_max_size=remote.MOST << 10)
        app.router.add_post("/{path:.*}", dealing.deal)
        runner = web.AppRunner(app)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        site = web.TCPSite(runner, HOST, 0)
        await site.start()
        dealing.url = f"http://{HOST}:{runner.addresses[0][1]}"
        yield dealing


@pytest_asyncio.fixture
async def store(dealing: Dealing) -> AsyncIterator[HttpStore]:
    store = HttpStore(dealing.url, clock="caller", patience=remote.CALL_LASTS)
    await store.open()
    yield store
    await store.close()


async def test_lone_calls_come_to_the_instance_that_they_began_with(dealing: Dealing, store: HttpStore) -> None:
    count, calls = len(dealing.instances), 0
    for _ in range(3):
        await put_one(store)
        assert (await do(store, Move("t", "k", In(0)))).result is Result.MOVED
        held = await take(store)
        assert await extend(store, held, until=NOW + 60_000)
        assert await settle(store, done(held))
        calls += 5
    assert [one.asked.count("open") for one in dealing.instances].count(0) == count - 1, "one session, not one a call"
    assert dealing.dealt <= 2 + calls * count


async def test_a_call_whose_answer_is_lost_is_done_once(dealing: Dealing, store: HttpStore) -> None:
    dealing.lost = 2
    assert (await store.add([new(on_conflict=OnConflict.REFUSE)], now=NOW))[0].result is Result.CREATED
    assert dealing.lost == 0


async def test_what_an_instance_has_done_that_is_gone_is_unknown_and_not_done_by_another(
    dealing: Dealing, store: HttpStore
) -> None:
    await put_one(store, new("before"))
    [home] = [one for one in dealing.instances if "open" in one.asked]
    dealing.lost = 1
    real = dealing.instances[:]

    async def leave(operation: str) -> None:
        if operation == "add" and home.asked.count("add") > 1:
            dealing.instances[:] = [one for one in real if one is not home]

    home.before = leave
    with pytest.raises(OutcomeUnknown, match="begun anew"):
        await store.add([new("lost")], now=NOW)
    assert (await do(store, Cancel("t", "before"))).result is Result.CANCELLED, "in a session with another"
    assert [record.key for record in await listed(store, Filter())] == ["lost"]
