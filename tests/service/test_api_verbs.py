"""One task by its path: every verb and answer, conditions, payloads, times; and what is refused as RFC 9457 says."""

from __future__ import annotations

import base64
import json
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import quote

import pytest
from tests.service.calling import Api, Asked, Running, answered, at, connected
from tests.waiting import not_before

from bide.core.instants import instant
from bide.service import requests
from bide.service.contract import CALLS

HOUR = 3_600_000

# --- every verb and every answer


def test_schedule_creates_and_replaces(api: Api, topic: str) -> None:
    asked = Asked()
    first = api("PUT", at(topic, "42"), {"delay": "1h", "payload": {"number": 42}, "group": "user-7"})
    assert first.answer == (201, "created")
    assert first.headers["etag"] == f'"{first.task["token"]}"'
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
    second = api("PUT", at(topic, "42"), {"delay": "2h"})
    assert second.answer == (200, "replaced")
    assert second.task["token"] > first.task["token"]
    assert second.task["id"] != first.task["id"]
    task = api.get(topic, "42")
    assert "payload" in task
    assert task["payload"] is None


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
    plain: Api, topic: str, on_conflict: str, delay: str, status: int, answer: str
) -> None:
    before = plain.put(topic, "42")
    reply = plain("PUT", at(topic, "42"), {"delay": delay, "on_conflict": on_conflict})
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


def test_what_is_not_there(plain: Api, topic: str) -> None:
    for reply in (
        plain("GET", at(topic, "42")),
        plain("PATCH", at(topic, "42"), {"delay": "1h"}),
        plain("DELETE", at(topic, "42")),
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


# --- conditions


def test_put_only_if_it_is_new(plain: Api, topic: str) -> None:
    only_new = {"if-none-match": "*"}
    assert plain("PUT", at(topic, "42"), {"delay": "1h"}, headers=only_new).answer == (201, "created")
    before = plain.get(topic, "42")
    reply = plain("PUT", at(topic, "42"), {"delay": "2h"}, headers=only_new)
    assert reply.answer == (412, "refused")
    assert reply.task == before == plain.get(topic, "42")


@pytest.mark.parametrize("headers", [{"if-none-match": '"7"'}, {"if-match": '"7"'}, {"if-match": "*"}])
def test_put_takes_no_other_condition(plain: Api, topic: str, headers: dict[str, str]) -> None:
    reply = plain("PUT", at(topic, "42"), {"delay": "1h"}, headers=headers)
    assert reply.status == 422
    assert reply.json["field"] in headers
    assert plain.get(topic, "42") is None


@pytest.mark.parametrize("form", ["*", " * ", "W/{}", '"1", {}', 'W/"1",W/{}', " {} "])
def test_what_was_seen_may_be_written_in_each_of_the_standards_ways(plain: Api, topic: str, form: str) -> None:
    plain.put(topic, "42")
    tag = plain("GET", at(topic, "42")).headers["etag"]
    same = plain("GET", at(topic, "42"), headers={"if-none-match": form.format(tag)})
    assert (same.status, same.body, same.headers["etag"]) == (304, b"", tag)
    other = f'"{int(tag[1:-1]) + 1}"'
    assert plain("GET", at(topic, "42"), headers={"if-none-match": f'W/{other}, "x", {tag[:-2]}"'}).status == 200


@pytest.mark.parametrize("method", ["PATCH", "DELETE"])
def test_change_only_what_was_seen(plain: Api, topic: str, method: str) -> None:
    ask = {"delay": "2h"} if method == "PATCH" else None
    task = plain.put(topic, "42")
    reply = plain(method, at(topic, "42"), ask, headers={"if-match": f'"{task["token"] - 1}"'})
    assert reply.answer == (412, "stale_token")
    assert reply.task == task == plain.get(topic, "42")
    assert plain(method, at(topic, "42"), ask, headers={"if-match": f'"{task["token"]}"'}).status == 200
    plain.put(topic, "42")
    assert plain(method, at(topic, "42"), ask, headers={"if-match": "*"}).status == 200


def test_the_token_may_stand_in_the_body(plain: Api, topic: str) -> None:
    task = plain.put(topic, "42")
    stale = plain("PATCH", at(topic, "42"), {"delay": "2h", "if_token": task["token"] - 1})
    assert stale.answer == (409, "stale_token")
    both = {"if-match": f'"{task["token"] - 1}"'}
    unmet = plain("PATCH", at(topic, "42"), {"delay": "2h", "if_token": task["token"]}, headers=both)
    assert unmet.answer == (412, "stale_token")
    for other in (0, 1, 2**53, 2**60, 2**63 - 1):
        stale = plain("PATCH", at(topic, "42"), {"delay": "2h", "if_token": other})
        assert stale.answer == (409, "stale_token"), other
    assert plain("PATCH", at(topic, "42"), {"delay": "2h", "if_token": task["token"]}).answer == (200, "moved")


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


@pytest.mark.parametrize("place", [0, 1])
def test_a_condition_in_two_lines_is_one_list(plain: Api, small: Running, topic: str, place: int) -> None:
    tags = ['"7"', '"8"']
    plain.put(topic, "42")
    tags[place] = plain("GET", at(topic, "42")).headers["etag"]
    for method, name, status in (("GET", "If-None-Match", "304"), ("DELETE", "If-Match", "200")):
        lines = "".join(f"{name}: {tag}\r\n" for tag in tags)
        head = f"{method} {at(topic, '42')} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{lines}\r\n"
        assert answered(small, head.encode()).startswith(f"HTTP/1.1 {status} ".encode()), method


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
    plain.put("{topic}", "{key}")
    assert plain("GET", "/v1/topics/{topic}/tasks/{key}").status == 200


@pytest.mark.parametrize(
    ("path", "field"),
    [
        *(
            (f"{{}}/tasks/{key}", "key")
            for key in (
                "k" * 201, "%C3%BC" * 101, "%00", "a%0Ab", "a%E2%80%A8b", "%FF", "%ED%A0%80", "%C0%AF", "a%zz", "a%",
                "a%4",
            )
        ),
        ("%FF{}/tasks/a", "topic"),
        ("%0D%0A{}/tasks/a", "topic"),
    ],
)  # fmt: skip
def test_names_that_cannot_be(plain: Api, topic: str, path: str, field: str) -> None:
    for method, ask in (("PUT", {"delay": "1h"}), ("GET", None), ("PATCH", {"delay": "1h"}), ("DELETE", None)):
        reply = plain(method, f"/v1/topics/{path.format(topic)}", ask)
        assert reply.status == 422
        assert reply.json["field"] == field
        assert reply.json["accepted"]


def test_the_topic_of_settings_is_nobodys(plain: Api, topic: str) -> None:
    for method, ask in (("PUT", {"delay": "1h"}), ("GET", None), ("PATCH", {"delay": "1h"}), ("DELETE", None)):
        assert plain(method, at("bide:settings", "a"), ask).status == 422
    before = plain.put(topic, "a")
    batch = [{"topic": one, "key": "a"} for one in (topic, "bide:settings")]
    held = [{**one, "token": 1} for one in batch]
    for path, asked in (
        ("schedule", [{**one, "delay": "2h"} for one in batch]),
        ("reschedule", [{**one, "delay": "2h"} for one in batch]),
        *((path, batch) for path in ("fire", "cancel", "redrive")),
        ("settle", [{**one, "outcome": "done"} for one in held]),
    ):
        assert plain("POST", f"/v1/{path}", asked).status == 403
    for path, asked_of in (
        ("shift", {"group": "a", "by": "1h", "topic": "bide:settings"}),
        ("cancel", {"group": "a", "topic": "bide:settings"}),
        ("lease", {"topics": {topic: 1, "bide:settings": 1}}),
        ("extend", {"leases": held}),
    ):
        assert plain("POST", f"/v1/{path}", asked_of).status in (403, 422)
    for path in ("tasks", "events"):
        assert plain("GET", f"/v1/{path}?topic=bide:settings").status == 403
    assert plain.get(topic, "a") == before


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


def test_bytes_are_kept_as_they_are_and_shown_as_json_where_they_are_that(api: Api, topic: str) -> None:
    for payload in (b"\x00\xff", b"", b"no JSON", b'"\xff"', b"\xff\xfe", bytes(range(256)) * 40):
        encoded = base64.b64encode(payload).decode()
        api.put(topic, "42", payload_base64=encoded)
        task = api.get(topic, "42")
        assert task["payload_base64"] == encoded
        assert "payload" not in task
    api.put(topic, "42", payload_base64=base64.b64encode(b'{"a": 1}').decode())
    assert api.get(topic, "42")["payload"] == {"a": 1}


def test_a_payload_nested_as_deep_as_it_may(plain: Api, topic: str) -> None:
    reply = plain("PUT", at(topic, "42"), body=b'{"delay": "1h", "payload": %b}' % (b"[" * 200 + b"]" * 200))
    assert reply.status == 201
    assert plain("GET", at(topic, "42")).body.count(b"[") == 200


# --- when


WRONG: dict[str, list[Any]] = {
    "delay": [None, "soon", "-1h", "-1s", 5, 0.5, True, [], "", "90000000d"],
    "at": [
        "2030-01-31T08:00:00", "tomorrow 08:00", "2030-02-31T08:00:00Z",
        "1969-01-01T00:00:00Z", 1700000000, "9999-12-31T23:59:59-12:00",
    ],
    "group": ["", "g" * 201, "a\nb", 7],
    "on_conflict": ["merge"],
    "deadline": ["10m", "2001-01-01T00:00:00Z"],
    "retry": [
        "often", [], {"policy": "fixed", "pause": "1s"}, {"policy": "fixed", "pause": "1s", "tries": 0},
        {"policy": "cubic"}, {"policy": "exponential", "jitter": 2},
    ],
    "headers": [{"a": "b\nc"}, {"": "b"}, {"a": 1}, {f"h{n}": "x" * 60 for n in range(100)}],
    "payload_base64": ["no base64", "MQ", 1],
    "priority": [1],
}  # fmt: skip
"""By field, its values."""
WRONG_ASKS: list[tuple[Any, str]] = [
    *(
        ({field: value} if field in ("delay", "at") else {"delay": "1h", field: value}, field)
        for field, values in WRONG.items()
        for value in values
    ),
    ({}, "delay"),
    ({"delay": "1h", "at": "2030-01-31T08:00:00Z"}, "delay"),
    ({"delay": "1h", "retry": ["1s", "soon"]}, "retry[1]"),
    ({"delay": "1h", "retry": {"policy": "fixed", "pause": "soon", "tries": 2}}, "retry.pause"),
    ({"delay": "1h", "payload": 1, "payload_base64": "MQ=="}, "payload"),
    ([], "body"),
    ("text", "body"),
    (17, "body"),
]


@pytest.mark.parametrize(("ask", "field"), WRONG_ASKS, ids=str)
def test_what_is_wrong_is_named(plain: Api, topic: str, ask: Any, field: str) -> None:
    reply = plain("PUT", at(topic, "42"), ask)
    assert reply.status == 422
    assert reply.json["field"].startswith((field, f"at, {field}"))
    assert reply.json["accepted"]
    if ask in ({"delay": 5}, {"delay": 0.5}):  # a bare number is no length, as in Python
        assert reply.json["field"] == "delay"
        assert "15m" in reply.json["accepted"]
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
def test_a_policy_travels_with_the_task(plain: Api, topic: str, retry: Any, pauses: list[int]) -> None:
    plain.put(topic, "42", delay="0s", retry=retry)
    for attempt, pause in enumerate(pauses, 1):
        [task] = plain.lease(topic)
        assert task["attempt"] == attempt
        asked = Asked()
        assert plain.settle(task, "retry", error="out of paper")
        found = plain.get(topic, "42")
        assert (found["state"], found["error"], found["id"]) == ("waiting", "out of paper", task["id"])
        asked.check(found["wake_at"], 1000 * pause)
        assert found["due_at"] == task["due_at"]
        plain.done("POST", "/v1/fire", [{"topic": topic, "key": "42"}])
    [task] = plain.lease(topic)
    assert plain.settle(task, "retry", error="out of paper")
    found = plain.get(topic, "42")
    assert (found["state"], found["error"]) == ("dead", "out of paper")


def test_headers_travel_with_the_task(api: Api, topic: str, service: Running) -> None:
    api.put(topic, "42", headers={"webhook": "https://shop.example/hooks", "x-trace": "ü"})
    task = service.run(service.app.get(topic, "42"))
    assert task is not None
    assert task.headers == {"webhook": "https://shop.example/hooks", "x-trace": "ü"}


def test_a_body_goes_with_no_delete(plain: Api, topic: str) -> None:
    task = plain.put(topic, "42")
    assert plain("DELETE", at(topic, "42"), {"if_token": task["token"]}).status == 422
    assert plain.get(topic, "42") == task


@pytest.mark.parametrize("query", ["line=2", "2", "&", "topic=a", ""])
def test_a_question_mark_that_is_not_encoded_reaches_no_other_task(plain: Api, topic: str, query: str) -> None:
    for call in (call for call in CALLS if not call.query):
        reply = plain(
            call.method, f"{call.path.format(topic=topic, key='42')}?{query}", {} if call.ask is not None else None
        )
        assert (reply.status, reply.json["field"], reply.json["value"]) == (422, "query", query or "?"), call.name
        assert "%3F" in reply.json["accepted"]
    task = plain.put(topic, "order")
    assert plain("DELETE", f"{at(topic, 'order')}?{query}").status == 422
    assert plain("GET", f"/v1/topics/{topic}/recurring/order?{query}").status == 422
    assert plain.get(topic, "order") == task
    assert plain("GET", "/v1/tasks?").status == 200, "where a query may be, it may be empty"
    found = plain("GET", f"/v1/tasks?topic={topic}?")
    assert (found.status, found.json["tasks"]) == (200, []), "a question mark may end a value"


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
            named = set(reply.headers["allow"].split(", "))
            assert named == allowed | ({"HEAD"} if "GET" in allowed else set())
            assert reply.json["field"] == "method"


def test_head_is_get_without_the_body(plain: Api, topic: str) -> None:
    plain.put(topic, "42")
    for path in (at(topic, "42"), at(topic, "43"), f"/v1/tasks?topic={topic}", "/openapi.json", "/v1/tasks?limit=0"):
        got, head = plain("GET", path), plain("HEAD", path)
        assert head.body == b""
        assert head.status == got.status
        for name in ("content-type", "content-length", "etag"):
            assert head.headers.get(name) == got.headers.get(name)


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
    began = time.monotonic()
    found = answered(small, head + b"content-length: 100\r\n\r\n{")
    assert found.startswith(b"HTTP/1.1 408 ")
    assert b"connection: close" in found.lower()
    not_before(time.monotonic(), began + 0.15, "the refusal")


def test_who_hangs_up_in_the_middle_of_a_body_leaves_nothing(plain: Api, small: Running, topic: str) -> None:
    head = f"PUT {at(topic, '42')} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with connected(small) as leaving:
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
        with connected(small) as odd:
            odd.sendall(sent)
            odd.shutdown(socket.SHUT_WR)
            with suppress(ConnectionResetError):
                while odd.recv(65_536):
                    pass
    assert plain("GET", "/v1/tasks?limit=1").status == 200


def test_half_a_character_is_named(plain: Api, topic: str) -> None:
    reply = plain("PUT", at(topic, "42"), body=b'{"payload": "cut \\ud83d", "delay": "1h"}')
    assert reply.status == 400
    assert "\\ud83d is half of a character" in reply.json["detail"]


def test_a_recurring_task_takes_headers_and_shows_its_policies(plain: Api, topic: str) -> None:
    ask = {
        "rule": "every 1h", "start": "2099-01-01T00:00Z", "times": 3, "headers": {"a": "b"}, "retry": ["1m", "5m"],
        "window": "90s", "most": 7, "deadline": "2h", "end_when_dead": True, "jitter": "30m",
    }  # fmt: skip
    put = partial(plain, "PUT", f"/v1/topics/{topic}/recurring/r")
    assert [put(ask).answer, put(ask).answer] == [(201, "created"), (200, "kept")]
    assert put(ask | {"headers": {"a": "c"}}).answer == (200, "replaced")
    shown = plain("GET", f"/v1/topics/{topic}/recurring/r").json
    assert {name: shown[name] for name in ("window", "most", "deadline", "end_when_dead", "retry")} == {
        "window": "1m30s", "most": 7, "deadline": "2h", "end_when_dead": True,
        "retry": {"policy": "ladder", "rungs": [60_000, 300_000]},
    }  # fmt: skip
    assert shown["next"][-1] == "2099-01-01T02:00:00.000Z"
    assert shown["rule"]["last"] == instant("2099-01-01T02:00Z")
    steer = partial(plain, "POST", f"/v1/topics/{topic}/recurring/r")
    [skipped], [planned] = steer({"do": "skip_next"}).json, steer({"do": "replan"}).json
    assert (skipped["answer"], planned["answer"]) == ("moved", "moved")
    assert planned["task"]["occurrence"] == "2099-01-01T00:00:00.000Z" < planned["task"]["due_at"], "with its jitter"
    day = {"since": "2099-01-01T00:00Z", "until": "2099-01-01T23:59Z"}
    for wrong in {"do": "pause", **day}, {"do": "backfill"}, {"do": "backfill", "since": day["since"]}:
        assert steer(wrong).json["field"] == "since, until"
    plain("PUT", f"/v1/topics/{topic}/pause")
    assert [one["paused"] for one in steer({"do": "backfill", **day}).json] == [True] * 3


def test_an_unknown_field_is_named_with_the_nearest_there_is(plain: Api, topic: str) -> None:
    reply = plain("PUT", at(topic, "42"), {"dealy": "1h"})
    assert (reply.status, reply.json["field"]) == (422, "dealy")
    assert "did you mean delay?" in reply.json["detail"]
    item = {"topic": topic, "key": "1", "delay": "1h"}
    reply = plain("POST", "/v1/schedule", [item, {**item, "xyzzy": 1}])
    assert (reply.status, reply.json["field"]) == (422, "[1].xyzzy")
    assert "on_conflict" in reply.json["detail"]
    reply = plain("POST", "/v1/schedule", [{**item, "retry": {"policy": "fixed", "wvxyz": 1}}])
    assert (reply.status, reply.json["field"]) == (422, "[0].retry.wvxyz")
    assert "pause, rungs, tries" in reply.json["detail"]
    assert "on_conflict" not in reply.json["detail"]
    reply = plain("PUT", f"/v1/topics/{topic}/recurring/r", {"rule": "@daily", "xyzzy": 1})
    assert "headers" in reply.json["detail"]
    assert "rungs" not in reply.json["detail"]
    for given, field in ({"rule": "99 * * * *"}, "rule"), ({"rule": "@daily", "until": "soon"}, "until"):
        assert plain("PUT", f"/v1/topics/{topic}/recurring/r", given).json["field"] == field


@pytest.mark.parametrize(
    ("path", "ask", "field", "said"),
    [
        ("/v1/cancel", {"group": "a", "key": "b"}, "key", "there are group, topic"),
        ("/v1/cancel", [{"topic": "a", "key": "b", "group": "c"}], "[0].group", "there are if_token, key, topic"),
        ("/v1/extend", {"leases": [], "token": 1}, "token", "there are lease_for, leases"),
    ],
)
def test_an_unknown_field_is_answered_with_the_names_of_its_place(
    plain: Api, path: str, ask: Any, field: str, said: str
) -> None:
    reply = plain("POST", path, ask)
    assert (reply.status, reply.json["field"], reply.json["accepted"]) == (422, field, f"no such field; {said}")


# --- wall-clock times


def test_wall_clock_times(plain: Api, topic: str) -> None:
    made = plain(
        "PUT", at(topic, "a"), {"at": "2099-01-31 08:00", "deadline": "2099-02-01 08:00", "zone": "Asia/Tokyo"}
    )
    assert (made.status, made.task["due_at"]) == (201, "2099-01-30T23:00:00.000Z")
    moved = plain("PATCH", at(topic, "a"), {"at": "2099-01-31 08:00 Europe/Rome"})
    assert (moved.status, moved.task["due_at"]) == (200, "2099-01-31T07:00:00.000Z")
    batch = [{"topic": topic, "key": "b", "at": "tomorrow 08:00", "zone": "UTC"}]
    [made_b] = plain("POST", "/v1/schedule", batch).json
    assert made_b["task"]["due_at"].endswith("T08:00:00.000Z")
    [moved_b] = plain("POST", "/v1/reschedule", [{**batch[0], "at": "2099-01-31 08:00"}]).json
    assert moved_b["task"]["due_at"] == "2099-01-31T08:00:00.000Z"
    found = plain("GET", f"/v1/tasks?topic={quote(topic)}&wake_from={quote('2099-01-31 08:00 UTC')}").json["tasks"]
    assert [task["key"] for task in found] == ["b"]


def test_an_outcome_names_a_wall_clock_time(plain: Api, topic: str) -> None:
    plain.put(topic, "a", delay="0s")
    [leased] = plain("POST", "/v1/lease", {"topics": {topic: 1}, "wait": "5s"}).json["tasks"]
    ended = {"topic": topic, "key": "a", "token": leased["token"], "outcome": "defer", "at": "tomorrow 08:00 UTC"}
    assert plain("POST", "/v1/settle", [{**ended, "at": "tomorrow 08:00"}]).json["field"] == "[0].at"
    assert plain("POST", "/v1/settle", [ended]).json == {"settled": [True]}
    assert plain.get(topic, "a")["wake_at"].endswith("T08:00:00.000Z")
