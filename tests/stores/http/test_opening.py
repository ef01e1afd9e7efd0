"""What is found at a URL, with what token, over how many connections, and behind an address of several instances."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Collection
from contextlib import AsyncExitStack
from typing import Any
from unittest.mock import patch

import pytest
import pytest_asyncio
from aiohttp import ClientSession, web
from msgspec import Raw
from msgspec.structs import replace
from starlette.responses import RedirectResponse, Response
from tests.stores.http.serving import HOST, Service, connected, only, opened, serving
from tests.waiting import until

from bide import Bide, SetupError
from bide.core.errors import BadInput, MissingExtra, OutcomeUnknown, PartlyFailed, StoreMismatch, StoreUnavailable
from bide.core.events import Event, EventKind
from bide.core.instants import In
from bide.core.names import RESERVED_TOPIC
from bide.core.records import Cancel, Filter, Lease, Move, NewTask, OnConflict, Page, Ref, Result, State
from bide.ports import remote
from bide.ports.remote import OPERATIONS
from bide.service.access import Caller, Verb
from bide.stores.http import HttpStore, calls
from bide.stores.http.calls import Calls, NotAllowed, base_of
from bide.stores.memory import MemoryStore
from bide.testing.store_suite.base import NOW, do, done, extend, listed, new, put_one, retry, see, settle, take

TOKEN = "bide_abcdefgh_secret"


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://localhost:8420", "http://localhost:8420"),
        ("http://127.0.0.1", "http://127.0.0.1:8420"),
        ("http://[::1]:80/", "http://[::1]:80"),
        ("https://bide.example", "https://bide.example"),
        ("https://example.com/bide/", "https://example.com/bide"),
        ("http://tasks.internal:8420?insecure=1", "http://tasks.internal:8420"),
    ],
)
def test_urls(url: str, base: str) -> None:
    assert base_of(url, TOKEN) == base


@pytest.mark.parametrize(
    "url",
    [
        "http://", "http:///path", "http://host:port", "http://host:99999", "https://host?namespace=a", "https://h#a",
        "http://ho st", "ftp://host", "http://host?insecure=yes", "http://[::1",
    ],
)  # fmt: skip
def test_urls_that_are_refused(url: str) -> None:
    with pytest.raises(BadInput, match="store"):
        base_of(url, None)


def test_a_token_does_not_go_over_the_network_in_clear_text() -> None:
    base_of("http://tasks.internal:8420", None)
    for host in ("tasks.internal", "10.0.0.7", "0.0.0.0", "[2001:db8::1]", "localhost.example.com"):
        with pytest.raises(BadInput, match="https") as refused:
            HttpStore(f"http://{host}:8420", token=TOKEN)
        assert TOKEN not in str(refused.value)


def test_a_password_in_the_url_is_not_shown() -> None:
    with pytest.raises(BadInput, match="token") as refused:
        base_of("https://ann:secret@host", None)
    assert "secret" not in str(refused.value)


def test_an_app_shows_no_token() -> None:
    app = Bide("https://bide.example", token=TOKEN)
    assert app.settings.token == TOKEN
    assert TOKEN not in f"{app!r} {app.settings!r} {app._make_store()!r}"


def test_without_the_extra_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("bide.stores.http")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    with pytest.raises(MissingExtra, match=r"bide\[http\]"):
        Bide("http://localhost:8420")


async def test_nobody_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_AT_FIRST", 0.1)
    with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1:1"):
        await HttpStore(f"http://{HOST}:1").open()


def welcome(**said: Any) -> Response:
    return Response(remote.encode(remote.Welcome(**said)), media_type=remote.CONTENT_TYPE)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (Response(b"<html>", media_type="text/html"), "not bide's service"),
        (Response(b"nothing", 404), "404"),
        (RedirectResponse("https://elsewhere.example"), "leads elsewhere"),
        (welcome(service="cake", wire=1, session="x"), "cake"),
        (welcome(service="bide", wire=2, version="9.0.0"), "9.0.0 speaks version 2"),
        (Response(b"\xc1", media_type=remote.CONTENT_TYPE), "cannot be read"),
    ],
    ids=["a page", "another path", "a redirect", "another service", "a newer wire", "garbage"],
)
async def test_something_else_is_there(service: Service, answer: Response, said: str) -> None:
    async def instead(operation: str) -> Response:
        return answer

    service.before = instead
    with pytest.raises(StoreMismatch, match=said):
        await HttpStore(service.url).open()


async def test_an_older_service_says_which_wire_it_speaks(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    opening = service.calls._open

    def as_of_another_version(body: bytes, caller: Caller) -> object:
        hello = remote.read_hello(body)
        return opening(remote.encode(remote.Hello(hello.wire + 1, hello.clock)), caller)

    monkeypatch.setattr(service.calls, "_open", as_of_another_version)
    with pytest.raises(StoreMismatch, match="speaks version 1"):
        await HttpStore(service.url).open()


async def test_a_service_takes_no_callers_clock() -> None:
    async with serving(Service(MemoryStore)) as service:
        with pytest.raises(StoreMismatch, match="clock"):
            await HttpStore(service.url, clock="caller").open()


async def test_time_is_the_services() -> None:
    async with opened(Service(MemoryStore)) as store:
        before = await store.time()
        [answer] = await store.add([new(due=In(3_600_000))], now=5)
        assert answer.record is not None
        assert before <= answer.record.wake_at - 3_600_000 <= await store.time()
        leased = await store.lease({"t": 1}, now=answer.record.wake_at + 1, until=answer.record.wake_at + 2, holder="w")
        assert leased.tasks == [], "whatever the caller says that the time is"


# --- tokens


async def test_a_token_is_asked_for_and_a_wrong_one_is_refused() -> None:
    async with serving(Service(MemoryStore, caller_of=only(TOKEN, Caller("shop")))) as service:
        with pytest.raises(SetupError, match="asks for a token"):
            await HttpStore(service.url).open()
        with pytest.raises(SetupError, match="does not accept the token") as refused:
            await HttpStore(service.url, token="bide_wrong").open()
        assert "bide_wrong" not in str(refused.value)
        async with connected(service.url, token=TOKEN):
            pass


async def test_what_a_token_does_not_allow_is_named_and_others_are_served(memory: MemoryStore) -> None:
    caller = Caller("shop", frozenset({Verb.SCHEDULE, Verb.CANCEL, Verb.READ, Verb.RESCHEDULE}), ("order.*",))
    async with opened(Service(lambda: memory, caller_of=only(TOKEN, caller)), token=TOKEN) as store:
        with pytest.raises(PartlyFailed) as partly:
            await store.add([new(topic="order.close"), new(topic="mail"), new("l", topic="order.close")], now=NOW)
        assert [type(answer).__name__ for answer in partly.value.answers] == ["Answer", "NotAllowed", "Answer"]
        with pytest.raises(NotAllowed, match="'shop' may not schedule on topic 'mail'"):
            await store.add([new(topic="mail")], now=NOW)
        with pytest.raises(NotAllowed, match="may not fire on topic"):
            await store.change([Move("order.close", "k", In(0), verb="fire_now")], now=NOW)
        assert len(await store.change([Move("order.close", "k", In(0))], now=NOW)) == 1
        with pytest.raises(NotAllowed, match="work on topic"):
            await store.lease({"order.close": 1}, now=NOW, until=NOW + 1, holder="w")
        with pytest.raises(NotAllowed, match="work on topic"):
            await store.listen(["order.close"], lambda topic, wake: None)
        with pytest.raises(NotAllowed, match="events over all topics"):
            await store.events()
        with pytest.raises(NotAllowed, match="read over all topics"):
            await store.find(Filter(), Page())
        assert len((await store.find(Filter(topic="order.close"), Page())).tasks) == 2
        await memory.add([new(topic="mail")], now=NOW)
        assert {topic for topic, _ in (await store.tally()).counts} == {"order.close"}
        assert await store.purge(now=NOW, limit=10) == 0


async def test_to_fire_is_not_to_reschedule_under_its_name_nor_to_change_a_deadline(memory: MemoryStore) -> None:
    caller = Caller("shop", frozenset({Verb.FIRE}))
    async with opened(Service(lambda: memory, caller_of=only(TOKEN, caller)), token=TOKEN) as store:
        await memory.add([new()], now=NOW)
        fires = Move("t", "k", In(0), verb="fire_now")
        for more in ({"due": In(5)}, {"verb": "reschedule"}, {"deadline": NOW + 1}):
            with pytest.raises(NotAllowed, match="may not reschedule on topic"):
                await store.change([replace(fires, **more)], now=NOW)
        [answer] = await store.change([fires], now=NOW)
        assert answer.result == "moved"


async def test_a_change_is_noted_as_the_callers_and_nobody_speaks_for_others() -> None:
    async with opened(Service(MemoryStore, caller_of=only(TOKEN, Caller("shop"))), token=TOKEN) as store:
        await store.add([new(), new("l")], now=NOW)
        await store.change([Cancel("t", "k"), Move("t", "l", In(5))], now=NOW)
        event = Event(at=NOW, topic="t", key="k", id="", kind=EventKind.DEAD, who="the director", what="x")
        await store.record([event])
        found = {event.what: event.who for event in await store.events()}
        assert found == {"cancel: cancelled": "shop", "reschedule: moved": "shop", "x": "shop/the director"}


# --- what is sent by whoever likes to


BAD: list[NewTask] = [
    new(topic=RESERVED_TOPIC),
    new(topic=""),
    new("a\nb"),
    new("x" * 201),
    new(group="é" * 101),
    new(payload=b"x" * 1_001),
    new(options=b"\xc1"),
    new(options=b"x" * 10_000),
    new(due=In(2**62)),
    new(deadline=-1),
    NewTask("t", "k", "no id", In(0)),
    NewTask("t", "k", "01A20196-d0ef-7031-b766-938191724804", In(0)),
]


@pytest.mark.parametrize("task", BAD, ids=range(len(BAD)))
async def test_what_is_wrong_is_refused_and_the_rest_is_done(task: NewTask) -> None:
    async with opened(Service(MemoryStore, payload_limit=1_000)) as store:
        with pytest.raises(BadInput):
            await store.add([task], now=NOW)
        with pytest.raises(PartlyFailed) as partly:
            await store.add([new("good"), task], now=NOW)
        assert isinstance(partly.value.answers[1], BadInput)
        assert (await store.tally()).number(state=State.WAITING) == 1


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", b"\x94\xa0\x01\xc0\xc1", b"\xff" * 100, b"\x91" * 100_000], ids=range(5)
)
async def test_garbage_is_refused_by_every_operation(body: bytes) -> None:
    async with serving(Service(MemoryStore)) as service:
        for operation in (*sorted(OPERATIONS), "no"):
            answered = await service.calls.answer(operation, body, Caller("anybody"))
            assert answered.status in (400, 422, 409) or (operation == "time" and answered.status == 200), operation


async def test_a_session_is_its_callers_alone() -> None:
    callers = {"Bearer one": Caller("one"), "Bearer two": Caller("two")}
    service = Service(MemoryStore, caller_of=lambda header: callers[header or ""])
    async with opened(service, token="one") as one, connected(service.url, token="two") as two:
        assert one._opened is not None
        assert two._opened is not None
        await one.add([new()], now=NOW)
        call = remote.Call(one._opened.calls._session, 1, None, Raw(remote.encode(remote.Batch([Cancel("t", "k")]))))
        answered = await service.calls.answer("change", remote.encode(call), callers["Bearer two"])
        assert remote.read_failure(answered.body).kind == remote.SESSION
        assert (await one.get([Ref("t", "k")]))[0] is not None


async def test_a_batch_that_is_too_large_goes_in_parts() -> None:
    service = Service(MemoryStore, body_limit=100_000)
    service.body_taken = 60_000  # a proxy on the way takes less than the service says
    async with opened(service) as store:
        answers = await store.add([new(str(number), payload=b"x" * 5_000) for number in range(100)], now=NOW)
        assert len(answers) == 100
        assert [record.key for record in await store.get([Ref("t", str(n)) for n in range(100)]) if record] == [
            str(number) for number in range(100)
        ]
        with pytest.raises(BadInput, match="too large"):
            await store.add([new(payload=b"x" * 99_000)], now=NOW)


async def test_large_payloads_go_in_calls_of_1_mib() -> None:
    async with opened(Service(MemoryStore)) as store:
        with patch.object(Calls, "ask", autospec=True, side_effect=Calls.ask) as asked:
            await store.add([new(str(number), payload=bytes(300 * 1024)) for number in range(7)], now=NOW)
    assert [len(call.args[2]) // (300 * 1024) for call in asked.call_args_list] == [3, 3, 1]


async def test_pages_are_bounded_in_bytes(memory: MemoryStore) -> None:
    async with opened(Service(lambda: memory)) as store:
        names = [f"{number:02}" for number in range(40)]
        await memory.add([new(name, payload=b"x" * 1_000_000) for name in names], now=NOW)
        page = await store.find(Filter(topic="t"), Page(limit=100))
        assert len(page.tasks) == 8
        assert page.cursor is not None
        shown: list[str] = [record.key for record in page.tasks]
        while page.cursor is not None:
            page = await store.find(Filter(topic="t"), Page(limit=100, cursor=page.cursor))
            shown += [record.key for record in page.tasks]
        assert shown == names
        assert [record.key for record in await store.get([Ref("t", name) for name in names]) if record] == names


async def test_a_transaction_cannot_be_joined_over_http(service: Service) -> None:
    async with Bide(HttpStore(service.url, clock="caller")) as app:
        with pytest.raises(SetupError):
            app.using(object())


async def test_what_no_wire_can_say_is_said_otherwise() -> None:
    async with opened(Service(MemoryStore, trusting=True), clock="caller") as store:
        for token in (0, -1, 2**63, 2**64, 10**40):
            await store.add([new()], now=NOW)
            [answer] = await store.change([Cancel("t", "k", if_token=token)], now=NOW)
            assert answer.result == "stale_token"
        held = await take(store)
        assert await settle(store, retry(held, In(0), error="half a pair: \ud83d"))
        assert (await see(store, held)).error == "half a pair: \\ud83d"
        event = Event(at=NOW, topic="t", key="k", id="", kind=EventKind.RETRY, what="\ud83d")
        await store.record([event])
        assert [event.what for event in await store.events()] == ["\\ud83d"]


async def test_the_presence_of_a_worker_that_died_is_taken_back() -> None:
    said: list[tuple[str, list[str]]] = []

    class Listed(MemoryStore):
        async def announce(self, holder: str, topics: Collection[str], until: int, *, now: int) -> dict[str, list[str]]:
            said.append((holder, list(topics)))
            return await super().announce(holder, topics, until, now=now)

    async with opened(Service(Listed, trusting=True), clock="caller") as store:
        await store.announce("dies", ["t"], NOW + 1_000, now=NOW)
        await store.announce("lives", ["t"], NOW + 9_000, now=NOW)
        assert set(await store.announce("lives", ["t"], NOW + 9_000, now=NOW + 2_000)) == {"lives"}
        assert said[-1] == ("dies", [])
        await store.announce("lives", ["t"], NOW + 9_000, now=NOW + 2_000)
        assert said.count(("dies", [])) == 1


# --- what a token that may do a little cannot do


async def test_the_log_of_events_is_written_by_workers_alone_and_at_a_rate(memory: MemoryStore) -> None:
    callers = {
        "Bearer w": Caller("w", frozenset({Verb.WORK}), ("t.*",)),
        "Bearer e": Caller("e", frozenset({Verb.EVENTS})),
    }
    service = Service(lambda: memory, caller_of=lambda header: callers[header or ""])
    async with opened(service, token="w") as worker, connected(service.url, token="e") as reader:
        forged = Event(at=NOW, topic="t.a", key="k", id="", kind=EventKind.CHANGE, what="cancel: cancelled")
        with pytest.raises(SetupError, match="may not work"):
            await reader.record([replace(forged, kind=EventKind.DEAD)])
        with pytest.raises(SetupError, match="may not work"):
            await worker.record([replace(forged, topic="u", kind=EventKind.DEAD)])
        await memory.record([replace(forged, who="ann")])
        for _ in range(3):
            await worker._ask(remote.RECORD, [forged])
            await worker.record([replace(forged, kind=EventKind.RETRY, what=f"{n}") for n in range(9_000)])
        found = await reader.events(limit=10_000)
        assert [event.who for event in found if event.kind is EventKind.CHANGE] == ["ann"], "none made or pushed out"
        assert 2_000 <= len(found) < 5_000
        assert NOW not in {event.at for event in found if event.kind is EventKind.RETRY}, "at the service's time"


async def test_a_lease_is_bounded_and_held_in_the_name_of_its_caller() -> None:
    async with opened(Service(MemoryStore, caller_of=only(TOKEN, Caller("shop"))), token=TOKEN) as store:
        now = await store.time()
        with pytest.raises(BadInput, match="24 hours"):
            await store.lease({"t": 1}, now=now, until=now + 86_400_001, holder="root@prod")
        await store.add([new(due=In(0))], now=now)
        [task] = (await store.lease({"t": 1}, now=now, until=now + 1, holder="root@prod")).tasks
        assert task.holder == "shop@root@prod"
        assert task.wake_at != now + 1, "at least a second"
        held = [Lease("t", "k", task.token)]
        assert await store.extend(held, now=now, until=now + 86_400_001) == [False]
        assert await store.extend(held, now=now, until=now + 60_000) == [True]


async def test_nobody_announces_anothers_worker_away(memory: MemoryStore) -> None:
    await memory.open()
    now = int(time.time() * 1_000)
    await memory.announce("prod-worker", ["zz.pay"], now + 60_000, now=now)
    narrow = Caller("narrow", frozenset({Verb.WORK}), ("b.*",))
    async with opened(Service(lambda: memory, caller_of=only("n", narrow)), token="n") as store:
        await store.announce("prod-worker", [], now, now=now)
        await store.announce("prod-worker", ["b.mail"], now + 10**12, now=now)
        live = await memory.announce("looks", [], now, now=now)
        assert live["prod-worker"] == ["zz.pay"]
        assert live["narrow@prod-worker"] == ["b.mail"]
        live = await memory.announce("looks", [], now, now=now + 120_000)
        assert "narrow@prod-worker" not in live, "for a minute at most"


AT_ONCE = 20


def connections(service: Service) -> int:
    assert service._server is not None
    return len(service._server.server_state.connections)


async def test_connections_of_a_busy_moment_end_though_calls_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would be kept for ever if each call took the one that has rested for longest."""
    monkeypatch.setattr(calls, "_IDLE", 0.1)
    together, service = asyncio.Event(), Service(MemoryStore, trusting=True)

    async def wait(operation: str) -> None:
        await together.wait()

    async with opened(service, clock="caller") as store:
        service.before = wait
        gets = [asyncio.create_task(store.get([Ref("t", "k")])) for _ in range(AT_ONCE)]
        await until(lambda: connections(service) >= AT_ONCE, "all are under way")
        together.set()
        await asyncio.gather(*gets)

        async def few_after_a_call() -> bool:
            await store.get([Ref("t", "k")])
            return connections(service) <= 2

        assert await until(few_after_a_call, "the others to end")


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
    async with connected(dealing.url, clock="caller", patience=remote.CALL_LASTS) as store:
        yield store


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
    with pytest.raises(OutcomeUnknown, match="has restarted"):
        await store.add([new("lost")], now=NOW)
    assert (await do(store, Cancel("t", "before"))).result is Result.CANCELLED, "in a session with another"
    assert [record.key for record in await listed(store, Filter())] == ["lost"]
