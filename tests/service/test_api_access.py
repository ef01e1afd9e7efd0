"""Who may call what: each call needs its verb on its topic; and docs/security.md names tests that are there."""

from __future__ import annotations

import ast
import asyncio
import re
from collections.abc import Iterator
from contextlib import closing
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.service.calling import Api, Running, at, running
from tests.service.conftest import KEPT
from tests.service.console.browsing import Browser
from tests.service.test_access import make

from bide import Answer, Bide, Every
from bide.core.errors import PartlyFailed, SetupError
from bide.core.instants import In
from bide.core.names import RESERVED_TOPICS, new_id
from bide.core.options import encode_options
from bide.core.records import Cancel, Filter, Found, NewTask, OnConflict, OutcomeKind, Page, Ref, Settlement
from bide.service import server
from bide.service.access import ALL_VERBS, Refusals, Verb
from bide.service.contract import CALLS
from bide.stores.http import HttpStore
from bide.stores.memory import MemoryStore

MINE, OTHERS = "order.close", "mail.send"
REF = {"topic": MINE, "key": "42"}
OTHER = {"topic": OTHERS, "key": "42"}


def lease(*topics: str) -> dict[str, Any]:
    return {"topics": dict.fromkeys(topics, 1)}


NEEDS: list[tuple[str, Verb, str, str, Any]] = [
    ("schedule", Verb.SCHEDULE, "PUT", at(MINE, "42"), {"delay": "1h"}),
    ("get", Verb.READ, "GET", at(MINE, "42"), None),
    ("reschedule", Verb.RESCHEDULE, "PATCH", at(MINE, "42"), {"delay": "1h"}),
    ("cancel", Verb.CANCEL, "DELETE", at(MINE, "42"), None),
    ("schedule_many", Verb.SCHEDULE, "POST", "/v1/schedule", [{**REF, "delay": "1h"}]),
    ("reschedule_many", Verb.RESCHEDULE, "POST", "/v1/reschedule", [{**REF, "delay": "1h"}]),
    ("fire_many", Verb.FIRE, "POST", "/v1/fire", [REF]),
    ("cancel_many", Verb.CANCEL, "POST", "/v1/cancel", [REF]),
    ("cancel_many", Verb.CANCEL, "POST", "/v1/cancel", {"group": "user-7", "topic": MINE}),
    ("redrive_many", Verb.REDRIVE, "POST", "/v1/redrive", [REF]),
    ("shift", Verb.SHIFT, "POST", "/v1/shift", {"group": "user-7", "topic": MINE, "by": "1h"}),
    ("recur", Verb.SCHEDULE, "PUT", f"/v1/topics/{MINE}/recurring/r", {"rule": "@daily"}),
    ("recurring", Verb.READ, "GET", f"/v1/topics/{MINE}/recurring/r", None),
    ("steer", Verb.RESCHEDULE, "POST", f"/v1/topics/{MINE}/recurring/r", {"do": "pause"}),
    ("steer", Verb.SCHEDULE, "POST", f"/v1/topics/{MINE}/recurring/r", {"do": "run_now"}),
    ("remove", Verb.CANCEL, "DELETE", f"/v1/topics/{MINE}/recurring/r", None),
    ("find_recurring", Verb.READ, "GET", f"/v1/recurring?topic={MINE}", None),
    ("find", Verb.READ, "GET", f"/v1/tasks?topic={MINE}", None),
    ("topics", Verb.READ, "GET", f"/v1/topics?topic={MINE}", None),
    ("pause", Verb.ADMIN, "PUT", f"/v1/topics/{MINE}/pause", None),
    ("resume", Verb.ADMIN, "DELETE", f"/v1/topics/{MINE}/pause", None),
    ("lease", Verb.WORK, "POST", "/v1/lease", lease(MINE)),
    ("settle", Verb.WORK, "POST", "/v1/settle", [{**REF, "token": 1, "outcome": "done"}]),
    ("extend", Verb.WORK, "POST", "/v1/extend", {"leases": [{**REF, "token": 1}]}),
    ("events", Verb.EVENTS, "HEAD", f"/v1/events?topic={MINE}", None),
]


class Door:
    """An instance that lets in whoever has a token, and the tokens."""

    def __init__(self, service: Running) -> None:
        self.service = service
        self.apis: dict[str, Api] = {}
        self.texts: dict[str, str] = {}
        verbs = {verb.value: frozenset({verb}) for verb in Verb}
        verbs |= {f"all but {verb}": ALL_VERBS - {verb} for verb in Verb}
        for name, given in verbs.items():
            self.apis[name] = self.make(name, given, "order.*")
        self.apis["all"] = self.make("all", ALL_VERBS, "*")

    def make(self, name: str, verbs: frozenset[Verb], topic: str) -> Api:
        _, header = self.service.run(make(self.service.app, name, verbs, (topic,)))
        self.texts[name] = header.removeprefix("Bearer ")
        return Api(self.service.url, self.texts[name])


@pytest.fixture(scope="module")
def door() -> Iterator[Door]:
    with running("memory:", **KEPT) as service:
        found = Door(service)
        yield found
        for api in found.apis.values():
            api.close()


def test_every_call_is_here() -> None:
    assert {name for name, *_ in NEEDS} == {call.name for call in CALLS}


@pytest.mark.parametrize(("name", "verb", "method", "path", "ask"), NEEDS, ids=str)
def test_each_call_needs_its_verb(door: Door, name: str, verb: Verb, method: str, path: str, ask: Any) -> None:
    """And its topic, and a token."""
    assert door.apis[verb.value](method, path, ask).status in (200, 201, 404, 409)
    reply = door.apis[f"all but {verb}"](method, path, ask)
    assert reply.status == 403
    assert reply.headers["www-authenticate"].startswith('Bearer realm="bide", error="insufficient_scope"')

    other = path.replace(MINE, OTHERS)
    asked = None if ask is None else eval(repr(ask).replace(MINE, OTHERS))
    assert door.apis[verb.value](method, other, asked).status == 403
    assert door.apis["all"](method, other, asked).status in (200, 201, 404, 409)

    for token in (None, "bide_00000000_" + "A" * 43, "nonsense"):
        with closing(Api(door.service.url, token)) as api:
            reply = api(method, path, ask)
        assert reply.status == 401
        assert reply.headers["www-authenticate"].startswith('Bearer realm="bide"')
        assert ("invalid_token" in reply.headers["www-authenticate"]) is (token is not None)


def test_over_all_topics_needs_all_topics(door: Door) -> None:
    for verb, method, path, ask in (
        ("read", "GET", "/v1/tasks", None),
        ("read", "GET", "/v1/tasks?group=user-7", None),
        ("cancel", "POST", "/v1/cancel", {"group": "user-7"}),
        ("shift", "POST", "/v1/shift", {"group": "user-7", "by": "1h"}),
        ("events", "HEAD", "/v1/events", None),
        ("metrics", "GET", "/metrics", None),
    ):
        assert door.apis[verb](method, path, ask).status == 403
        assert door.apis["all"](method, path, ask).status == 200


def test_a_batch_with_one_forbidden_topic_does_nothing(door: Door) -> None:
    everywhere = door.apis["all"]
    for topic in (MINE, OTHERS):
        everywhere.put(topic, "42")
    everywhere.dead(MINE, "dead")
    before = everywhere.done("GET", "/v1/tasks")
    delayed = [{**REF, "delay": "2h"}, {**OTHER, "delay": "2h"}]
    dead = [{**REF, "key": "dead"}, {**OTHER, "key": "dead"}]
    for verb, path, ask in (
        ("schedule", "/v1/schedule", delayed),
        ("reschedule", "/v1/reschedule", delayed),
        ("fire", "/v1/fire", [REF, OTHER]),
        ("cancel", "/v1/cancel", [REF, OTHER]),
        ("redrive", "/v1/redrive", dead),
        ("work", "/v1/lease", lease(MINE, OTHERS)),
        ("work", "/v1/settle", [{**one, "token": 1, "outcome": "done"} for one in (REF, OTHER)]),
        ("work", "/v1/extend", {"leases": [{**one, "token": 1} for one in (REF, OTHER)]}),
    ):
        reply = door.apis[verb]("POST", path, ask)
        assert reply.status == 403
        assert OTHERS in reply.json["detail"]
    assert everywhere.done("GET", "/v1/tasks") == before


def test_who_is_refused_learns_nothing_of_the_task(door: Door) -> None:
    door.apis["all"].put(OTHERS, "there", payload="secret")
    for key in ("there", "not there"):
        reply = door.apis["read"]("GET", at(OTHERS, key))
        assert reply.status == 403
        assert b"secret" not in reply.body
        assert "etag" not in reply.headers


def test_no_answer_shows_a_task_to_who_may_not_read_it(door: Door) -> None:
    """Whatever it answers, and of one task or of many."""
    everywhere, stale = door.apis["all"], {**REF, "key": "hidden", "if_token": 1}
    everywhere.dead(MINE, "hidden-dead")
    answers: list[str] = []
    for verb, method, path, ask, headers in (
        ("schedule", "PUT", at(MINE, "hidden"), {"delay": "1h"}, {"if-none-match": "*"}),
        ("schedule", "PUT", at(MINE, "hidden"), {"delay": "1h", "on_conflict": "keep"}, {}),
        ("schedule", "POST", "/v1/schedule", [{**REF, "key": "hidden", "delay": "1h", "on_conflict": "refuse"}], {}),
        ("reschedule", "PATCH", at(MINE, "hidden"), {"delay": "2h", "if_token": 1}, {}),
        ("reschedule", "POST", "/v1/reschedule", [{**stale, "delay": "1h"}], {}),
        ("fire", "POST", "/v1/fire", [stale], {}),
        ("redrive", "POST", "/v1/redrive", [stale], {}),
        ("shift", "POST", "/v1/shift", {"group": "hidden", "topic": MINE, "by": "1h"}, {}),
        ("cancel", "DELETE", at(MINE, "hidden"), None, {"if-match": '"1"'}),
        ("cancel", "POST", "/v1/cancel", [stale], {}),
        ("cancel", "POST", "/v1/cancel", {"group": "hidden", "topic": MINE}, {}),
        ("redrive", "POST", "/v1/redrive", [{**REF, "key": "hidden-dead"}], {}),
    ):
        everywhere.put(MINE, "hidden", payload="SECRET", group="hidden")
        reply = door.apis[verb](method, path, ask, headers=headers)
        [answer] = reply.json if isinstance(reply.json, list) else [reply.json]
        answers.append(answer["answer"])
        assert not {"payload", "payload_base64"} & answer["task"].keys(), answer
        assert answer["task"]["error"] is None
        assert b"SECRET" not in reply.body
    assert answers == ["refused", "kept", "refused"] + ["stale_token"] * 4 + [
        "moved", "stale_token", "stale_token", "cancelled", "redriven"
    ]  # fmt: skip
    assert door.apis["schedule"].put(MINE, "own", payload="mine")["payload"] == "mine", "they have just sent it"


def test_who_steers_a_rule_sees_the_payload_of_no_occurrence_without_read(door: Door) -> None:
    path = f"/v1/topics/{MINE}/recurring/hidden-rule"
    assert door.apis["all"]("PUT", path, {"rule": "@daily", "payload": "SECRET"}).json["answer"] == "created"
    day = {"since": "2030-01-01T00:00Z", "until": "2030-01-01T00:00Z"}
    for verb, ask, word in (
        ("schedule", {"do": "run_now"}, "created"),
        ("schedule", {"do": "backfill", **day}, "created"),
        ("reschedule", {"do": "pause"}, "replaced"),
        ("reschedule", {"do": "resume"}, "replaced"),
    ):
        reply = door.apis[verb]("POST", path, ask)
        assert [one["answer"] for one in reply.json] == [word]
        assert b"SECRET" not in reply.body
    reply = door.apis["schedule"]("PUT", path, {"rule": "@hourly", "payload": "mine"})
    assert reply.json["task"]["payload"] == "mine", "they have just sent it"


async def test_an_app_declares_no_rule_that_its_token_may_not_read(door: Door) -> None:
    async with Bide(door.service.url, token=door.texts["schedule"]) as app:
        with pytest.raises(SetupError, match="'schedule' may not read on topic"):
            await app.recurring.add(MINE, Every("1h"), key="declared")
        assert (await app.schedule(MINE, delay="1h", key="plain")).result == "created"


async def test_a_rule_that_is_refused_holds_back_no_other(door: Door) -> None:
    async with Bide(door.service.url, token=door.texts["all but admin"]) as app:
        new = app.recurring.new
        await app.recurring.add(MINE, Every("1h"), key="rule")
        with pytest.raises(PartlyFailed) as failed:
            await app.recurring.add_many([new(OTHERS, Every("2h")), new(MINE, Every("2h"), key="rule")])
        refused, answer = failed.value.answers
        assert "may not" in str(refused)
        assert isinstance(answer, Answer)
        assert answer.result == "replaced"
        makers = [partial(new, OTHERS, Every("3h")), partial(new, MINE, Every("3h"), key="rule")]
        left, [error] = await app.recurring.declare(dict.fromkeys(makers, False))
        assert left == {makers[0]: False}
        assert "may not" in str(error)
        assert [str(one.recurrence.rule.words) async for one in app.recurring.find(MINE)
                if one.key == "rule" and one.recurrence] == ["every 3h"]  # fmt: skip


async def test_no_answer_over_the_store_calls_does_either(door: Door) -> None:
    hidden = NewTask(
        MINE, "hidden-too", new_id(), In(3_600_000), b'"SECRET"', options=encode_options(None, {"a": "SECRET"})
    )
    stores = {name: HttpStore(door.service.url, token=door.texts[name]) for name in ("all", "schedule", "cancel")}
    for store in stores.values():
        await store.open()
    [made] = await stores["all"].add([hidden], now=0)
    [refused] = await stores["schedule"].add([replace(hidden, on_conflict=OnConflict.REFUSE)], now=0)
    others = [replace(hidden, key=str(place)) for place in range(2)]
    first = await stores["schedule"].add(others, now=0)
    again = await stores["schedule"].add([replace(one, on_conflict=OnConflict.KEEP) for one in others], now=0)
    await stores["all"].add([replace(hidden, key="failed", id=new_id(), due=In(0))], now=0)
    leased = await stores["all"].lease({MINE: 100}, now=0, until=60_000, holder="w")
    [token] = [one.token for one in leased.tasks if one.key == "failed"]
    wrong = Settlement(MINE, "failed", token, OutcomeKind.RETRY, In(0), error="SECRET\n\x1fSECRET")
    assert await stores["all"].settle([wrong], now=0) == [True]
    [seen] = await stores["all"].get([Ref(MINE, "failed")])
    assert seen is not None
    assert seen.error == wrong.error, "whoever may read it sees the trace as well"
    stale = await stores["cancel"].change([Cancel(MINE, key, 1) for key in ("hidden-too", "0", "failed")], now=0)
    for store in stores.values():
        await store.close()
    for answer in (made, *first):
        assert answer.record is not None
        assert answer.record.payload == hidden.payload
    for answer in (refused, *again, *stale):
        assert answer.record is not None
        assert (answer.record.payload, answer.record.options, answer.record.error) == (b"", b"", None)


async def test_a_refused_store_call_is_in_the_audit_log(
    door: Door, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "audit_refused", Refusals().note)  # with no refusals of other tests
    store = HttpStore(door.service.url, token=door.texts["schedule"])
    await store.open()
    with pytest.raises(SetupError):
        await store.change([Cancel(MINE, "42")], now=0)
    tasks = [NewTask(topic, "refused", new_id(), In(3_600_000), b"") for topic in (MINE, OTHERS)]
    with pytest.raises(PartlyFailed):
        await store.add(tasks, now=0)
    await store.close()
    found = [record for record in caplog.records if record.name == "bide.audit" and vars(record)["who"] == "schedule"]
    assert [(vars(one)["verb"], vars(one)["topic"]) for one in found if vars(one)["answer"] == "forbidden"] == [
        ("cancel", MINE), ("schedule", OTHERS),
    ]  # fmt: skip


class Leaky(MemoryStore):
    """Finds more than it was asked for, as one does that goes by a made-up cursor."""

    async def find(self, where: Filter, page: Page) -> Found:
        return await super().find(where if where.topic in RESERVED_TOPICS else Filter(state=where.state), page)


def test_what_a_store_finds_too_much_goes_to_nobody() -> None:
    with running(Leaky(), **KEPT) as service:
        door = Door(service)
        for topic in (MINE, OTHERS):
            door.apis["all"].dead(topic, f"dead-{topic}")
            door.apis["all"].put(topic, f"key-{topic}", group="user-7")
        reader = door.apis["read"]
        pages = [reader("GET", f"/v1/tasks?topic={MINE}{more}").body for more in ("", "&group=user-7", "&state=dead")]
        with closing(Browser(service.url)) as browser:
            browser.log_in(door.texts["read"])
            shown = (f"/tasks?topic={MINE}", "/tasks", f"/dead?topic={MINE}&list=yes")
            pages += [browser.open(path).body for path in shown]

        async def found() -> bytes:
            store = HttpStore(service.url, token=door.texts["read"])
            await store.open()
            page = await store.find(Filter(topic=MINE), Page(limit=100))
            await store.close()
            return repr(page).encode()

        pages.append(asyncio.run(found()))
        for api in door.apis.values():
            api.close()
    for page in pages:
        assert f"-{MINE}".encode() in page
        assert OTHERS.encode() not in page


def test_what_is_for_everybody(door: Door) -> None:
    with closing(Api(door.service.url)) as api:
        for path in ("/healthz", "/readyz", "/openapi.json"):
            assert api("GET", path).status == 200
            assert {"GET", "HEAD"} <= set(api("PROPFIND", path).headers["allow"].split(", "))
        assert api("GET", "/metrics").status == 401
        assert api("GET", "/none").status == 404


def test_who_it_was_stands_in_the_log(door: Door) -> None:
    door.apis["all"].put(MINE, "logged")
    door.apis["reschedule"].done("PATCH", at(MINE, "logged"), {"delay": "2h"})
    [event] = door.service.run(door.service.app.events(MINE, "logged"))
    assert (event.who, event.what) == ("reschedule", "reschedule: moved")


def rows(root: Path) -> list[tuple[str, str, str]]:
    """Each attack, what happens, and the test that tries it."""
    text = (root / "docs" / "security.md").read_text(encoding="utf-8").partition("<!-- attacks:")[2]
    return re.findall(r"^\| (.+?) \| (.+?) \| `(.+?)` \|$", text, re.MULTILINE)


@cache
def functions_of(path: Path) -> set[str]:
    """The functions of a module, and the methods of its classes as `Class::method`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {
        f"{outer.name}::{node.name}" if isinstance(outer, ast.ClassDef) else node.name
        for outer in (tree, *tree.body)
        if isinstance(outer, ast.Module | ast.ClassDef)
        for node in outer.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def test_every_attack_names_a_test_that_is_there(root: Path) -> None:
    found = rows(root)
    assert len(found) >= 18
    lines = (root / "docs" / "security.md").read_text(encoding="utf-8").partition("<!-- attacks:")[2].splitlines()
    assert len(found) == sum(line.startswith("| ") for line in lines) - 1, "a row that is not one of three cells"
    for attack, _, test in found:
        path, _, name = test.partition("::")
        names = functions_of(root / path)
        assert not name or name in names, f"{attack}: {test}"
        assert any("test_" in one for one in names), f"{attack}: {test} has no tests"
