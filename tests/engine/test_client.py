"""The app as its callers use it, with a loop of their own and without; and what is kept of what has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest
from msgspec.structs import replace
from tests.engine.conftest import World, task_of, virtual
from tests.programs import python
from tests.service.instance import served
from tests.waiting import until

from bide import (
    Answer,
    BadInput,
    BadPayload,
    Bide,
    DuplicateHandler,
    NotOpen,
    PartlyFailed,
    Result,
    SetupError,
    StoreError,
    StoreUnavailable,
    TableSource,
    Task,
)
from bide.core.records import Filter, Found, Page, State
from bide.engine.config import MOST, Retention, Retentions
from bide.stores.memory import MemoryStore
from bide.testing.faults import FaultyStore


async def test_a_crowd_of_callers_costs_one_store_call() -> None:
    store = FaultyStore(MemoryStore())
    async with Bide(store) as app:
        answers = await asyncio.gather(*(app.schedule("t", n, key=str(n), delay="1h") for n in range(500)))
        assert {answer.result for answer in answers} == {Result.CREATED}
        moved = await asyncio.gather(*(app.reschedule("t", str(n), delay="2h") for n in range(500)))
        assert {answer.result for answer in moved} == {Result.MOVED}
        found = await asyncio.gather(*(app.get("t", str(n)) for n in range(500)))
        assert [task.payload for task in found if task] == list(range(500))
    assert (store.calls["add"], store.calls["change"], store.calls["get"]) == (1, 1, 1)


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("topic", {"topic": ["t"]}), ("topic", {"topic": "bide:settings"}), ("key", {"key": "ключ" * 60}),
        ("group", {"group": "\x00"}), ("delay", {"delay": 15}), ("delay", {"delay": "9000000000d"}),
        ("at", {"delay": None, "at": datetime(2030, 1, 1)}), ("at", {"delay": None, "at": "10000-01-01T00:00Z"}),
        ("at, delay", {"delay": None}), ("at, delay", {"at": datetime(2030, 1, 1, tzinfo=UTC)}),
        ("on_conflict", {"on_conflict": "overwrite"}), ("retry", {"retry": "sometimes"}),
        ("deadline", {"deadline": "1m"}), ("payload", {"payload": object()}), ("zone", {"zone": "Nowhere"}),
        ("at", {"delay": None, "at": "tomorrow 20:00"}), ("deadline", {"deadline": "tomorrow 20:00"}),
        ("at", {"delay": None, "at": "20:00 UTC", "zone": "Europe/Rome"}),
        ("payload", {"payload": b"x" * 262_145}), ("headers", {"headers": {"a": "b\n"}}),
    ],
)  # fmt: skip
async def test_bad_input_names_the_field_and_nothing_is_done(field: str, wrong: dict[str, Any]) -> None:
    async with Bide("memory:") as app:
        arguments = {"topic": "t", "payload": None, "key": "k", "delay": "1h", **wrong}
        with pytest.raises(BadInput) as caught:
            await app.schedule(**arguments)
        assert caught.value.field == field
        assert caught.value.accepted
        assert [task async for task in app.find()] == []


@pytest.mark.parametrize(
    ("field", "call"),
    [
        ("tasks", lambda app: app.schedule_new(None)), ("tasks", lambda app: app.schedule_many([5])),
        ("tasks", lambda app: app.recurring.add_many([app.new("t", delay="1h")])),
        ("moves", lambda app: app.reschedule_many([("t", "k", "1h")])), ("refs", lambda app: app.get_many([5])),
        ("refs", lambda app: app.cancel_many(["tk"])), ("topics", lambda app: app.tally(topics="t")),
        ("edges", lambda app: app.tally(["1h", "0s"])),
        ("on_conflict", lambda app: app.schedule("t", delay="1h", on_conflict=[])),
        ("who", lambda app: app.pause("t", who=5)), ("who", lambda app: app.resume("t", who="x" * 201)),
    ],
)  # fmt: skip
async def test_what_verbs_cannot_take_is_named(field: str, call: Callable[[Bide], Any]) -> None:
    async with Bide("memory:") as app:
        with pytest.raises(BadInput) as caught:
            await call(app)
        assert caught.value.field == field


def test_the_bounds_of_a_declared_type_count() -> None:
    app = Bide("memory:")

    @app.handler("refund")
    async def refund(task: Annotated[Task[Annotated[int, msgspec.Meta(ge=1)]], "it"]) -> None: ...

    @app.handler("raw")
    async def raw(task: Task[Annotated[bytes, "a picture"]]) -> None: ...

    raw.new(b"\xff", delay="1h")
    assert app.routes["raw"].sink.declared is bytes  # type: ignore[attr-defined]
    with pytest.raises(BadPayload, match=">= 1"):
        refund.new(-5, delay="1h")


async def test_a_handler_is_declared_once_and_rightly() -> None:
    app = Bide("memory:")

    @app.handler("t")
    async def first(task: Task[int]) -> None: ...

    with pytest.raises(DuplicateHandler, match="'t'"):
        app.handler("t")
    with pytest.raises(SetupError, match="one argument"):

        @app.handler("u")  # type: ignore[arg-type]
        async def none() -> None: ...

    with pytest.raises(SetupError, match="Task"):

        @app.handler("v")  # type: ignore[arg-type]
        async def wrong(task: int) -> None: ...

    with pytest.raises(SetupError, match=r"no payload can be a .* more than one dict") as caught:

        @app.handler("w")
        async def of_two(task: Task[dict[str, int] | dict[str, str]]) -> None: ...

    assert "of_two" in str(caught.value)
    with pytest.raises(SetupError, match=r'lambda.*write @app\.handler\("a\.topic"\)'):
        app.handler(lambda task: None)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match=r"'retries' is not accepted; give an option of app\.handler; .* is retry$"):
        app.handler("w", retries=3)  # type: ignore[call-arg]
    with pytest.raises(BadInput, match=r"'dealy' is not accepted; give an option of app\.schedule; .* is delay$"):
        app.new("t", dealy="1h")  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="at, delay: nothing was given; give one of the two"):
        app.new("other")
    with pytest.raises(BadInput, match="timeout"):
        app.handler("w", timeout="0s")
    with pytest.raises(BadInput, match="keep_done"):
        app.handler("w", keep_done=5)(first.__wrapped__)  # type: ignore[arg-type]
    assert list(app.routes) == ["t"]
    with pytest.raises(BadInput, match="topics"):
        app.worker(topics=["unknown"])
    with pytest.raises(BadInput, match="topics: 't' is not accepted; give a list of topics"):
        app.worker(topics="t")
    for url, accepted in (("", "store URL"), ("sqlite:///:memory:", 'without a file, "memory:"')):
        with pytest.raises(BadInput, match=accepted):
            Bide(url)


async def test_a_kind_of_text_names_a_topic_by_its_plain_text() -> None:
    class Name(str): ...

    app, topic, got = Bide("memory:"), Name("t"), list[type]()

    @app.handler(topic)
    async def close(task: Task[int]) -> None:
        got.append(type(task.topic))

    assert [type(one) for one in app.routes] == [str]
    async with app, app.worker(topics=[topic]) as worker:
        await app.pause(topic)
        for key in "ab":
            await close.schedule(1, key=key, group=Name("g"), delay="0s", headers={Name("a"): Name("b")})
        assert len([task async for task in app.find(topic=topic, page=1)]) == 2
        assert (await app.tally(topics=[topic])).counts["t", State.WAITING] == (2, True)
        await app.resume(topic)
        await worker.until_empty()
    assert got == [str, str]


async def test_an_app_that_is_not_open_says_so() -> None:
    app = Bide("memory:")
    with pytest.raises(NotOpen, match="async with app") as caught:
        await app.schedule("t", delay="1h")
    assert not isinstance(caught.value, StoreError), "who tries again what a store refused would do so for ever"
    async with app:
        async with app:
            await app.schedule("t", delay="1h")
        await app.schedule("t", delay="1h")


async def test_a_group_larger_than_a_page_is_shifted_once_each() -> None:
    async with Bide("memory:") as app:
        await app.schedule_many([app.new("t", n, key=str(n), group="g", delay="2h") for n in range(1_700)])
        before = {task.key: task.due_at async for task in app.find(group="g")}
        assert len(await app.shift(group="g", by="1h")) == 1_700
        after = {task.key: task.due_at async for task in app.find(group="g")}
        assert {after[key] - before[key] for key in before} == {timedelta(hours=1)}


@pytest.mark.parametrize("verb", ["shift", "cancel_group"])
@pytest.mark.parametrize("another", [{"topic": "t", "group": "user-8"}, {"topic": "t", "group": None}])
async def test_a_task_that_left_the_group_meanwhile_is_left_alone(verb: str, another: dict[str, Any]) -> None:
    class Raced(MemoryStore):
        async def find(self, where: Filter, page: Page) -> Found:
            found = await super().find(where, page)
            self.answer, *_ = await self.add([app.new(key="42", delay="9h", **another)], now=app.clock.now())
            return found

    async with Bide(store := Raced()) as app:
        await app.schedule("t", key="42", group="user-7", delay="1h")
        assert await (app.shift("user-7", "1h") if verb == "shift" else app.cancel_group("user-7")) == []
        task = await task_of(app, "t", "42")
        assert task.record == store.answer.record


@pytest.mark.parametrize("lost", ["find", "change"])
async def test_a_group_verb_that_fails_half_way_says_what_it_did(lost: str) -> None:
    def away(point: str) -> StoreUnavailable | None:
        return StoreUnavailable("away") if point == f"{lost}:before" and store.calls[lost] == again else None

    store = FaultyStore(MemoryStore(), fault=away)
    async with Bide(store) as app:
        await app.schedule_many([app.new("t", n, key=str(n), group="g", delay="2h") for n in range(700)])
        again = 1
        with pytest.raises(StoreUnavailable):
            await app.shift("g", "1h")
        again = store.calls[lost] + 2
        with pytest.raises(PartlyFailed, match="away") as caught:
            await app.shift("g", "1h")
        *done, error = caught.value.answers
        assert [answer.result for answer in done if isinstance(answer, Answer)] == ["moved"] * 500
        assert isinstance(error, StoreUnavailable)


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "5", 2**63])
async def test_a_number_that_is_none_is_refused_before_anything_is_sent(wrong: Any) -> None:
    store = FaultyStore(MemoryStore())
    app = Bide(store)
    refused = pytest.raises(BadInput, match=r"^\w+: .+ is not accepted; give a whole number from \d to [\d,]+$")
    async with app:
        await app.schedule("t", 1, key="k", delay="1h")
        before = store.calls.copy()
        for verb in (
            lambda: app.schedule("t", 1, key="k", delay="1h", if_token=wrong),
            lambda: app.reschedule("t", "k", delay="1h", if_token=wrong),
            lambda: app.fire_now("t", "k", if_token=wrong),
            lambda: app.cancel("t", "k", if_token=wrong),
            lambda: app.redrive("t", "k", if_token=wrong),
            lambda: app.events(limit=wrong),
            lambda: anext(app.find(page=wrong)),
            lambda: app.tally(upto=wrong),
        ):
            with refused:
                await verb()
        with refused:
            list(app.sync.find(page=wrong))
        assert store.calls == before
    for option in ({"concurrency": wrong}, {"losses": wrong}, {"concurrency": 0}):
        with refused:
            app.handler("w", **option)
    with refused:
        app.watch(TableSource(table="t", due="due", where="status = 2", changes={"status": 3}), concurrency=wrong)


@pytest.mark.parametrize("wrong", [5, "a\ud800", "a\0b", "x" * 201])
def test_the_name_of_a_worker_and_of_an_actor_is_text_that_every_store_keeps(wrong: Any) -> None:
    with pytest.raises(BadInput, match=r"^actor: .* give 1 to 200 bytes of text"):
        Bide("memory:", actor=wrong)
    with pytest.raises(BadInput, match=r"^name: .* give 1 to 200 bytes of text"):
        Bide("memory:").worker(name=wrong)


async def test_the_events_of_one_task_are_asked_for_by_topic_and_key() -> None:
    async with Bide("memory:", actor="ann") as app:
        await app.schedule("a", key="1", delay="1h")
        await app.schedule("b", key="1", delay="1h")
        assert [event.topic for event in await app.events("a", "1")] == ["a"]
        for ref, field in ((("a",), "key"), ((None, "1"), "topic"), (("a", ""), "key"), (("a", "\ud800"), "key")):
            with pytest.raises(BadInput, match=f"^{field}: "):
                await app.events(*ref)


async def test_a_time_in_the_past_is_said_and_may_be_refused() -> None:
    async with Bide("memory:") as app:
        past = (await app.schedule("t", key="k", at="2020-01-01T00:00Z")).past
        assert past is not None
        assert past > timedelta(days=2_000)
        assert (await app.reschedule("t", "k", delay="0s")).past is None
        assert (await app.reschedule("t", "k", at="2020-01-01T00:00Z")).past is not None
        assert (await app.schedule("t", key="k", at="2020-01-01T00:00Z", on_conflict="keep")).past is None
    async with Bide("memory:", max_past="1d") as app:
        at = app.now() - timedelta(hours=23)
        assert (await app.schedule("t", key="k", at=at)).past is not None
        for refused in (
            lambda: app.schedule("t", at="2020-01-01T00:00Z"),
            lambda: app.reschedule("t", "k", at="2020-01-01T00:00Z"),
            lambda: app.reschedule_many([(("t", "k"), "2020-01-01T00:00Z")]),
        ):
            with pytest.raises(BadInput, match="at most 1d ago"):
                await refused()


@virtual
async def test_what_is_no_longer_remembered_is_gone_before_a_purge_comes_by(world: World) -> None:
    async with world.app(keep_cancelled="1h") as app:
        await app.schedule("t", None, key="k", delay="1d")
        await app.cancel("t", "k")
        await world.pause(3_599.0)
        assert (await app.cancel("t", "k")).result == "finished"
        assert [one.key async for one in app.find(topic="t")] == ["k"]
        await world.pause(1.0)
        assert await app.get("t", "k") is None
        assert await app.get_many([("t", "k")]) == [None]
        assert [one async for one in app.find(topic="t")] == []
        assert (await app.cancel("t", "k")).result == "not_found"
        assert (await app.schedule("t", None, key="k", delay="1d", on_conflict="keep")).result == "created"


async def test_a_listing_reads_few_large_tasks_at_once() -> None:
    """Also that of `app.sync`. The first page is short; the others have as many tasks as make 1 MiB."""
    sizes: list[int] = []

    class Noted(MemoryStore):
        async def find(self, where: Filter, page: Page) -> Found:
            found = await super().find(where, page)
            sizes.append(len(found.tasks))
            return found

    async with Bide(Noted()) as app:
        await app.schedule_many([app.new("large", bytes(200 * 1024), delay="1h") for _ in range(58)])
        await app.schedule_many([app.new("small", None, delay="1h") for _ in range(200)])
        expected = [50, 5, 3, 50, 120, 30]
        found = [task for topic in ("large", "small") async for task in app.find(topic=topic, page=120)]
        assert (len(found), sizes) == (258, expected)
        sizes.clear()
        blocking = await asyncio.to_thread(
            lambda: [task for topic in ("large", "small") for task in app.sync.find(topic=topic, page=120)]
        )
        assert (len(blocking), sizes) == (258, expected)


async def test_a_plain_handler_uses_the_workers_own_loop() -> None:
    app = Bide("memory:")
    done = asyncio.Event()
    loop = asyncio.get_running_loop()

    @app.handler("first")
    def first(task: Task[Any]) -> None:
        app.sync.schedule("second", key="s", delay="0s")

    @app.handler("second")
    async def second(task: Task[Any]) -> None:
        loop.call_soon(done.set)

    async with app, app.worker():
        await app.schedule("first", delay="0s")
        await until(done.is_set, "the second handler to run")
        with pytest.raises(SetupError, match="await the verb"):
            app.sync.schedule("second", delay="0s")


def test_a_script_that_forgets_to_close_ends_quietly(tmp_path: Path) -> None:
    script = (
        f"from bide import Bide\napp = Bide('sqlite:///{tmp_path}/script.db')\n"
        "print(app.sync.schedule('t', key='k', delay='1h').result)\n"
    )
    done = python("-c", script)
    assert (done.stdout, done.stderr) == ("created\n", "")
    assert [path.name for path in tmp_path.iterdir()] == ["script.db"], "the WAL is written back"


def test_a_memory_app_has_one_timeline() -> None:
    app = Bide("memory:")
    app.sync.schedule("t", key="early", delay="1h")

    async def look() -> list[str]:
        async with app:
            return [task.key async for task in app.find()]

    assert asyncio.run(look()) == ["early"]
    app.sync.close()


HOUR = 3_600_000


def test_so_many_of_a_topic_and_state_are_remembered() -> None:
    kept = Retentions(Retention(done=HOUR, cancelled=HOUR), most=3)
    done = [kept.of("a").keep_until(State.DONE, now) for now in range(5)]
    assert done == [HOUR, HOUR + 1, HOUR + 2, 0, 0]
    assert kept.of("a").keep_until(State.CANCELLED, 0) == HOUR, "each state by itself"
    assert kept.of("b").keep_until(State.DONE, 0) == HOUR, "and each topic"
    assert kept.of("a").keep_until(State.DONE, HOUR + 1) == 2 * HOUR + 1, "those that were forgotten make room"
    assert [kept.of("a").keep_until(State.DEAD, 0) > 0 for _ in range(9)] == [True] * 9


def test_what_a_topic_says_itself_counts() -> None:
    given = Retentions(Retention(done=HOUR), {"a": Retention(done=5), "b": Retention(done=0)})
    kept = given.at_most(MOST)
    assert kept.of("a").keep_until(State.DONE, 10) == 15
    assert kept.of("b").keep_until(State.DONE, 10) == 0


async def test_a_service_remembers_no_more() -> None:
    async with served("memory:") as instance:
        app = instance.app
        app.config = replace(app.config, retentions=app.config.retentions.at_most(3))
        await app.cancel_many([("t", "never there")] * 2)
        await app.cancel("t", "never there")
        await app.schedule_many([app.new("t", key=str(number), delay="1h") for number in range(5)])
        await app.cancel_many([("t", str(number)) for number in range(5)])
        assert len([True async for _ in app.find(topic="t", state="cancelled")]) == 3


def test_what_is_declared_after_the_first_call_counts_for_sync_too() -> None:
    app = Bide("memory:")
    app.sync.schedule("a", key="k", delay="1h")
    app.handler("a", keep_cancelled="0s")(lambda task: None)
    app.sync.cancel("a", "k")
    assert app.sync.get("a", "k") is None
    app.sync.close()


def test_what_a_handler_says_is_kept_whatever_its_number() -> None:
    app = Bide("memory:")
    app.retain("a", done="1d")
    told = app.config.retentions.of("a")
    assert [told.keep_until(State.DONE, 0) for _ in range(MOST + 1)] == [24 * HOUR] * (MOST + 1)
    assert [told.keep_until(State.CANCELLED, 0) for _ in range(MOST + 1)] == [HOUR] * MOST + [0]
    assert [app.config.retentions.of("b").keep_until(State.DONE, 0) for _ in range(MOST + 1)] == [HOUR] * MOST + [0]
