"""What is no call, or cannot be read: each refused as RFC 9457 says, with nothing done and nothing left hanging."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from urllib.parse import quote, urlsplit

import pytest
from tests.service.calling import Api, Running, at
from tests.waiting import PATIENCE, not_before

from bide.service.contract import CALLS
from bide.service.requests import Routes

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
    monkeypatch.setattr(small.serving.service, "_body_patience", 0.2)
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
