"""Pause and resume over HTTP: every answer says so, consumers and clients of the store calls are held back."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from typing import Any

import pytest
from tests.service.calling import Api, Running, at, running
from tests.service.test_access import make
from tests.waiting import pause

from bide import BadInput, Bide, SetupError, SystemClock, Task
from bide.core.instants import Millis
from bide.core.records import Leased, Topic
from bide.engine import pauses
from bide.ports import StoreFacade
from bide.ports.remote import LeaseRequest
from bide.service.access import Caller, Verb
from bide.service.remote import StoreOperations
from bide.stores.memory import MemoryStore


def pause_of(topic: str) -> str:
    return at(topic, "").removesuffix("/tasks/") + "/pause"


@pytest.fixture
def service(small: Running) -> Running:
    """Of the stores, tests/engine/test_pauses.py pauses on each."""
    return small


@pytest.fixture
def topic(api: Api) -> Iterator[str]:
    """One that no other test has, and that is not left paused on the instance that all share."""
    name = f"topic.{secrets.token_hex(6)}"
    yield name
    api("DELETE", pause_of(name))


def token(service: Running, name: str, verbs: set[Verb], topic: str) -> str:
    return service.run(make(service.app, name, frozenset(verbs), (topic,)))[1].removeprefix("Bearer ")


def topics(api: Api) -> dict[str, Any]:
    return {one["topic"]: one for one in api.done("GET", "/v1/topics")["topics"]}


def test_pause_and_resume_say_what_changed(api: Api, topic: str) -> None:
    first = api.done("PUT", pause_of(topic))
    assert first == {"topic": topic, "paused": True, "changed": True, "since": first["since"], "who": "anonymous"}
    assert api.done("PUT", pause_of(topic)) == {**first, "changed": False}
    assert topics(api)[topic]["paused"] == {"since": first["since"], "who": "anonymous"}
    over = {"topic": topic, "paused": False, "changed": True, "since": None, "who": None}
    assert api.done("DELETE", pause_of(topic)) == over
    assert api.done("DELETE", pause_of(topic)) == {**over, "changed": False}
    assert topic not in topics(api)


def test_every_answer_about_a_live_task_says_so(api: Api, topic: str) -> None:
    def paused(reply: Any) -> bool:
        answer = reply.json
        assert answer.get("paused", True) is True
        return "paused" in answer

    api.dead(topic, "dead")
    assert not paused(api("PUT", at(topic, "before"), {"delay": "1h"}))
    api.done("PUT", pause_of(topic))
    assert paused(api("PUT", at(topic, "k"), {"delay": "1h", "group": topic}))
    assert paused(api("PUT", at(topic, "k"), {"delay": "1h", "group": topic, "on_conflict": "keep"}))
    assert paused(api("PUT", at(topic, "k"), {"delay": "1h"}, headers={"if-none-match": "*"})), "also one that is 412"
    assert paused(api("PATCH", at(topic, "k"), {"delay": "2h"}))
    assert not paused(api("PATCH", at(topic, "none"), {"delay": "2h"}))
    ref = {"topic": topic, "key": "k"}
    for path, ask in (
        ("schedule", [{**ref, "delay": "1h", "group": topic}]),
        ("reschedule", [{**ref, "delay": "2h"}]),
        ("fire", [ref]),
        ("redrive", [{"topic": topic, "key": "dead"}]),
        ("shift", {"group": topic, "by": "1h"}),
    ):
        [item] = api.done("POST", f"/v1/{path}", ask)
        assert item["paused"] is True, path
    other = {"topic": f"{topic}.other", "key": "k", "delay": "1h"}
    assert ["paused" in item for item in api.done("POST", "/v1/schedule", [{**ref, "delay": "1h"}, other])] == [
        True, False,
    ]  # fmt: skip
    assert not paused(api("DELETE", at(topic, "k"))), "it does not wait any more"
    assert "paused" not in api.done("GET", at(topic, "before"))
    api.done("DELETE", pause_of(topic))
    assert not paused(api("PUT", at(topic, "k"), {"delay": "1h"}))


def test_consumers_get_nothing_of_it_and_are_told(api: Api, topic: str) -> None:
    other = f"{topic}.other"
    api.done("PUT", pause_of(topic))
    api.put(topic, "k", delay="0s")
    api.put(other, "k", delay="0s")
    room = {"topics": {topic: 1, other: 1}}
    leased = api.done("POST", "/v1/lease", room)
    assert [task["topic"] for task in leased["tasks"]] == [other]
    assert leased["paused"] == [topic]
    assert api.done("POST", "/v1/lease", {"topics": {other: 1}}) == {"tasks": []}
    assert api.done("POST", "/v1/lease", {"topics": {topic: 1}}) == {"tasks": [], "paused": [topic]}
    api.done("DELETE", pause_of(topic))
    assert [task["key"] for task in api.lease(topic, wait="60s")] == ["k"]


def test_the_topics_and_their_counts(api: Api, topic: str) -> None:
    api.put(topic, "later")
    api.put(topic, "now", delay="0s")
    api.put(topic, "cancelled")
    api("DELETE", at(topic, "cancelled"))
    api.lease(topic)
    api.dead(topic, "dead")
    found = topics(api)[topic]
    assert api.done("GET", f"/v1/topics?topic={topic}") == {"topics": [found]}

    def count(number: int) -> dict[str, Any]:
        return {"number": number, "exact": True}

    assert found == {
        "topic": topic, "waiting": count(1), "leased": count(1), "done": count(0), "cancelled": count(1),
        "dead": count(1), "due": count(0), "paused": None,
    }  # fmt: skip
    assert api("GET", "/v1/topics?limit=7").status == 422


def test_paths_and_bodies_that_are_not_accepted(plain: Api) -> None:
    assert plain("PUT", pause_of("a/b ü")).json["topic"] == "a/b ü"
    assert plain("DELETE", pause_of("a/b ü")).json["changed"] is True
    assert plain("PUT", "/v1/topics//pause").status == 404
    assert plain("PUT", "/v1/topics/%0a/pause").status == 422
    assert plain("PUT", "/v1/topics/bide%3Asettings/pause").status in (403, 422)
    assert plain("PUT", "/v1/topics/%zz/pause").status == 422
    assert plain("PUT", pause_of("t"), {"for": "1h"}).json["field"] == "body"
    assert plain("GET", pause_of("t")).headers["allow"] == "DELETE, PUT"
    assert "PUT" not in plain("POST", "/v1/topics").headers["allow"]


def test_it_takes_the_verb_admin_and_looking_takes_read(caplog: pytest.LogCaptureFixture) -> None:
    with running("memory:") as service, ExitStack() as stack:

        def caller(name: str, verbs: set[Verb], topic: str = "*") -> Api:
            return stack.enter_context(closing(Api(service.url, token(service, name, verbs, topic))))

        admin = caller("boss", {Verb.ADMIN, Verb.READ}, "order.*")
        user, blind = caller("user", set(Verb) - {Verb.ADMIN}), caller("blind", {Verb.SCHEDULE, Verb.ADMIN})
        caplog.set_level(logging.INFO, "bide.audit")
        assert user("PUT", pause_of("order.close")).status == 403
        assert admin("PUT", pause_of("mail")).status == 403
        assert admin.done("PUT", pause_of("order.close"))["who"] == "boss"
        blind.done("PUT", pause_of("mail"))
        assert topics(admin).keys() == {"order.close"}, "what is of a topic is for those who may read it"
        assert topics(user).keys() == {"order.close", "mail"}
        assert blind("GET", "/v1/topics").status == 403
        assert blind.done("PUT", at("order.close", "k"), {"delay": "1h"})["paused"] is True
        admin.done("DELETE", pause_of("order.close"))
    lines = [record for record in caplog.records if getattr(record, "verb", None) in ("pause", "resume")]
    assert [record.message for record in lines if record.levelno == logging.INFO] == [
        "boss: pause order.close: paused", "blind: pause mail: paused", "boss: resume order.close: resumed",
    ]  # fmt: skip


def test_it_survives_a_restart(tmp_path: Any) -> None:
    url = f"sqlite:///{tmp_path}/tasks.db"
    with running(url) as service, closing(Api(service.url)) as api:
        api.done("PUT", pause_of("t"))
        api.put("t", "k", delay="0s")
    with running(url) as service, closing(Api(service.url)) as api:
        assert api.done("PUT", at("t", "more"), {"delay": "1h"})["paused"] is True, "it is known from the start"
        assert api.done("POST", "/v1/lease", {"topics": {"t": 1}}) == {"tasks": [], "paused": ["t"]}
        shown = api("GET", "/metrics").body.decode()
        assert 'bide_topic_paused{topic="t"} 1.0' in shown
        assert shown.count("bide_topic_paused{") == 1


# --- apps over the service


def test_an_app_over_the_service_pauses_and_is_held_back(service: Running, topic: str) -> None:
    async def story() -> None:
        app = Bide(service.url, actor="anna@shop")
        seen: list[str] = []

        @app.handler(topic)
        async def handle(task: Task[Any]) -> None:
            seen.append(task.key)

        async with app, app.worker() as worker:
            assert await app.pause(topic)
            assert not await app.pause(topic)
            assert (await app.paused())[topic].who == "anonymous/anna@shop"
            await app.schedule(topic, key="k", delay="0s")
            empty = asyncio.ensure_future(worker.until_empty())
            await pause(0.3, why="what is not held back would be delivered")
            assert seen == []
            assert not empty.done()
            assert await app.resume(topic)
            assert not await app.resume(topic)
            await empty
            assert seen == ["k"]
            assert topic not in await app.paused()
            with pytest.raises(BadInput):
                await app.pause("\n")

    asyncio.run(story())


class PausedMeanwhile(StoreFacade):
    """Pauses the topic while the store answers a lease."""

    gate: pauses.PauseGate

    async def lease(self, wants: Mapping[Topic, int], *, now: Millis, until: Millis, holder: str) -> Leased:
        leased = await super().lease(wants, now=now, until=until, holder=holder)
        await pauses.Pauses(self.inner, SystemClock()).pause("t", who=None)
        await self.gate.again()
        return leased


async def test_a_task_that_was_leased_as_its_topic_was_paused_is_given_back() -> None:
    store = PausedMeanwhile(MemoryStore())
    async with Bide(store) as app:
        await app.schedule("t", key="k", delay="0s")
        store.gate = pauses.PauseGate(store.inner, app.clock, lambda: None)
        operations = StoreOperations(app, trusting=True, pause_gate=store.gate)
        leased = await operations.lease(LeaseRequest({"t": 1}, 60_000, "w"), Caller("anna"), app.clock.now())
        assert leased.tasks == []
        task = await app.get("t", "k")
        assert task is not None
        assert (task.state, task.attempt) == ("waiting", 0)


def test_a_token_without_admin_is_refused_and_sees_its_own(tmp_path: Any) -> None:
    with running(f"sqlite:///{tmp_path}/tasks.db") as service:
        shown = token(service, "shop", {Verb.SCHEDULE}, "order.*")
        service.run(service.app.pause("order.close", who="anna"))
        service.run(service.app.pause("mail"))

        async def story() -> None:
            async with Bide(service.url, token=shown) as app:
                assert (await app.paused()).keys() == {"order.close"}
                with pytest.raises(SetupError, match=r"may not admin on topic 'order\.close'"):
                    await app.resume("order.close")

        asyncio.run(story())
