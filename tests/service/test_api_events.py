"""The stream of events: what callers and deliveries did, once each, also for who comes back."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
from msgspec.structs import replace
from tests.service.calling import Api, Running, at, running
from tests.service.conftest import KEPT
from tests.waiting import PATIENCE, wait_until

from bide import Bide
from bide.core.events import Event, EventKind
from bide.service import streaming


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


def test_only_the_topic_that_is_asked_for(api: Api, service: Running, topic: str) -> None:
    for one in (topic, f"{topic}.other"):
        api.put(one, "42")
    with streamed(service, topic) as stream:
        api.done("DELETE", at(f"{topic}.other", "42"))
        api.done("DELETE", at(topic, "42"))
        assert stream.next()[2]["topic"] == topic


def test_a_heartbeat_and_the_end(topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "_HEARTBEAT", 0.1)
    with running("memory:", **KEPT) as service, streamed(service) as stream:
        assert stream.block() == [": still here"]
        service.run(service.serving.drain())
        while block := stream.block():
            assert block == [": still here"]


def test_more_than_a_page_at_once_is_told_whole_and_a_quiet_topic_has_no_gap(
    topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "_PAGE", 5)
    quiet = f"{topic}.quiet"
    with running("memory:", **KEPT) as service, streamed(service) as stream:
        api = Api(service.url)
        api.put(quiet, "42")
        api.done("DELETE", at(quiet, "42"))
        last = stream.next()[0]
        api.done("POST", "/v1/schedule", [{"topic": topic, "key": str(key), "delay": "1h"} for key in range(20)])
        api.done("POST", "/v1/cancel", [{"topic": topic, "key": str(key)} for key in range(20)])
        assert [stream.next()[1] for _ in range(20)] == ["change"] * 20
        with streamed(service, quiet, last) as back:
            api.put(quiet, "43")
            api.done("DELETE", at(quiet, "43"))
            kind, told = back.next()[1:]
            assert (kind, told["key"]) == ("change", "43"), "and no gap"
        api.close()


def test_a_line_that_is_written_late_is_told_to_who_comes_back(topic: str) -> None:
    with running("memory:", **KEPT) as service:
        api = Api(service.url)
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
        api.close()


def test_more_than_the_log_keeps_is_a_gap(topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "_PAGE", 5)
    monkeypatch.setattr(streaming, "_LOG", 5)
    with running("memory:", **KEPT) as service, streamed(service) as stream:
        api = Api(service.url)
        api.put(topic, "first")
        api.done("DELETE", at(topic, "first"))
        assert stream.next()[1] == "change"
        api.done("POST", "/v1/schedule", [{"topic": topic, "key": str(key), "delay": "1h"} for key in range(20)])
        api.done("POST", "/v1/cancel", [{"topic": topic, "key": str(key)} for key in range(20)])
        assert stream.next()[1] == "gap"
        assert [stream.next()[1] for _ in range(5)] == ["change"] * 5
        api.close()


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
    with running("memory:") as service:
        api = Api(service.url)
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
        api.close()
