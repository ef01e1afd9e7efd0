"""What comes in before anybody is known is bounded; made-up cursors, tokens and cookies open no door."""

from __future__ import annotations

import base64
import gc
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.service.calling import Api, Running, answered, connected, fresh_store, running
from tests.service.conftest import KEPT
from tests.service.console.browsing import Browser
from tests.service.test_access import make
from tests.waiting import wait_until

from bide import Bide
from bide.core.errors import BadInput
from bide.core.records import Filter, Page
from bide.engine.history import rows_between
from bide.ports import remote
from bide.service import requests, server
from bide.service.access import ALL_VERBS, Verb, networks_of
from bide.service.serving import ServeConfig, ServiceInstance
from bide.service.sessions import cookie_name

GET = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n"


@pytest.fixture(scope="module")
def one() -> Iterator[Running]:
    with running("memory:") as found:
        yield found


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


MINE, OTHERS = "b.mail", ("a.pay", "b", "b.mai", "b.mail2", "zz.pay", "bide:settings")
GROUP = "user-7"
LISTS = [{"topic": MINE, **more} for more in ({}, {"group": GROUP}, {"state": "waiting"}, {"state": "dead"})]


class Ground(NamedTuple):
    """An instance with tasks of several topics, and who may read one of them."""

    one: Running
    api: Api
    browser: Browser
    token: str
    csrf: str
    cursors: list[str]
    """Real ones, of lists that they may not read."""

    def find(self, where: dict[str, str], cursor: str) -> bytes:
        """As bide's own clients ask."""
        ask = remote.FindRequest(Filter(**where), Page(limit=50, cursor=cursor))  # type: ignore[arg-type]
        call = remote.Call("", 0, None, msgspec.Raw(msgspec.msgpack.encode(ask)))
        reply = self.api("POST", "/v1/store/find", body=msgspec.msgpack.encode(call))
        assert reply.status in (200, 422), reply
        return reply.body


@pytest.fixture(scope="module", params=["memory", "sqlite", "redis", "postgres"])
def ground(request: pytest.FixtureRequest) -> Iterator[Ground]:
    with fresh_store(request) as url, running(url, **KEPT) as one, ExitStack() as stack:
        payloads = {MINE: "mine"} | {topic: f"SECRET {topic}" for topic in OTHERS[:-1]}
        tasks = [
            one.app.new(topic, payload, key=f"{key}-of-{topic}", group=GROUP, delay="1h")
            for topic, payload in payloads.items()
            for key in "abc"
        ]
        one.run(one.app.schedule_many(tasks))
        _, root = one.run(make(one.app, "root", ALL_VERBS))
        _, header = one.run(make(one.app, "narrow", frozenset({Verb.READ, Verb.CANCEL}), (MINE,)))
        token = header.removeprefix("Bearer ")
        everything = stack.enter_context(closing(Api(one.url, root.removeprefix("Bearer "))))
        lists = [
            {"topic": topic, **more} for topic in OTHERS[:-1] for more in ({}, {"group": GROUP}, {"state": "waiting"})
        ]
        pages = [
            everything.done("GET", f"/v1/tasks?{urlencode({**one, 'limit': 1})}")
            for one in [*lists, {}, {"group": GROUP}]
        ]
        api = stack.enter_context(closing(Api(one.url, token)))
        browser = stack.enter_context(closing(Browser(one.url)))
        csrf = browser.log_in(token).csrf
        yield Ground(one, api, browser, token, csrf, [page["cursor"] for page in pages if page["cursor"]])


def encoded(value: object) -> str:
    return base64.urlsafe_b64encode(msgspec.msgpack.encode(value)).decode().rstrip("=")


ORDERS = st.sampled_from(["group", "name", "live", "ended", "topic", "due", "waiting", "dead", ""])
NAMES = st.sampled_from(["", *OTHERS, MINE, GROUP, "a-of-a.pay", "c-of-b.mail", "\0", "\uffff", "é"])
NUMBERS = st.sampled_from([0, 1, -1, 2**31, 2**53, 2**63 - 1, -(2**63), 2**64 - 1])
SIMPLE = st.one_of(NAMES, NUMBERS, st.none(), st.floats(), st.binary(max_size=8))
PLACES = st.one_of(
    st.tuples(ORDERS, NAMES, NUMBERS, NUMBERS, NAMES), st.tuples(ORDERS, NAMES, NAMES, NUMBERS, NUMBERS),
    st.lists(SIMPLE, max_size=7), SIMPLE, st.dictionaries(NAMES, SIMPLE, max_size=3),
)  # fmt: skip


@st.composite
def cursors(draw: st.DrawFn, ground: Ground) -> str:
    real = st.sampled_from(ground.cursors)
    cursor: str = draw(st.one_of(PLACES.map(encoded), real, st.text(max_size=40), real.map(lambda one: one[:-2])))
    if draw(st.booleans()):
        return cursor
    return encoded((draw(NAMES), cursor, draw(st.none() | st.tuples(NAMES, NAMES))))  # as the console has them


def check(ground: Ground, body: bytes) -> None:
    """Nothing of what is others'."""
    for secret in (b"SECRET", *(f"-of-{topic}".encode() + end for topic in OTHERS for end in (b'"', b"<", b"\xa5"))):
        assert secret not in body, body[:2_000]


@given(data=st.data())
@settings(max_examples=60)
def test_no_cursor_leads_to_what_is_others(ground: Ground, data: st.DataObject) -> None:
    cursor, where = data.draw(cursors(ground)), data.draw(st.sampled_from(LISTS))
    asked = urlencode({**where, "cursor": cursor, "limit": 50}, errors="surrogatepass")
    reply = ground.api("GET", f"/v1/tasks?{asked}")
    assert reply.status in (200, 422), reply
    check(ground, reply.body)
    check(ground, ground.find({name: text for name, text in where.items() if name != "state"}, cursor))
    for path in (f"/tasks?{asked}", f"/tasks?{urlencode({'group': GROUP, 'cursor': cursor})}",
                 f"/dead?list=yes&{urlencode({'topic': MINE, 'cursor': cursor})}"):  # fmt: skip
        name = cookie_name(ground.browser.host)
        session = f"{name}={ground.browser.cookies[name]}"
        page = ground.browser.api("GET", path, headers={"cookie": session, "accept": "text/html"})
        assert page.status in (200, 422), page
        check(ground, page.body)


HEADER = st.text(st.characters(min_codepoint=0x20, max_codepoint=0xFF, exclude_characters="\x7f"), max_size=80)


def near(real: str) -> st.SearchStrategy[str]:
    """What somebody makes of a real value: a character changed, a part of it, more than it; or anything."""
    places = st.integers(0, len(real) - 1)
    changed = st.tuples(places, HEADER).map(lambda one: real[: one[0]] + one[1] + real[one[0] + 1 :])
    return st.one_of(HEADER, changed, places.map(lambda one: real[:one]), HEADER.map(lambda one: real + one))


@pytest.mark.parametrize("ground", ["memory"], indirect=True)
@given(data=st.data())
@settings(max_examples=60)
def test_no_other_token_cookie_or_second_value_counts(ground: Ground, data: st.DataObject) -> None:
    with closing(Api(ground.one.url)) as stranger:
        text = data.draw(near(ground.token))
        if text.strip(" ") != ground.token:
            for scheme in ("Bearer ", "bearer  ", "", "Basic "):
                reply = stranger("GET", f"/v1/tasks?topic={MINE}", headers={"authorization": f"{scheme}{text}"})
                assert reply.status == 401, reply
                check(ground, reply.body)
        name = cookie_name(ground.browser.host)
        cookie = ground.browser.cookies[name]
        text = data.draw(near(cookie))
        if text.partition(";")[0].strip() != cookie:
            reply = stranger("GET", f"/tasks?topic={MINE}", headers={"cookie": f"{name}={text}"})
            assert reply.status in (303, 401), reply
            check(ground, reply.body)
        text = data.draw(near(ground.csrf))
        if text != ground.csrf:
            form: Any = {"csrf": text, "verb": "cancel", "scope": "chosen", "ref": f"{quote(MINE)}/a-of-{MINE}@1"}
            reply = stranger("POST", "/changes", body=urlencode(form).encode(), headers={
                "cookie": f"{name}={cookie}", "content-type": "application/x-www-form-urlencoded",
            })  # fmt: skip
            assert reply.status == 403, reply
