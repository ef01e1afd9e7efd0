"""One task by its path: every verb and answer, conditions, payloads, times; and what is refused as RFC 9457 says."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
from tests.service.calling import Api, Asked, Running, at, millis
from tests.waiting import PATIENCE, not_before

from bide.service import requests
from bide.service.contract import CALLS
from bide.service.requests import Routes

HOUR = 3_600_000

# --- every verb and every answer


def test_schedule_creates_and_replaces(api: Api, topic: str) -> None:
    first = api("PUT", at(topic, "42"), {"delay": "1h", "payload": {"number": 42}, "group": "user-7"})
    assert first.answer == (201, "created")
    assert first.headers["etag"] == f'"{first.task["token"]}"'
    second = api("PUT", at(topic, "42"), {"delay": "2h"})
    assert second.answer == (200, "replaced")
    assert second.task["token"] > first.task["token"]
    assert second.task["id"] != first.task["id"]


def test_a_task_shows_all_of_its_fields(api: Api, topic: str) -> None:
    asked = Asked()
    api.put(topic, "42", delay="1h", payload={"number": 42}, group="user-7")
    task = api.get(topic, "42")
    asked.check(task.pop("created_at"), 0)
    asked.check(task["due_at"], HOUR)
    assert task.pop("due_at") == task.pop("wake_at")
    assert len(task.pop("id")) == 36
    assert task.pop("token") > 0
    assert task == {
        "topic": topic, "key": "42", "group": "user-7", "state": "waiting", "attempt": 0, "payload": {"number": 42},
        "error": None, "finished_at": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("on_conflict", "delay", "status", "answer"),
    [
        ("replace", "2h", 200, "replaced"),
        ("keep", "2h", 200, "kept"),
        ("earliest", "2h", 200, "kept"),
        ("earliest", "10m", 200, "replaced"),
        ("latest", "2h", 200, "replaced"),
        ("latest", "10m", 200, "kept"),
        ("refuse", "2h", 409, "refused"),
    ],
)
def test_what_happens_to_a_key_that_is_taken(
    api: Api, topic: str, on_conflict: str, delay: str, status: int, answer: str
) -> None:
    before = api.put(topic, "42")
    reply = api("PUT", at(topic, "42"), {"delay": delay, "on_conflict": on_conflict})
    assert reply.answer == (status, answer)
    assert (reply.task["token"] == before["token"]) is (answer != "replaced")


def test_reschedule_moves(api: Api, topic: str) -> None:
    before = api.put(topic, "42")
    asked = Asked()
    reply = api("PATCH", at(topic, "42"), {"delay": "3h"})
    assert reply.answer == (200, "moved")
    asked.check(reply.task["wake_at"], 3 * HOUR)
    assert reply.headers["etag"] == f'"{reply.task["token"]}"' != f'"{before["token"]}"'
    exact = api("PATCH", at(topic, "42"), {"at": "2030-01-31T08:00:00.125+01:00"})
    assert exact.task["due_at"] == exact.task["wake_at"] == "2030-01-31T07:00:00.125Z"


def test_cancel(api: Api, topic: str) -> None:
    api.put(topic, "42")
    reply = api("DELETE", at(topic, "42"))
    assert reply.answer == (200, "cancelled")
    assert reply.task["state"] == "cancelled"
    assert reply.task["finished_at"] is not None
    again = api("DELETE", at(topic, "42"))
    assert again.answer == (409, "finished")
    assert again.task["state"] == "cancelled"
    assert api("PATCH", at(topic, "42"), {"delay": "1h"}).answer == (409, "finished")


def test_what_is_not_there(api: Api, topic: str) -> None:
    for reply in (
        api("GET", at(topic, "42")),
        api("PATCH", at(topic, "42"), {"delay": "1h"}),
        api("DELETE", at(topic, "42")),
    ):
        assert reply.answer == (404, "not_found")
        assert reply.task is None
        assert "etag" not in reply.headers


def test_what_is_being_delivered_is_not_moved_and_can_be_cancelled(api: Api, topic: str) -> None:
    api.put(topic, "42", delay="0s")
    [task] = api.lease(topic)
    assert api("PATCH", at(topic, "42"), {"delay": "1h"}).answer == (409, "under_way")
    kept = api("PUT", at(topic, "42"), {"delay": "1h", "on_conflict": "keep"})
    assert kept.answer == (200, "kept")
    assert kept.task["state"] == "leased"
    assert api("DELETE", at(topic, "42")).answer == (200, "cancelled_while_leased")
    assert not api.settle(task, "done")


def test_what_is_done_stays_for_a_while(api: Api, topic: str) -> None:
    api.put(topic, "42", delay="0s")
    [task] = api.lease(topic)
    assert api.settle(task, "done")
    done = api.get(topic, "42")
    assert done["state"] == "done"
    assert api("PUT", at(topic, "42"), {"delay": "1h", "on_conflict": "keep"}).answer == (200, "kept")
    assert api("DELETE", at(topic, "42")).answer == (409, "finished")
    assert api("PUT", at(topic, "42"), {"delay": "1h"}).answer == (200, "replaced")


# --- conditions


def test_put_only_if_it_is_new(api: Api, topic: str) -> None:
    only_new = {"if-none-match": "*"}
    assert api("PUT", at(topic, "42"), {"delay": "1h"}, headers=only_new).answer == (201, "created")
    before = api.get(topic, "42")
    reply = api("PUT", at(topic, "42"), {"delay": "2h"}, headers=only_new)
    assert reply.answer == (412, "refused")
    assert reply.task == before == api.get(topic, "42")


@pytest.mark.parametrize("headers", [{"if-none-match": '"7"'}, {"if-match": '"7"'}, {"if-match": "*"}])
def test_put_takes_no_other_condition(plain: Api, topic: str, headers: dict[str, str]) -> None:
    reply = plain("PUT", at(topic, "42"), {"delay": "1h"}, headers=headers)
    assert reply.status == 422
    assert reply.json["field"] in headers
    assert plain.get(topic, "42") is None


def test_get_only_if_it_has_changed(api: Api, topic: str) -> None:
    api.put(topic, "42")
    tag = api("GET", at(topic, "42")).headers["etag"]
    same = api("GET", at(topic, "42"), headers={"if-none-match": tag})
    assert (same.status, same.body, same.headers["etag"]) == (304, b"", tag)
    api.done("PATCH", at(topic, "42"), {"delay": "2h"})
    assert api("GET", at(topic, "42"), headers={"if-none-match": tag}).status == 200


@pytest.mark.parametrize("form", ["*", " * ", "W/{}", '"1", {}', 'W/"1",W/{}', " {} "])
def test_what_was_seen_may_be_written_in_each_of_the_standards_ways(plain: Api, topic: str, form: str) -> None:
    plain.put(topic, "42")
    tag = plain("GET", at(topic, "42")).headers["etag"]
    assert plain("GET", at(topic, "42"), headers={"if-none-match": form.format(tag)}).status == 304
    other = f'"{int(tag[1:-1]) + 1}"'
    assert plain("GET", at(topic, "42"), headers={"if-none-match": f'W/{other}, "x", {tag[:-2]}"'}).status == 200


@pytest.mark.parametrize("method", ["PATCH", "DELETE"])
def test_change_only_what_was_seen(api: Api, topic: str, method: str) -> None:
    ask = {"delay": "2h"} if method == "PATCH" else None
    task = api.put(topic, "42")
    old = f'"{task["token"] - 1}"'
    reply = api(method, at(topic, "42"), ask, headers={"if-match": old})
    assert reply.answer == (412, "stale_token")
    assert reply.task == task == api.get(topic, "42")
    assert api(method, at(topic, "42"), ask, headers={"if-match": f'"{task["token"]}"'}).status == 200


def test_the_token_may_stand_in_the_body(api: Api, topic: str) -> None:
    task = api.put(topic, "42")
    stale = api("PATCH", at(topic, "42"), {"delay": "2h", "if_token": task["token"] - 1})
    assert stale.answer == (409, "stale_token")
    both = {"if-match": f'"{task["token"] - 1}"'}
    unmet = api("PATCH", at(topic, "42"), {"delay": "2h", "if_token": task["token"]}, headers=both)
    assert unmet.answer == (412, "stale_token")
    for other in (0, 1, 2**53, 2**60, 2**63 - 1):
        stale = api("PATCH", at(topic, "42"), {"delay": "2h", "if_token": other})
        assert stale.answer == (409, "stale_token"), other
    assert api("PATCH", at(topic, "42"), {"delay": "2h", "if_token": task["token"]}).answer == (200, "moved")


def test_schedule_only_over_what_was_seen(api: Api, topic: str) -> None:
    task = api.put(topic, "42")
    for other in (0, task["token"] - 1, 2**63 - 1):
        stale = api("PUT", at(topic, "42"), {"delay": "2h", "if_token": other})
        assert stale.answer == (409, "stale_token")
        assert stale.task == task == api.get(topic, "42")
    assert api("PUT", at(topic, "42"), {"delay": "2h", "if_token": 2**63}).status == 422
    over = api("PUT", at(topic, "42"), {"delay": "2h", "if_token": task["token"]})
    assert over.answer == (200, "replaced")
    items = [{"topic": topic, "key": key, "delay": "3h", "if_token": task["token"]} for key in ("42", "new")]
    assert [one["answer"] for one in api("POST", "/v1/schedule", items).json] == ["stale_token", "created"]
    assert api.get(topic, "42") == over.task


@pytest.mark.parametrize("tag", ['"x"', 'W/"7"', '"7", "8"', '"99999999999999999999"', '"٣"', ""])
def test_a_condition_that_names_no_tag_of_the_task_does_not_hold(plain: Api, topic: str, tag: str) -> None:
    task = plain.put(topic, "42")
    reply = plain("DELETE", at(topic, "42"), headers={"if-match": tag.encode().decode("latin-1")})
    assert reply.answer == (412, "stale_token")
    assert plain.get(topic, "42") == task


@pytest.mark.parametrize("form", ['W/"{}"', '"7", "{}"', '"7", W/"{}", "x,y"', "{}"])
def test_a_condition_may_be_weak_or_a_list(plain: Api, topic: str, form: str) -> None:
    token = plain.put(topic, "42")["token"]
    headers = {"if-match": form.format(token)}
    assert plain("PATCH", at(topic, "42"), {"delay": "2h"}, headers=headers).answer == (200, "moved")
    assert plain("PATCH", at(topic, "42"), {"delay": "2h"}, headers=headers).answer == (412, "stale_token")
    assert plain("DELETE", at(topic, "none"), headers=headers).answer == (412, "not_found")
    assert plain("DELETE", at(topic, "none"), headers={"if-match": "*"}).answer == (412, "not_found")


def test_any_token_will_do(api: Api, topic: str) -> None:
    api.put(topic, "42")
    assert api("DELETE", at(topic, "42"), headers={"if-match": "*"}).answer == (200, "cancelled")


# --- names

KEYS = ["a/b", "a:b", "a?b=c", "%", "%2F", "..", ".", "a b", "a+b", "a&b", "#", "ü€𝄞", "e\u0301", "k" * 200, "ü" * 100,
        "{key}", "\\", '"', "'; DROP TABLE bide_task; --", "*", "\u202e", "/", "//", "tasks"]  # fmt: skip


def test_keys_are_what_was_sent(api: Api, topic: str) -> None:
    for key in KEYS:
        assert api("PUT", at(topic, key), {"delay": "1h"}).answer == (201, "created"), key
        assert api.get(topic, key)["key"] == key
    found = api.done("GET", f"/v1/tasks?topic={topic}")["tasks"]
    assert {task["key"] for task in found} == set(KEYS)
    for key in KEYS:
        assert api("DELETE", at(topic, key)).answer == (200, "cancelled"), key


def test_topics_and_groups_are_what_was_sent(api: Api, topic: str) -> None:
    for name in ("a/b", "a:b", "%", "..", "ü€𝄞", "{topic}"):
        full = group = f"{topic}{name}"
        api.put(full, "42", group=group)
        [found] = api.done("GET", f"/v1/tasks?group={quote(group, safe='')}")["tasks"]
        assert (found["topic"], found["group"]) == (full, group)


def test_keys_with_more_or_fewer_letters_encoded_are_the_same(plain: Api, topic: str) -> None:
    plain.put(topic, "a.b~c")
    assert plain("GET", f"/v1/topics/{topic}/tasks/%61%2Eb%7ec").status == 200


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/topics/{}/tasks/" + "k" * 201, "key"),
        ("/v1/topics/{}/tasks/" + "%C3%BC" * 101, "key"),
        ("/v1/topics/{}/tasks/%00", "key"),
        ("/v1/topics/{}/tasks/a%0Ab", "key"),
        ("/v1/topics/{}/tasks/a%E2%80%A8b", "key"),
        ("/v1/topics/{}/tasks/%FF", "key"),
        ("/v1/topics/{}/tasks/%ED%A0%80", "key"),
        ("/v1/topics/{}/tasks/%C0%AF", "key"),
        ("/v1/topics/{}/tasks/a%zz", "key"),
        ("/v1/topics/{}/tasks/a%", "key"),
        ("/v1/topics/{}/tasks/a%4", "key"),
        ("/v1/topics/%FF{}/tasks/a", "topic"),
        ("/v1/topics/%0D%0A{}/tasks/a", "topic"),
    ],
)
def test_names_that_cannot_be(plain: Api, topic: str, path: str, field: str) -> None:
    for method, ask in (("PUT", {"delay": "1h"}), ("GET", None), ("PATCH", {"delay": "1h"}), ("DELETE", None)):
        reply = plain(method, path.format(topic), ask)
        assert reply.status == 422
        assert reply.json["field"] == field
        assert reply.json["accepted"]


def test_the_topic_of_settings_is_nobodys(plain: Api) -> None:
    for method, ask in (("PUT", {"delay": "1h"}), ("GET", None), ("PATCH", {"delay": "1h"}), ("DELETE", None)):
        assert plain(method, at("bide:settings", "a"), ask).status == 422


# --- payloads

PAYLOADS = [
    "null", "true", "0", "-0", "1.0", "1e2", "1E+2", "123456789012345678901234567890", "0.1000000000000000055511151231",
    "1e400", "-9223372036854775809", '""', '"ü€𝄞"', r'"\u00fc\ud834\udd1e\/"', "[]", "{}", "[1,  2,\n\t3 ]",
    '{"b": 1, "a": 2, "b": 3}', '{"a": {"a": {"a": [[[[[{"a": null}]]]]]}}}', '"' + "x" * 10_000 + '"',
]  # fmt: skip


def test_json_is_kept_byte_for_byte(api: Api, topic: str) -> None:
    for payload in PAYLOADS:
        reply = api("PUT", at(topic, "42"), body=f'{{"delay": "0s", "payload":  {payload} }}'.encode())
        written = f'"payload":{payload},'.encode()
        assert written in reply.body
        assert written in api("GET", at(topic, "42")).body
        assert written in api("POST", "/v1/lease", {"topics": {topic: 1}}).body


def test_bytes_are_kept_as_they_are(api: Api, topic: str) -> None:
    for payload in (b"\x00\xff", b"", b"no JSON", b'"\xff"', b"\xff\xfe", bytes(range(256)) * 40):
        encoded = base64.b64encode(payload).decode()
        api.put(topic, "42", payload_base64=encoded)
        task = api.get(topic, "42")
        assert task["payload_base64"] == encoded
        assert "payload" not in task


def test_bytes_that_are_json_are_shown_as_such(api: Api, topic: str) -> None:
    api.put(topic, "42", payload_base64=base64.b64encode(b'{"a": 1}').decode())
    assert api.get(topic, "42")["payload"] == {"a": 1}


def test_without_a_payload_it_is_null(api: Api, topic: str) -> None:
    api.put(topic, "42")
    task = api.get(topic, "42")
    assert "payload" in task
    assert task["payload"] is None


def test_a_payload_nested_as_deep_as_it_may(plain: Api, topic: str) -> None:
    reply = plain("PUT", at(topic, "42"), body=b'{"delay": "1h", "payload": %b}' % (b"[" * 200 + b"]" * 200))
    assert reply.status == 201
    assert plain("GET", at(topic, "42")).body.count(b"[") == 200


# --- when


@pytest.mark.parametrize(
    ("delay", "length"),
    [("15m", 900_000), ("1h30m", 5_400_000), ("PT15M", 900_000), ("250ms", 250), ("2d", 48 * HOUR), ("0s", 0),
     ("1.5s", 1_500)],
)  # fmt: skip
def test_a_delay_is_text(plain: Api, topic: str, delay: Any, length: int) -> None:
    asked = Asked()
    asked.check(plain.put(topic, "42", delay=delay)["due_at"], length)


@pytest.mark.parametrize("delay", [5, 0.5])
def test_a_bare_number_is_no_length_as_in_python(plain: Api, topic: str, delay: float) -> None:
    reply = plain("PUT", at(topic, "42"), {"delay": delay})
    assert (reply.status, reply.json["field"]) == (422, "delay")
    assert "15m" in reply.json["accepted"]


def test_an_instant_has_its_offset(api: Api, topic: str) -> None:
    reply = api("PUT", at(topic, "42"), {"at": "2030-01-31T08:00:00+01:00"})
    assert reply.task["due_at"] == "2030-01-31T07:00:00.000Z"
    past = api("PUT", at(topic, "43"), {"at": "2001-01-01T00:00:00Z"})
    assert past.task["due_at"] == "2001-01-01T00:00:00.000Z"
    assert millis(past.task["wake_at"]) > millis(past.task["due_at"])


@pytest.mark.parametrize(
    ("ask", "field"),
    [
        ({}, "delay"),
        ({"delay": "1h", "at": "2030-01-31T08:00:00Z"}, "delay"),
        ({"delay": None}, "delay"),
        ({"delay": "soon"}, "delay"),
        ({"delay": "-1h"}, "delay"),
        ({"delay": "-1s"}, "delay"),
        ({"delay": 5}, "delay"),
        ({"delay": True}, "delay"),
        ({"delay": []}, "delay"),
        ({"delay": ""}, "delay"),
        ({"delay": "90000000d"}, "delay"),
        ({"at": "2030-01-31T08:00:00"}, "at"),
        ({"at": "2030-02-31T08:00:00Z"}, "at"),
        ({"at": "1969-01-01T00:00:00Z"}, "at"),
        ({"at": 1700000000}, "at"),
        ({"at": "9999-12-31T23:59:59-12:00"}, "at"),
        ({"delay": "1h", "group": ""}, "group"),
        ({"delay": "1h", "group": "g" * 201}, "group"),
        ({"delay": "1h", "group": "a\nb"}, "group"),
        ({"delay": "1h", "group": 7}, "group"),
        ({"delay": "1h", "on_conflict": "merge"}, "on_conflict"),
        ({"delay": "1h", "deadline": "10m"}, "deadline"),
        ({"delay": "1h", "deadline": "2001-01-01T00:00:00Z"}, "deadline"),
        ({"delay": "1h", "retry": "often"}, "retry"),
        ({"delay": "1h", "retry": []}, "retry"),
        ({"delay": "1h", "retry": ["1s", "soon"]}, "rungs[1]"),
        ({"delay": "1h", "retry": {"policy": "fixed", "pause": "1s"}}, "retry"),
        ({"delay": "1h", "retry": {"policy": "fixed", "pause": "1s", "tries": 0}}, "retry"),
        ({"delay": "1h", "retry": {"policy": "cubic"}}, "retry"),
        ({"delay": "1h", "retry": {"policy": "exponential", "jitter": 2}}, "retry"),
        ({"delay": "1h", "headers": {"a": "b\nc"}}, "headers"),
        ({"delay": "1h", "headers": {"": "b"}}, "headers"),
        ({"delay": "1h", "headers": {"a": 1}}, "headers"),
        ({"delay": "1h", "headers": {f"h{n}": "x" * 60 for n in range(100)}}, "headers"),
        ({"delay": "1h", "payload": 1, "payload_base64": "MQ=="}, "payload"),
        ({"delay": "1h", "payload_base64": "no base64"}, "payload_base64"),
        ({"delay": "1h", "payload_base64": "MQ"}, "payload_base64"),
        ({"delay": "1h", "payload_base64": 1}, "payload_base64"),
        ({"delay": "1h", "priority": 1}, "priority"),
        ([], "body"),
        ("text", "body"),
        (17, "body"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_wrong_is_named(plain: Api, topic: str, ask: Any, field: str) -> None:
    reply = plain("PUT", at(topic, "42"), ask)
    assert reply.status == 422
    assert reply.json["field"].startswith((field, f"at, {field}"))
    assert reply.json["accepted"]
    assert plain.get(topic, "42") is None


def test_a_payload_may_be_so_large_and_no_larger(api: Api, topic: str, service: Running) -> None:
    largest = "x" * (service.app.config.payload_limit - 2)
    assert api.put(topic, "42", payload=largest)["payload"] == largest
    reply = api("PUT", at(topic, "43"), {"delay": "1h", "payload": largest + "x"})
    assert reply.status == 422
    assert reply.json["field"] == "payload"


# --- policies, deadlines, headers

RETRIES = [
    ("never", []),
    (["20m", "90s"], [20 * 60, 90]),
    ({"policy": "ladder", "rungs": ["20m", "90s"]}, [20 * 60, 90]),
    ({"policy": "fixed", "pause": "600s", "tries": 3}, [600, 600]),
    ({"policy": "exponential", "first": "10m", "factor": 3, "tries": 3, "jitter": 0}, [600, 1800]),
]  # fmt: skip


@pytest.mark.parametrize(("retry", "pauses"), RETRIES, ids=str)
def test_a_policy_travels_with_the_task(api: Api, topic: str, retry: Any, pauses: list[int]) -> None:
    api.put(topic, "42", delay="0s", retry=retry)
    for attempt, pause in enumerate(pauses, 1):
        [task] = api.lease(topic)
        assert task["attempt"] == attempt
        asked = Asked()
        assert api.settle(task, "retry", error="out of paper")
        found = api.get(topic, "42")
        assert (found["state"], found["error"], found["id"]) == ("waiting", "out of paper", task["id"])
        asked.check(found["wake_at"], 1000 * pause)
        assert found["due_at"] == task["due_at"]
        api.done("POST", "/v1/fire", [{"topic": topic, "key": "42"}])
    [task] = api.lease(topic)
    assert api.settle(task, "retry", error="out of paper")
    found = api.get(topic, "42")
    assert (found["state"], found["error"]) == ("dead", "out of paper")


def test_a_deadline_kills_what_would_come_after_it(api: Api, topic: str) -> None:
    api.put(topic, "42", delay="0s", deadline="10m", retry=["20m"])
    [task] = api.lease(topic)
    assert api.settle(task, "retry", error="out of paper")
    dead = api.get(topic, "42")
    assert dead["state"] == "dead"
    assert dead["error"].startswith("deadline")
    api.put(topic, "43", delay="1m", deadline="10m")
    assert api("PATCH", at(topic, "43"), {"delay": "20m"}).answer == (409, "refused")
    assert api("PATCH", at(topic, "43"), {"delay": "20m", "deadline": "30m"}).answer == (200, "moved")


def test_headers_travel_with_the_task(api: Api, topic: str, service: Running) -> None:
    api.put(topic, "42", headers={"webhook": "https://shop.example/hooks", "x-trace": "ü"})
    task = service.run(service.app.get(topic, "42"))
    assert task is not None
    assert task.headers == {"webhook": "https://shop.example/hooks", "x-trace": "ü"}


def test_a_body_goes_with_no_delete(plain: Api, topic: str) -> None:
    task = plain.put(topic, "42")
    assert plain("DELETE", at(topic, "42"), {"if_token": task["token"]}).status == 422
    assert plain.get(topic, "42") == task


def test_answers_are_compact_json(plain: Api, topic: str) -> None:
    reply = plain("PUT", at(topic, "42"), {"delay": "1h"})
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert reply.body == json.dumps(reply.json, separators=(",", ":")).encode()


# --- paths and methods


@pytest.mark.parametrize(
    "path",
    ["/v1", "/v1/", "/v2/tasks", "/v1/tasks/", "/v1/Tasks", "//v1/tasks", "/v1/topics/a/tasks", "/v1/topics/a/tasks/",
     "/v1/topics//tasks/a", "/v1/topics/a/tasks/b/c", "/v1/topics/a/tasks/b/", "/v1/topics/a/task/b", "/v1/%74asks",
     "/%2e%2e/v1/tasks", "/v1/../v1/tasks", "/favicon.ico", "/v1/schedule/"],
)  # fmt: skip
def test_there_is_no_such_call(plain: Api, path: str) -> None:
    for method in ("GET", "POST", "PUT", "HEAD"):
        reply = plain(method, path, {} if method in ("POST", "PUT") else None)
        assert reply.status == 404
        assert reply.headers["content-type"] == "application/problem+json"


def test_every_path_says_its_methods(plain: Api) -> None:
    methods: dict[str, set[str]] = {}
    for call in CALLS:
        methods.setdefault(call.path, set()).add(call.method)
    for path, allowed in methods.items():
        for method in {"GET", "PUT", "POST", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND"} - allowed:
            reply = plain(method, path.format(topic="a", key="b"))
            assert reply.status == 405
            assert allowed <= set(reply.headers["allow"].split(", ")) <= {*allowed, "HEAD"}
            assert reply.json["field"] == "method"


def test_head_is_get_without_the_body(plain: Api, topic: str) -> None:
    plain.put(topic, "42")
    for path in (at(topic, "42"), at(topic, "43"), f"/v1/tasks?topic={topic}", "/openapi.json", "/v1/tasks?limit=0"):
        got, head = plain("GET", path), plain("HEAD", path)
        assert head.body == b""
        assert head.status == got.status
        for name in ("content-type", "content-length", "etag"):
            assert head.headers.get(name) == got.headers.get(name)


def test_a_head_of_the_events_ends(plain: Api) -> None:
    assert plain("HEAD", "/v1/events").body == b""


@pytest.mark.parametrize(
    "limit", ["0", "1001", "00001", "000011000000", "0001" + "9" * 30, "1" * 5_004, "-1", "+1", "１"]
)
def test_a_limit_is_a_number_of_four_digits(plain: Api, limit: str) -> None:
    reply = plain("GET", f"/v1/tasks?limit={quote(limit)}")
    assert reply.status == 422
    assert reply.json["field"] == "limit"


# --- bodies


@pytest.mark.parametrize("kind", ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; a=b",
                                  "application/json-seq", "text/json", "application/xml"])  # fmt: skip
def test_only_json_is_taken(plain: Api, topic: str, kind: str) -> None:
    reply = plain("PUT", at(topic, "42"), {"delay": "1h"}, headers={"content-type": kind})
    assert reply.status == 415
    assert reply.json["accepted"] == "application/json"
    assert plain.get(topic, "42") is None


@pytest.mark.parametrize("kind", ["application/json", "application/json; charset=utf-8", "Application/JSON ;x=y"])
def test_json_by_any_of_its_names(plain: Api, topic: str, kind: str) -> None:
    assert plain("PUT", at(topic, "42"), {"delay": "1h"}, headers={"content-type": kind}).status == 201


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"{]", b"{'delay': '1h'}", b'{"delay": "1h"} x', b'{"delay": NaN}', b'\xef\xbb\xbf{"delay": "1h"}',
     b'{"delay": "1h", "group": "\xff"}', b'{"delay": "1h", "payload": "\xff"}', b'{"delay": "1h", "payload": nul}',
     b'{"delay": "1h", "payload": "\xed\xa0\x80"}', '{"delay": "1h"}'.encode("utf-16"),
     b'{"delay": "1h", "payload": ' + b"[" * 1_000_000 + b"]" * 1_000_000 + b"}", b"[" * 1_000_000,
     b'{"delay": "1h", "retry": ' + b'{"policy": ' * 100_000 + b"}" * 100_001],
    ids=lambda body: repr(body[:40]),
)  # fmt: skip
def test_what_is_not_json(plain: Api, topic: str, body: bytes) -> None:
    reply = plain("PUT", at(topic, "42"), body=body)
    assert reply.status in (400, 422), reply
    assert plain.get(topic, "42") is None
    if not body.startswith(b"[[") and b"policy" not in body:
        assert reply.status == 400
        assert reply.json["accepted"]


def test_a_body_that_says_it_is_too_large_is_not_read(plain: Api) -> None:
    reply = plain("POST", "/v1/schedule", body=b"", headers={"content-length": str(2**30)})
    assert reply.status == 413
    assert reply.json["accepted"] == f"at most {16 * 2**20} bytes"


def test_a_body_without_length_ends_at_the_limit(plain: Api) -> None:
    sent = 0

    def parts() -> Iterator[bytes]:
        nonlocal sent
        yield b"["
        for _ in range(1_000):
            sent += 1
            yield b" " * 100_000

    reply = None
    try:
        reply = plain("POST", "/v1/schedule", body=parts())
    except (BrokenPipeError, ConnectionResetError):
        assert sent < 1_000  # it was closed while it was still being sent
    assert reply is None or reply.status == 413
    assert plain("GET", "/v1/tasks?limit=1").status == 200


def test_a_body_that_comes_too_slowly(small: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "BODY_PATIENCE", 0.2)
    head = b"PUT /v1/topics/a/tasks/b HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with socket.create_connection((urlsplit(small.url).hostname, urlsplit(small.url).port), PATIENCE) as slow:
        began = time.monotonic()
        slow.sendall(head + b"content-length: 100\r\n\r\n{")
        answered = b""
        while part := slow.recv(65_536):
            answered += part
        assert answered.startswith(b"HTTP/1.1 408 ")
        assert b"connection: close" in answered.lower()
        not_before(time.monotonic(), began + 0.15, "the refusal")


def test_who_hangs_up_in_the_middle_of_a_body_leaves_nothing(plain: Api, small: Running, topic: str) -> None:
    head = f"PUT {at(topic, '42')} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with socket.create_connection((urlsplit(small.url).hostname, urlsplit(small.url).port), PATIENCE) as leaving:
        leaving.sendall(head.encode() + b'content-length: 100\r\n\r\n{"delay": "1h"}')
    assert plain.get(topic, "42") is None


# --- headers


@pytest.mark.parametrize("key", ["a\r\nset-cookie: b=c", "a\r\n\r\n<html>", "a\u2028b", "a\x85b"])
def test_no_name_begins_a_header_of_its_own(plain: Api, key: str) -> None:
    reply = plain("PUT", at("a", key), {"delay": "1h"})
    assert reply.status == 422
    assert "set-cookie" not in reply.headers
    assert json.loads(reply.body)["field"] == "key"


def test_no_method_and_no_value_begins_a_header_of_its_own(plain: Api, topic: str) -> None:
    reply = plain("PUT", at(topic, "42"), {"delay": "1h"}, headers={"if-match": "ü€".encode().decode("latin-1")})
    assert reply.status == 422
    reply = plain("GET", "/v1/events?topic=%0D%0Aset-cookie:a=b")
    assert reply.status in (403, 422)
    assert "set-cookie" not in reply.headers


def test_no_answer_may_be_guessed_at_or_read_by_other_sites(plain: Api) -> None:
    for reply in (plain("GET", "/v1/tasks"), plain("GET", "/none"), plain("OPTIONS", "/v1/tasks")):
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert not [name for name in reply.headers if name.startswith("access-control")]


def test_a_request_that_is_no_http_harms_nobody(plain: Api, small: Running) -> None:
    for sent in (b"\x16\x03\x01\x00", b"GET / HTTP/9.9\r\n\r\n", b"GET\r\n\r\n", b"\0" * 100_000):
        with socket.create_connection((urlsplit(small.url).hostname, urlsplit(small.url).port), PATIENCE) as odd:
            odd.sendall(sent)
            odd.shutdown(socket.SHUT_WR)
            try:
                while odd.recv(65_536):
                    pass
            except ConnectionResetError:
                pass
    assert plain("GET", "/v1/tasks?limit=1").status == 200


async def test_many_on_one_connection_are_answered_in_order(small: Running, topic: str) -> None:
    reader, writer = await asyncio.open_connection(urlsplit(small.url).hostname, urlsplit(small.url).port)
    for key in ("a", "b", "c"):
        writer.write(f"GET {at(topic, key)} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
    for _ in range(3):
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 404 ")
        assert json.loads(await reader.readexactly(len(b'{"answer":"not_found","task":null}')))["task"] is None
    writer.close()
    await writer.wait_closed()


def test_half_a_character_is_named(plain: Api, topic: str) -> None:
    reply = plain("PUT", at(topic, "42"), body=b'{"payload": "cut \\ud83d", "delay": "1h"}')
    assert reply.status == 400
    assert "\\ud83d is half of a character" in reply.json["detail"]


def test_an_unknown_field_is_named_with_the_nearest_there_is(plain: Api, topic: str) -> None:
    reply = plain("PUT", at(topic, "42"), {"dealy": "1h"})
    assert (reply.status, reply.json["field"]) == (422, "dealy")
    assert "did you mean delay?" in reply.json["detail"]
    item = {"topic": topic, "key": "1", "delay": "1h"}
    reply = plain("POST", "/v1/schedule", [item, {**item, "xyzzy": 1}])
    assert (reply.status, reply.json["field"]) == (422, "[1].xyzzy")
    assert "on_conflict" in reply.json["detail"]


def test_where_get_is_allowed_head_is(plain: Api, topic: str) -> None:
    for path in (at(topic, "42"), "/v1/tasks", "/healthz"):
        assert {"GET", "HEAD"} <= set(plain("PROPFIND", path).headers["allow"].split(", "))


@pytest.mark.parametrize(
    ("path", "found"),
    [
        (b"/v1/tasks", {}),
        (b"/v1/topics/a%2Fb/tasks/%7Bkey%7D", {"topic": b"a%2Fb", "key": b"%7Bkey%7D"}),
        (b"/v1/topics/{topic}/tasks/{key}", {"topic": b"{topic}", "key": b"{key}"}),
        (b"/v1/topics/a\n/pause", {"topic": b"a\n"}),
        (b"/v1/topics//tasks/1", None),
        (b"/v1/topics/a/tasks/", None),
        (b"/v1/topics/a/tasks/1/2", None),
        (b"/v1/tasks/", None),
    ],
)
def test_a_path_is_matched_as_it_was_sent(path: bytes, found: dict[str, bytes] | None) -> None:
    routes = Routes((call.method, call.path, call.name) for call in CALLS)
    route = routes.find(path)
    assert (None if route is None else route[1]) == found


# --- wall-clock times


def test_wall_clock_times(api: Api, topic: str) -> None:
    made = api("PUT", at(topic, "a"), {"at": "2099-01-31 08:00", "deadline": "2099-02-01 08:00", "zone": "Asia/Tokyo"})
    assert (made.status, made.task["due_at"]) == (201, "2099-01-30T23:00:00.000Z")
    moved = api("PATCH", at(topic, "a"), {"at": "2099-01-31 08:00 Europe/Rome"})
    assert (moved.status, moved.task["due_at"]) == (200, "2099-01-31T07:00:00.000Z")
    batch = [{"topic": topic, "key": "b", "at": "tomorrow 08:00", "zone": "UTC"}]
    [made_b] = api("POST", "/v1/schedule", batch).json
    assert made_b["task"]["due_at"].endswith("T08:00:00.000Z")
    [moved_b] = api("POST", "/v1/reschedule", [{**batch[0], "at": "2099-01-31 08:00"}]).json
    assert moved_b["task"]["due_at"] == "2099-01-31T08:00:00.000Z"
    found = api("GET", f"/v1/tasks?topic={quote(topic)}&wake_from={quote('2099-01-31 08:00 UTC')}").json["tasks"]
    assert [task["key"] for task in found] == ["b"]


@pytest.mark.parametrize(
    ("ask", "field", "accepted"),
    [
        ({"at": "tomorrow 08:00"}, "at", "without a zone"),
        ({"at": "08:00 UTC", "zone": "Asia/Tokyo"}, "at", "one zone, not UTC and Asia/Tokyo"),
        ({"delay": "1h", "deadline": "tomorrow 08:00"}, "deadline", "without a zone"),
        ({"at": "08:00", "zone": "Nowhere"}, "zone", "IANA"),
        ({"at": "08:00 UTC", "zone": 5}, "zone", "Expected `str | null`"),
        ({"at": "08:00 " + "U" * 100}, "at", "08:00 Asia/Shanghai"),
    ],
)
def test_wall_clock_times_that_are_refused(api: Api, topic: str, ask: Any, field: str, accepted: str) -> None:
    reply = api("PUT", at(topic, "a"), ask)
    assert (reply.status, reply.json["field"]) == (422, field)
    assert accepted in reply.json["accepted"]


def test_an_outcome_names_a_wall_clock_time(api: Api, topic: str) -> None:
    api.put(topic, "a", delay="0s")
    [leased] = api("POST", "/v1/lease", {"topics": {topic: 1}, "wait": "5s"}).json["tasks"]
    ended = {"topic": topic, "key": "a", "token": leased["token"], "outcome": "defer", "at": "tomorrow 08:00 UTC"}
    assert api("POST", "/v1/settle", [{**ended, "at": "tomorrow 08:00"}]).json["field"] == "[0].at"
    assert api("POST", "/v1/settle", [ended]).json == {"settled": [True]}
    assert api.get(topic, "a")["wake_at"].endswith("T08:00:00.000Z")
