"""Events, leases that wait and background work: told once, ended with their token and with the process."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import os
import re
import signal
import socket
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
from msgspec.structs import replace
from tests.service.calling import Api, Reply, Running, at, running
from tests.service.conftest import KEPT
from tests.service.console.browsing import Browser
from tests.service.test_access import make, tokens_of
from tests.sinks.receiver import receiving
from tests.waiting import PATIENCE, wait_until

from bide import Bide
from bide.core.events import Event, EventKind
from bide.core.instants import Millis
from bide.core.records import State
from bide.ports import remote
from bide.service import access, serving, streaming
from bide.service.access import ALL_VERBS, Token, Verb
from bide.service.serving import ServeConfig
from bide.testing import ManualClock


class Stream:
    """An open stream; `next` waits for the next event."""

    def __init__(self, reply: http.client.HTTPResponse) -> None:
        self._reply = reply
        assert reply.status == 200
        assert reply.headers["content-type"].startswith("text/event-stream")
        assert reply.headers["cache-control"] == "no-store"
        assert self.block() == [": bide events", "retry: 1000"]

    def block(self) -> list[str]:
        lines: list[str] = []
        while line := self._reply.readline().decode().rstrip("\n"):
            lines.append(line)
        return lines

    def next(self) -> tuple[str, str, Any]:
        """Its id, kind and data."""
        fields = dict(line.split(": ", 1) for line in self.block())
        return fields.get("id", ""), fields["event"], json.loads(fields["data"])


@contextmanager
def streamed(service: Running, topic: str | None = None, last: str | None = None) -> Iterator[Stream]:
    connection = http.client.HTTPConnection(urlsplit(service.url).netloc, timeout=PATIENCE)
    headers = {} if last is None else {"last-event-id": last}
    connection.request("GET", "/v1/events" + ("" if topic is None else f"?topic={topic}"), headers=headers)
    reply = connection.getresponse()
    try:
        yield Stream(reply)
    finally:
        reply.close()
        connection.close()


def test_changes_retries_and_deaths_are_told(api: Api, service: Running, topic: str) -> None:
    with streamed(service, topic) as stream:
        api.put(topic, "42")
        api.done("PATCH", at(topic, "42"), {"delay": "0s"})
        [task] = api.lease(topic)
        api.settle(task, "retry", delay="0s", error="out of paper")
        [task] = api.lease(topic, wait="60s")
        api.settle(task, "dead", error="no such order")
        kinds = []
        for _ in range(3):
            id, kind, data = stream.next()
            kinds.append((kind, data["who"], data["what"]))
            assert id
            assert (data["topic"], data["key"], data["id"], data["kind"]) == (topic, "42", task["id"], kind)
    assert kinds == [
        ("change", "anonymous", "reschedule: moved"),
        ("retry", "anonymous", "out of paper"),
        ("dead", "anonymous", "no such order"),
    ]


def test_who_comes_back_misses_nothing_and_hears_nothing_twice(api: Api, service: Running, topic: str) -> None:
    api.put(topic, "42")
    heard: list[str] = []
    with streamed(service, topic) as stream:
        for delay in ("2h", "3h"):
            api.done("PATCH", at(topic, "42"), {"delay": delay})
            heard.append(stream.next()[0])
    api.done("PATCH", at(topic, "42"), {"delay": "4h"})
    with streamed(service, topic, heard[-1]) as stream:
        heard.append(stream.next()[0])
        api.done("PATCH", at(topic, "42"), {"delay": "5h"})
        heard.append(stream.next()[0])
    assert len(set(heard)) == 4
    with streamed(service, topic, heard[0]) as stream:
        assert [stream.next()[0] for _ in range(3)] == heard[1:]
    with streamed(service, topic, "1-00000000") as stream:
        assert stream.next()[1] == "gap"
        assert [stream.next()[0] for _ in range(4)] == heard


def test_a_heartbeat_and_the_end(topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "_HEARTBEAT", 0.1)
    with running("memory:", **KEPT) as service, streamed(service) as stream:
        assert stream.block() == [": still here"]
        service.run(service.serving.drain())
        while block := stream.block():
            assert block == [": still here"]


def cancel_twenty(api: Api, topic: str) -> None:
    """At once."""
    refs = [{"topic": topic, "key": str(key)} for key in range(20)]
    api.done("POST", "/v1/schedule", [{**ref, "delay": "1h"} for ref in refs])
    api.done("POST", "/v1/cancel", refs)


def test_more_than_a_page_at_once_is_told_whole_and_a_quiet_topic_has_no_gap(
    topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "_PAGE", 5)
    quiet = f"{topic}.quiet"
    with running("memory:", **KEPT) as service, closing(Api(service.url)) as api, streamed(service) as stream:
        api.put(quiet, "42")
        api.done("DELETE", at(quiet, "42"))
        last = stream.next()[0]
        cancel_twenty(api, topic)
        assert [stream.next()[1] for _ in range(20)] == ["change"] * 20
        with streamed(service, quiet, last) as back:
            api.put(quiet, "43")
            api.done("DELETE", at(quiet, "43"))
            kind, told = back.next()[1:]
            assert (kind, told["key"]) == ("change", "43"), "and no gap"


def test_a_line_that_is_written_late_is_told_to_who_comes_back(topic: str) -> None:
    with running("memory:", **KEPT) as service, closing(Api(service.url)) as api:
        with streamed(service, topic) as stream:
            api.put(topic, "42")
            api.done("DELETE", at(topic, "42"))
            last = stream.next()[0]
        [known] = service.run(service.app.events(topic, "42"))
        late = replace(known, at=known.at - 60_000, key="43")
        store: Any = service.app.store
        service.run(store.record([late]))
        with streamed(service, topic, last) as back:
            assert back.next()[2]["key"] == "43"


def test_more_than_the_log_keeps_is_a_gap(topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "_PAGE", 5)
    monkeypatch.setattr(streaming, "_LOG", 5)
    with running("memory:", **KEPT) as service, closing(Api(service.url)) as api, streamed(service) as stream:
        api.put(topic, "first")
        api.done("DELETE", at(topic, "first"))
        assert stream.next()[1] == "change"
        cancel_twenty(api, topic)
        assert stream.next()[1] == "gap"
        assert [stream.next()[1] for _ in range(5)] == ["change"] * 5


async def test_a_listener_that_is_too_far_behind_has_a_gap_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "_MOST_KEPT", 3)
    async with Bide("memory:") as app:
        following = streaming.EventFeed(app)
        parts = await following.stream(None, lambda _: True)
        assert (await anext(parts)).startswith(b": bide events")
        store: Any = app.store
        await store.record([Event(at=1, topic="t", key=str(key), id="", kind=EventKind.CHANGE) for key in range(5)])
        told = [await anext(parts) for _ in range(4)]
        assert told[0].startswith(b"event: gap")
        assert [json.loads(one.rpartition(b"data: ")[2])["key"] for one in told[1:]] == ["2", "3", "4"]
        await following.close()
        with pytest.raises(StopAsyncIteration):
            await anext(parts)


def test_a_query_that_cannot_be(plain: Api) -> None:
    for query in ("topic=", "topics=a", "topic=a&topic=b", "topic=%FF"):
        assert plain("GET", f"/v1/events?{query}").status == 422


def test_a_caller_who_gives_up_and_a_stream_are_counted() -> None:
    with running("memory:") as service, closing(Api(service.url)) as api:
        gives_up = http.client.HTTPConnection(urlsplit(service.url).netloc, timeout=PATIENCE)
        ask = {"topics": {"t": 1}, "wait": "60s"}
        gives_up.request("POST", "/v1/lease", json.dumps(ask), {"content-type": "application/json"})
        wait_until(lambda: service.serving._long_poll.waiting > 0, "somebody who waits")
        gives_up.close()
        with streamed(service):
            line = 'bide_http_requests_total{call="%s",status="%s"} 1.0'
            expected = [line % ("lease", 499), line % ("events", 200)]

            def counted() -> bool:
                text = api("GET", "/metrics").body.decode()
                return all(one in text for one in expected)

            wait_until(counted, "both counts")


START: Millis = 1_900_000_000_000
TOPIC = "order.close"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(START)


@pytest.fixture
def one(clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    """An instance that forgets soon what it knows of tokens."""
    monkeypatch.setattr(access, "FRESH", 0.1)
    monkeypatch.setattr(access, "SOON", 0.0)
    monkeypatch.setattr(streaming, "_EVERY", 0.01)
    with running("memory:", clock=clock) as found:
        yield found


@pytest.fixture
def root(one: Running) -> Iterator[Api]:
    """Somebody who may do everything, and goes on."""
    _, header = one.run(make(one.app, "root", ALL_VERBS))
    with closing(Api(one.url, header.removeprefix("Bearer "))) as api:
        yield api


def given(one: Running, *verbs: Verb, **more: Any) -> tuple[Token, str]:
    token, header = one.run(make(one.app, "shop", frozenset(verbs), **more))
    return token, header.removeprefix("Bearer ")


def revoke(one: Running, token: Token) -> None:
    assert one.run(tokens_of(one.app).revoke(token.id))


@contextmanager
def opened(one: Running, method: str, path: str, token: str) -> Iterator[http.client.HTTPResponse]:
    topics = msgspec.Raw(msgspec.msgpack.encode([TOPIC]))
    body = msgspec.msgpack.encode(remote.Call("", 0, None, topics)) if method == "POST" else None
    with closing(http.client.HTTPConnection(urlsplit(one.url).netloc, timeout=PATIENCE)) as connection:
        connection.request(method, path, body, {"authorization": f"Bearer {token}"})
        with connection.getresponse() as answer:
            assert answer.status == 200
            yield answer


@pytest.mark.parametrize(
    ("method", "path", "verb"), [("GET", "/v1/events", Verb.EVENTS), ("POST", "/v1/store/listen", Verb.WORK)]
)
def test_a_stream_that_is_never_silent_ends_with_its_token(
    one: Running, root: Api, method: str, path: str, verb: Verb
) -> None:
    root.put(TOPIC, "42")
    token, text = given(one, verb)
    delay = 10_000

    def told() -> bytes:
        """What the stream says of a change that is made now; nothing: it has ended."""
        nonlocal delay
        delay -= 1
        root.done("PATCH", at(TOPIC, "42"), {"delay": f"{delay}s"})
        return answer.readline()

    with opened(one, method, path, text) as answer:
        assert told()
        revoke(one, token)
        wait_until(lambda: not told(), "the end of the stream")


@contextmanager
def waiting(one: Running, text: str) -> Iterator[Future[Reply]]:
    """A lease that waits in the long poll."""
    with closing(Api(one.url, text)) as api, ThreadPoolExecutor(1) as thread:
        asked = {"topics": {TOPIC: 1}, "wait": "60s", "lease_for": "1h"}
        reply = thread.submit(api, "POST", "/v1/lease", asked)
        wait_until(lambda: one.serving._long_poll.waiting == 1, "the lease to wait")
        yield reply


def test_a_lease_that_waits_ends_with_its_token(one: Running, root: Api) -> None:
    token, text = given(one, Verb.WORK)
    with waiting(one, text) as reply:
        revoke(one, token)
        with closing(Api(one.url, text)) as api:
            wait_until(
                lambda: api("POST", "/v1/lease", {"topics": {TOPIC: 1}}).status == 401, "the token to be refused"
            )
        root.put(TOPIC, "42", delay="0s", payload="secret")
        assert reply.result(PATIENCE).status == 401
    task = root.get(TOPIC, "42")
    assert (task["state"], task["attempt"]) == ("waiting", 0)


def test_what_is_handed_out_too_late_is_given_back(one: Running, root: Api, clock: ManualClock) -> None:
    """The token has expired, and nobody has asked since."""
    _, text = given(one, Verb.WORK, expires_at=START + 1_000)
    access.FRESH = 60.0
    with waiting(one, text) as reply:
        clock.advance(1_000)
        root.put(TOPIC, "42", delay="0s")
        assert reply.result(PATIENCE).status == 401
    wait_until(lambda: root.get(TOPIC, "42")["state"] == "waiting", "the task to be given back")
    assert root.get(TOPIC, "42")["attempt"] == 0


def test_a_change_in_the_background_ends_with_its_token(one: Running, root: Api) -> None:
    for key in range(60):
        root.put(TOPIC, f"k{key}", delay="2h")
    token, text = given(one, Verb.READ, Verb.CANCEL)
    other, same_name = given(one, Verb.READ, topics=("mail.*",))
    with closing(Browser(one.url)) as ann, closing(Browser(one.url)) as bo:
        ann.log_in(text)
        ann.send([("verb", "cancel"), ("scope", "matching"), ("topic", TOPIC)])
        ann.press("Cancel: 60 tasks", pace="10")
        bo.log_in(same_name)
        assert bo.get(ann.where).status == 403, "a name is not who they are"
        csrf = bo.get("/changes").csrf
        assert bo.post(f"{ann.where}/stop", {"csrf": csrf}).status == 403
        revoke(one, token)
        ann.log_in(given(one, Verb.READ)[1], ann.where)
        wait_until(lambda: "its token was revoked" in ann.open(ann.where).words, "the end of the change")
    left = one.run(one.app.tally()).number(TOPIC, State.WAITING)
    assert 0 < left < 60
    assert other.name == token.name == "shop"


BIG = "x" * 200_000


@asynccontextmanager
async def serve(folder: Path, *options: str, **given: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """The process, and where it listens."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bide", "serve", "--port", "0", "--store", f"sqlite:///{folder}/bide.db", *options),
        env={**os.environ, **given}, stderr=PIPE, cwd=folder,
    )  # fmt: skip
    try:
        yield process, (await said(process, r"http://127\.0\.0\.1:\d+"))[-1]
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def said(process: asyncio.subprocess.Process, what: str) -> list[str]:
    """What it has said up to `what`, and `what`."""
    lines: list[str] = []
    assert process.stderr is not None
    async with asyncio.timeout(PATIENCE):
        while line := (await process.stderr.readline()).decode():
            if found := re.search(what, line):
                return [*lines, found[0]]
            lines.append(line)
    raise AssertionError("".join(lines))


async def test_it_listens_when_it_says_where_it_is() -> None:
    """Who waits for the line, and calls, is not refused."""
    draining: list[Callable[[str], object]] = []

    class Caller(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if found := re.search(r"bide serve: http://127\.0\.0\.1:(\d+)", record.getMessage()):
                with socket.create_connection(("127.0.0.1", int(found[1]))):
                    draining.pop()("reached")

    log, caller = logging.getLogger("bide.serve"), Caller()
    log.addHandler(caller)
    log.setLevel(logging.INFO)
    try:
        await serving.serve(
            Bide("memory:"), ServeConfig(), host="127.0.0.1", port=0, insecure=False, shown_store="memory:",
            begin=lambda drain, grace: draining.append(drain),
        )  # fmt: skip
    finally:
        log.removeHandler(caller)
        log.setLevel(logging.NOTSET)
    assert draining == []


async def test_nobody_keeps_it_beyond_its_grace_and_no_webhook_begins_after_the_signal(tmp_path: Path) -> None:
    async with receiving() as hook:
        options = ("--webhook", f"tick={hook.url}", "--allow", hook.place)
        async with serve(tmp_path, *options, BIDE_GRACE="2s", BIDE_CONCURRENCY="1") as (process, url):
            api = Api(url)
            ticks = [{"topic": "tick", "key": str(n), "delay": f"{n * 100}ms", "payload": n} for n in range(300)]
            heavy = [{"topic": "big", "key": str(n), "delay": "1h", "payload": BIG} for n in range(60)]
            await asyncio.to_thread(api.done, "POST", "/v1/schedule", heavy)
            await asyncio.to_thread(api.done, "POST", "/v1/schedule", ticks)
            api.close()
            host, port = urlsplit(url).hostname, urlsplit(url).port
            reading, silent = await asyncio.open_connection(host, port, limit=1)
            silent.write(b"GET /v1/tasks?topic=big&limit=1000 HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert await reading.readexactly(1), "and no more"
            hearing, slow = await asyncio.open_connection(host, port)
            slow.write(
                b"POST /v1/schedule HTTP/1.1\r\nhost: localhost\r\nexpect: 100-continue\r\ncontent-length: 9\r\n\r\n["
            )
            assert await hearing.readuntil(b"100 Continue")
            await hook.came.wait()

            process.send_signal(signal.SIGTERM)
            await said(process, "draining")
            before = len(hook.received)
            lines = await said(process, "has stopped")

            assert len(hook.received) <= before + 1, "a request may be on its way while the signal comes"
            assert not [line for line in lines if "Traceback" in line], lines
            assert await process.wait() == 0
            for writer in (silent, slow):
                writer.close()
