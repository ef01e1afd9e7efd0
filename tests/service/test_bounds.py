"""What comes in before anybody is known: bounded in bytes, time and number; and who is taken to have sent it."""

from __future__ import annotations

import gc
import socket
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.service.calling import Api, Running, running
from tests.service.console.browsing import Browser
from tests.service.test_access import make
from tests.waiting import PATIENCE, wait_until

from bide import Bide
from bide.core.errors import BadInput
from bide.engine.history import rows_between
from bide.service import requests, server
from bide.service.access import networks_of
from bide.service.serving import ServeConfig, ServiceInstance

GET = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n"


@pytest.fixture(scope="module")
def one() -> Iterator[Running]:
    with running("memory:") as found:
        yield found


def connected(one: Running) -> socket.socket:
    return socket.create_connection((urlsplit(one.url).hostname, urlsplit(one.url).port), PATIENCE)


def answered(one: Running, *sent: bytes) -> bytes:
    """What comes back until the connection ends, or as much of it as came before it was cut."""
    with connected(one) as client:
        found = b""
        try:
            for part in sent:
                client.sendall(part)
            while part := client.recv(65_536):
                found += part
        except (ConnectionResetError, BrokenPipeError):
            pass
        return found


def test_headers_end_at_64_kib(one: Running) -> None:
    fits = GET + b"connection: close\r\na: " + b"x" * 60_000 + b"\r\n\r\n"
    assert answered(one, fits).startswith(b"HTTP/1.1 200 ")
    for more in (
        [b"a: " + b"x" * 70_000 + b"\r\n\r\n"],
        [b"a" * 70_000 + b": x\r\n\r\n"],
        [b"".join(b"a%d: %s\r\n" % (place, b"x" * 1_000) for place in range(70)) + b"\r\n"],
    ):
        found = answered(one, GET, *more)
        assert found.startswith(b"HTTP/1.1 431 ") or not found
        assert b"at most 65536 bytes" in found or not found
    long_path = b"GET /healthz?" + b"x" * 70_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n"
    assert not answered(one, long_path).startswith(b"HTTP/1.1 2")


def test_a_header_without_end_is_not_kept(one: Running) -> None:
    with connected(one) as client:
        client.sendall(GET + b"a: ")
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            client.sendall(b"x" * 50_000_000)


@pytest.mark.parametrize("between", [b"0\r\nt: ", b"1;t="])
def test_what_stands_between_and_behind_the_parts_of_a_body_is_bounded_too(one: Running, between: bytes) -> None:
    with connected(one) as client:
        client.sendall(b"POST /login HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n")
        client.sendall(b"1\r\na\r\n" + between)
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            client.sendall(b"x" * 50_000_000)


def test_a_body_in_many_parts_is_taken(one: Running) -> None:
    post = b"POST /v1/schedule HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    parts = b"1;of=many\r\n \r\n" * 20_000
    found = answered(
        one, post + b"transfer-encoding: chunked\r\n\r\n2\r\n[]\r\n" + parts + b"0\r\nt: t\r\n\r\n",
        GET + b"connection: close\r\n\r\n",
    )  # fmt: skip
    assert found.count(b"HTTP/1.1 200 ") == 2


def test_who_was_answered_before_the_end_of_a_body_has_a_while_for_the_rest(
    one: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "HEAD_PATIENCE", 0.1)
    with connected(one) as client:
        client.sendall(b"POST /v1/nowhere HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000\r\n\r\n")

        def is_over() -> bool:
            try:
                client.sendall(b"x")
            except OSError:
                return True
            return False

        wait_until(is_over, "the connection to be closed, though a byte comes now and then")


def test_a_large_body_and_the_request_behind_it_are_no_headers(one: Running) -> None:
    body = b"[" + b" " * 1_000_000 + b"]"
    post = b"POST /v1/schedule HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    found = answered(one, post + b"content-length: %d\r\n\r\n" % len(body) + body + GET + b"connection: close\r\n\r\n")
    assert found.count(b"HTTP/1.1 200 ") == 2


@pytest.mark.parametrize(("sent", "answer"), [(b"", b""), (b"GET", b"HTTP/1.1 408 "), (GET, b"HTTP/1.1 408 ")])
def test_headers_that_do_not_come_are_not_waited_for(
    one: Running, monkeypatch: pytest.MonkeyPatch, sent: bytes, answer: bytes
) -> None:
    monkeypatch.setattr(requests, "HEAD_PATIENCE", 0.1)
    found = answered(one, sent)
    assert found.startswith(answer)
    assert bool(found) is bool(answer)
    with connected(one) as client:
        client.sendall(GET + b"\r\n")
        found = b""
        while b'"ok"' not in found:
            found += client.recv(65_536)
        client.sendall(GET)  # the second request of a connection is bounded as well
        assert client.recv(65_536).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/login"), ("POST", "/logout"), ("GET", "/healthz"), ("GET", "/openapi.json")]
)
def test_what_is_for_everybody_takes_little(one: Running, method: str, path: str) -> None:
    with closing(Api(one.url)) as api:
        form = {"content-type": "application/x-www-form-urlencoded"}
        assert api(method, path, body=b"a=" + b"x" * 20_000, headers=form).status == 413
        assert api(method, path, body=b"a=" + b"x" * 10_000, headers=form).status != 413


def test_nobody_sends_a_form_before_they_are_known() -> None:
    """They are told to log in before their form is read; who is logged in may send a large one."""
    with running("memory:") as one, closing(Browser(one.url)) as browser:
        _, header = one.run(make(one.app))
        large = b"csrf=x&a=" + b"x" * 100_000
        form = {"content-type": "application/x-www-form-urlencoded"}
        with connected(one) as client:
            client.sendall(b"POST /changes HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100000\r\n\r\n")
            assert client.recv(65_536).startswith(b"HTTP/1.1 303 ")
        browser.log_in(header)
        assert browser("POST", "/changes", large, form).status == 403


@pytest.mark.parametrize(("first", "last"), [(0, 60), (-1, 5), (5, 4), (10**12, 10**12)])
async def test_of_the_history_an_hour_is_told_at_once(one: Running, first: int, last: int) -> None:
    async with Bide(one.url) as app:
        store: Any = app.store
        with pytest.raises(BadInput, match="minutes"):
            await store.minutes(first, last)
        assert await rows_between(store, app.clock, 0, 59) == {}


def test_no_more_connections_than_there_may_be() -> None:
    with running("memory:", ServeConfig(connections=3)) as one, ExitStack() as stack:
        others = [stack.enter_context(connected(one)) for _ in range(2)]
        assert answered(one, GET + b"connection: close\r\n\r\n").startswith(b"HTTP/1.1 503 ")
        others[0].close()
        others[1].sendall(GET + b"\r\n")
        assert others[1].recv(65_536).startswith(b"HTTP/1.1 200 ")


def test_what_was_refused_is_not_kept(one: Running) -> None:
    """Texts of lengths and times and names, each another and large: none stays in a cache once it was answered."""
    size = 300_000

    def refused(api: Api, places: range) -> None:
        for place in places:
            long, spaced = f"x{place}" + "A" * size, f"{place}{' ' * size}s"
            asks: list[Any] = [{"delay": long}, {"at": long}, {"delay": spaced}, {"delay": "1h", "retry": [long]}]
            for ask in [*asks, {"delay": "1h", "deadline": long}, {"delay": "1h", "group": long}]:
                assert api("PUT", "/v1/topics/t/tasks/1", ask).status == 422
            assert api("POST", "/v1/lease", {"topics": {"t": 1}, "wait": long}).status == 422
            assert api("POST", "/v1/lease", {"topics": {long: 1}}).status in (403, 422)

    tracemalloc.start()
    try:
        with closing(Api(one.url)) as api:
            refused(api, range(2))
            gc.collect()
            before = tracemalloc.get_traced_memory()[0]
            refused(api, range(2, 22))
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - before < 2 * size
    finally:
        tracemalloc.stop()


def test_a_body_that_was_answered_waits_for_no_garbage_collector(one: Running) -> None:
    size = 1_000_000
    tracemalloc.start()
    gc.disable()
    try:
        with closing(Api(one.url)) as api:
            before = tracemalloc.get_traced_memory()[0]
            for place in range(20):
                assert api("PUT", "/v1/topics/t/tasks/1", {"delay": f"x{place}" + "A" * size}).status == 422
        assert tracemalloc.get_traced_memory()[0] - before < 5 * size
    finally:
        gc.enable()
        tracemalloc.stop()


# --- who sent it


def test_two_hosts_are_refused(one: Running) -> None:
    for hosts in (b"host: evil.example\r\nhost: localhost\r\n", b"host: localhost\r\nHost: localhost\r\n"):
        found = answered(one, b"GET /v1/tasks HTTP/1.1\r\n" + hosts + b"connection: close\r\n\r\n")
        assert found.startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("name", ["X-Forwarded-For", "X-Forwarded-Proto", "Forwarded", "Via", "X-Real-IP"])
def test_nobody_comes_through_a_proxy_without_a_token(one: Running, name: str) -> None:
    with closing(Browser(one.url)) as browser:
        assert browser.api("GET", "/v1/tasks", headers={name: "203.0.113.9"}).status == 403
        assert browser("GET", "/tasks", headers={name: "203.0.113.9"}).status == 403
        assert browser.api("GET", "/v1/tasks").status == 200
        assert browser("GET", "/tasks").status == 200


@pytest.mark.parametrize(
    ("proxies", "forwarded", "peer"),
    [
        ([], "203.0.113.9", "127.0.0.1"),
        ([], "1.2.3.4 who=root answer=ok", "127.0.0.1"),
        (["127.0.0.1"], "203.0.113.9", "203.0.113.9"),
        (["127.0.0.1"], "1.2.3.4 who=root answer=ok", "127.0.0.1"),
        (["127.0.0.1"], "198.51.100.7, 203.0.113.9", "203.0.113.9"),
        (["127.0.0.0/8", "203.0.113.0/24"], "6.6.6.6, 198.51.100.7, 203.0.113.9", "198.51.100.7"),
        (["127.0.0.1"], "", "127.0.0.1"),
        (["10.0.0.0/8", "::/0"], "203.0.113.9", "127.0.0.1"),
    ],
)
def test_a_peer_is_an_address_that_a_proxy_of_ours_tells(
    proxies: list[str], forwarded: str, peer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[str] = []
    monkeypatch.setattr(server, "audit_refused", lambda _, peer: noted.append(peer))
    with running("memory:", ServeConfig(proxies=proxies)) as one, closing(Api(one.url, "nonsense")) as api:
        assert api("GET", "/v1/tasks", headers={"x-forwarded-for": forwarded}).status == 401
    assert noted == [peer]


@pytest.mark.parametrize("wrong", ["proxy.example", "10.0.0.1/8", "", "*"])
def test_a_proxy_is_named_by_its_address(wrong: str) -> None:
    with pytest.raises(BadInput, match="proxies"):
        networks_of([wrong])


async def test_that_everybody_may_do_everything_is_said_only_where_they_may(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/tasks.db"
    async with ServiceInstance(Bide(url), ServeConfig(), host="127.0.0.1") as serving:
        assert serving.open_to_all
        await make(serving.app)
    async with ServiceInstance(Bide(url), ServeConfig(), host="127.0.0.1") as serving:
        assert not serving.open_to_all
