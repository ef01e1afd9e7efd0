"""Many tasks in one call, groups, lists: answers in order, nothing done when one item is wrong, pages to the end."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import pytest
from tests.service.calling import Api, Asked, Running, at, millis

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


def test_a_key_is_given_where_there_is_none(api: Api, topic: str) -> None:
    [one, other] = api.done("POST", "/v1/schedule", [{"topic": topic, "delay": "1h"}] * 2)
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


def test_redrive_after_a_while(api: Api, topic: str) -> None:
    api.dead(topic, "42")
    asked = Asked()
    [item] = api.done("POST", "/v1/redrive", [{"topic": topic, "key": "42", "delay": "1h"}])
    assert item["task"]["state"] == "waiting"
    asked.check(item["task"]["wake_at"], HOUR)


def test_each_item_has_its_own_condition(api: Api, topic: str) -> None:
    tokens = {key: api.put(topic, key)["token"] for key in ("a", "b")}
    asked = [{"topic": topic, "key": key, "if_token": tokens[key] - (key == "a")} for key in ("a", "b")]
    assert words(api.done("POST", "/v1/fire", asked)) == ["stale_token", "moved"]
    asked = [{**one, "if_token": one["if_token"] + (one["key"] == "a")} for one in asked]
    assert words(api.done("POST", "/v1/cancel", asked)) == ["cancelled", "stale_token"]


@pytest.mark.parametrize("call", ["schedule", "reschedule", "fire", "cancel", "redrive"])
def test_an_empty_batch_has_an_empty_answer(api: Api, call: str) -> None:
    assert api.done("POST", f"/v1/{call}", []) == []


MORE: dict[str, dict[str, Any]] = {
    "schedule": {"delay": "2h"}, "reschedule": {"delay": "2h"}, "settle": {"token": 1, "outcome": "done"},
}  # fmt: skip
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("schedule", {"delay": "soon"}, "[1].delay"),
    ("schedule", {}, "[1].at, delay"),
    ("schedule", {"delay": "1h", "group": ""}, "[1].group"),
    ("schedule", {"delay": "1h", "key": "a\n"}, "[1].key"),
    ("schedule", {"delay": "1h", "priority": 1}, "[1].priority"),
    ("schedule", {"delay": "1h", "retry": "often"}, "[1].retry"),
    ("schedule", {"delay": "1h", "payload_base64": "?"}, "[1].payload_base64"),
    ("schedule", {"delay": "1h", "key": 7}, "[1].key"),
    ("reschedule", {"delay": "soon"}, "[1].delay"),
    ("reschedule", {}, "[1].at, delay"),
    ("reschedule", {"delay": "1h", "key": ""}, "[1].key"),
    ("fire", {"key": ""}, "[1].key"),
    ("fire", {"if_token": "x"}, "[1].if_token"),
    ("cancel", {"key": "k" * 201}, "[1].key"),
    ("redrive", {"delay": "-1h"}, "[1].delay"),
]


@pytest.mark.parametrize(("call", "wrong", "field"), WRONG, ids=str)
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
        assert millis(api.get(topic, key)["wake_at"]) == millis(task["wake_at"]) - HOUR // 2
    assert api.get(f"{topic}.more", "c") == elsewhere
    items = api.done("POST", "/v1/shift", {"group": group, "by": "90s"})
    assert sorted(words(items)) == ["moved", "moved", "moved", "under_way"]
    assert millis(api.get(f"{topic}.more", "c")["wake_at"]) == millis(elsewhere["wake_at"]) + 90_000


def test_shift_and_deadlines(api: Api, topic: str) -> None:
    api.put(topic, "a", group=topic, deadline="2h")
    assert words(api.done("POST", "/v1/shift", {"group": topic, "by": "3h"})) == ["refused"]
    assert words(api.done("POST", "/v1/shift", {"group": topic, "by": "3h", "deadlines": True})) == ["moved"]


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


@pytest.mark.parametrize(
    ("ask", "field"),
    [
        ({"group": "a"}, "body"),
        ({"by": "1h"}, "body"),
        ({"group": "", "by": "1h"}, "group"),
        ({"group": "a", "by": "soon"}, "by"),
        ({"group": "a", "by": 5}, "by"),
        ({"group": "a", "by": "1h", "deadlines": "yes"}, "deadlines"),
    ],
    ids=str,
)
def test_a_shift_that_cannot_be(plain: Api, ask: dict[str, Any], field: str) -> None:
    reply = plain("POST", "/v1/shift", ask)
    assert reply.status == 422
    assert reply.json["field"] == field


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


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("limit=0", "limit"),
        ("limit=1001", "limit"),
        ("limit=ten", "limit"),
        ("limit=-1", "limit"),
        ("limit=%D9%A3", "limit"),
        ("limit=99999999999999999999", "limit"),
        ("limit=", "limit"),
        ("state=asleep", "state"),
        ("state=", "state"),
        ("topic=", "topic"),
        ("topic=%00", "topic"),
        ("group=" + "g" * 201, "group"),
        ("wake_before=soon", "wake_before"),
        ("wake_before=2031-01-01", "wake_before"),
        ("wake_from=1700000000", "wake_from"),
        ("cursor=x", "cursor"),
        ("cursor=", "cursor"),
        ("cursor=AAAA", "cursor"),
        ("cursor=%C3%BC", "cursor"),
        ("page=2", "query"),
        ("topic=a&topic=b", "topic"),
        ("topic=%FF", "query"),
        ("topic=a%zz", "query"),
        ("topic", "query"),
        ("&&", "query"),
        ("limit=1&wake_before=2031-01-01T00:00:00+01:00", "wake_before"),
    ],
)
def test_a_query_that_cannot_be(api: Api, query: str, field: str) -> None:
    reply = api("GET", f"/v1/tasks?{query}")
    assert reply.status == 422, reply
    assert reply.json["field"] == field
    assert reply.json["accepted"]


def test_settings_of_bide_are_for_nobody(plain: Api, topic: str) -> None:
    before = plain.put(topic, "a")
    batch = [{"topic": topic, "key": "a"}, {"topic": "bide:settings", "key": "a"}]
    for call in ("schedule", "reschedule", "fire", "cancel", "redrive", "settle"):
        assert plain("POST", f"/v1/{call}", [{**one, **MORE.get(call, {})} for one in batch]).status == 403
    for path, ask in (
        ("/v1/shift", {"group": "a", "by": "1h", "topic": "bide:settings"}),
        ("/v1/cancel", {"group": "a", "topic": "bide:settings"}),
        ("/v1/lease", {"topics": {topic: 1, "bide:settings": 1}}),
        ("/v1/extend", {"leases": [{**one, "token": 1} for one in batch]}),
    ):
        assert plain("POST", path, ask).status in (403, 422)
    assert plain("GET", "/v1/tasks?topic=bide:settings").status == 403
    assert plain("GET", "/v1/events?topic=bide:settings").status == 403
    assert plain.get(topic, "a") == before


def test_a_list_shows_no_settings_of_bide(api: Api, service: Running) -> None:
    from bide.engine.settings_store import SettingsStore

    service.run(SettingsStore(service.app.store, service.app.clock).put_if_absent("a", b"b"))
    query = ""
    while True:
        page = api.done("GET", f"/v1/tasks?limit=1000{query}")
        assert "bide:settings" not in {task["topic"] for task in page["tasks"]}
        if page["cursor"] is None:
            break
        query = f"&cursor={quote(page['cursor'])}"
