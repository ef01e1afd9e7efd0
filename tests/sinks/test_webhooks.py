"""What is sent, and what becomes of a task by what is answered: over real connections."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.sinks.receiver import Received, Receiver, receiving, says
from tests.waiting import pause

from bide import BadInput, Dead, MissingExtra, Retry, SetupError, Task
from bide.core.instants import In
from bide.core.outcomes import Outcome
from bide.sinks.webhook import WebhookPost, WebhookResult
from bide.sinks.webhook.sending import content_type, header_text
from bide.testing import task_for
from bide.wiring import webhook_post


def task(payload: Any = None, key: str = "42", **details: Any) -> Task[Any]:
    return task_for("order.close", {"number": 42} if payload is None else payload, key=key, **details)


def why(outcome: Outcome | None) -> str:
    assert isinstance(outcome, Retry | Dead)
    assert outcome.why is not None
    return outcome.why


# --- what is sent


async def test_a_task_is_posted(receiver: Receiver) -> None:
    one = task(attempt=3, token=77)
    async with WebhookPost(allow=[receiver.place], now=lambda: 1_900_000_000.9) as post:
        assert await post.sink(f"{receiver.url}?shop=7").deliver(one) is None
    (request,) = receiver.received
    assert (request.method, request.path, request.body) == ("POST", "/hook?shop=7", b'{"number":42}')
    headers = dict(request.headers)
    assert headers.pop("user-agent").startswith("bide/")
    assert headers == {
        "host": receiver.place,
        "accept": "*/*",
        "accept-encoding": "identity",
        "content-type": "application/json",
        "content-length": "13",
        "webhook-id": one.id,
        "webhook-timestamp": "1900000000",
        "bide-topic": "order.close",
        "bide-key": "42",
        "bide-token": "77",
        "bide-attempt": "3",
    }


@pytest.mark.parametrize(
    ("payload", "kind"),
    [
        (b'{"number": 42}', "application/json"),
        (b"  [1, 2]\n", "application/json"),
        (b"null", "application/json"),
        ('"café"'.encode(), "application/json"),
        (b'"caf\xe9"', "application/octet-stream"),
        (b"", "application/octet-stream"),
        (b"{", "application/octet-stream"),
        (b"number=42", "application/octet-stream"),
        (b"\x00\xff", "application/octet-stream"),
        (b"[" * 100_000, "application/octet-stream"),
        (b"x" * 3_000_000, "application/octet-stream"),
    ],
    ids=lambda value: repr(value[:12]),
)
async def test_the_payload_is_sent_as_it_is(receiver: Receiver, post: WebhookPost, payload: bytes, kind: str) -> None:
    whatever = Task[Any](replace(task().record, payload=payload))  # also more than the limit of this version
    assert await post.sink(receiver.url).deliver(whatever) is None
    assert receiver.received[0].body == payload
    assert receiver.received[0].headers["content-type"] == kind == content_type(payload)


@pytest.mark.parametrize("key", ["a b", "order/42?x#y", "100%", "%41", "käse", "🍞", "a, b; c=d", '"quoted"', " x "])
async def test_any_key_travels_in_a_header(receiver: Receiver, post: WebhookPost, key: str) -> None:
    assert await post.sink(receiver.url).deliver(task(key=key)) is None
    assert unquote(receiver.received[0].headers["bide-key"]) == key


@given(st.text(min_size=1, max_size=80))
def test_no_text_can_end_a_header(name: str) -> None:
    value = header_text(name)
    assert value.isascii()
    assert value.isprintable()
    assert " " not in value
    if name.isprintable():
        assert unquote(value) == name


TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.mark.parametrize(
    ("carried", "sent"),
    [
        ({"traceparent": TRACE, "tracestate": "a=1,b=2"}, {"traceparent": TRACE, "tracestate": "a=1,b=2"}),
        ({"traceparent": TRACE}, {"traceparent": TRACE}),
        ({"tracestate": "a=1"}, {}),
        ({"traceparent": f"{TRACE} x"}, {}),
        ({"traceparent": TRACE, "tracestate": "käse=1"}, {"traceparent": TRACE}),
        ({"traceparent": TRACE, "baggage": "user=7"}, {"traceparent": TRACE}),
        ({"host": "evil", "cookie": "a=b", "authorization": "x"}, {}),
    ],
)
async def test_the_trace_of_a_task_goes_on_and_nothing_else_of_its_headers(
    receiver: Receiver, post: WebhookPost, carried: Mapping[str, str], sent: Mapping[str, str]
) -> None:
    sink = post.sink(receiver.url)
    await sink.deliver(task())
    await sink.deliver(task(headers=carried))
    plain, with_headers = (request.headers for request in receiver.received)
    assert set(with_headers) - set(plain) == set(sent)
    assert sent.items() <= with_headers.items()
    assert with_headers["host"] == receiver.place


async def test_a_route_has_headers_of_its_own(receiver: Receiver, post: WebhookPost) -> None:
    sink = post.sink(receiver.url, headers={"Authorization": "Bearer abc", "x-shop": "seven of nine"})
    await sink.deliver(task())
    headers = receiver.received[0].headers
    assert headers["authorization"] == "Bearer abc"
    assert headers["x-shop"] == "seven of nine"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("webhook-id", "x"), ("Bide-Token", "1"), ("Host", "evil"), ("Content-Length", "0"), ("Cookie", "a=b"),
        ("Transfer-Encoding", "chunked"), ("a b", "x"), ("a:b", "x"), ("", "x"), ("x-a", "hidden\r\nx-b: y"),
        ("x-a", ""), ("x-a", " hidden"), ("x-a", "hidden\x00"), ("x-a", "hidden-ä"), ("x-a", 42), (42, "x"),
    ],
)  # fmt: skip
def test_headers_that_are_not_its_to_set(name: Any, value: Any) -> None:
    with pytest.raises(BadInput, match="headers") as caught:
        WebhookPost().sink("https://hooks.example.com/", headers={name: value})
    assert "hidden" not in str(caught.value)


# --- what becomes of it


async def test_a_receiver_that_says_when(receiver: Receiver, post: WebhookPost) -> None:
    receiver.answer = says(503, b"no\r\nway", "Retry-After: 120")
    outcome = await post.sink(receiver.url).deliver(task())
    assert isinstance(outcome, Retry)
    assert outcome.due == In(120_000)
    assert "no\\r\\nway" in why(outcome)


async def test_nobody_there() -> None:
    async with receiving() as gone:
        place, url = gone.place, gone.url
    async with WebhookPost(allow=[place]) as other:
        outcome = await other.sink(url).deliver(task())
    assert isinstance(outcome, Retry)
    assert why(outcome) == f"no connection to {place} (Connection refused)"


# --- a URL for each task


async def test_the_url_of_the_task(receiver: Receiver, post: WebhookPost) -> None:
    sink = post.sink(per_task=True)
    assert await sink.deliver(task(headers={"webhook": f"{receiver.url}/a"})) is None
    assert await sink.deliver(task(headers={"webhook": f"{receiver.url}/b"})) is None
    assert [request.path for request in receiver.received] == ["/hook/a", "/hook/b"]


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ({}, "headers[webhook]: nothing was given"),
        ({"webhook": "nonsense"}, "is not accepted; give https://host/path"),
        ({"webhook": "https://169.254.169.254/latest"}, "169.254.169.254 is a link-local address"),
        ({"webhook": "https://2130706433/"}, "an IP address in its usual form"),
        ({"webhook": "http://hooks.example.com/"}, "allow the host: --allow"),
        ({"webhook": "https://user:hunter2@hooks.example.com/"}, "without a user and password"),
    ],
)
async def test_a_url_that_must_not_be_called_is_dead_at_once(
    post: WebhookPost, results: list[WebhookResult], headers: Mapping[str, str], reason: str
) -> None:
    outcome = await post.sink(per_task=True).deliver(task(headers=headers))
    assert isinstance(outcome, Dead)
    assert reason in outcome.why
    assert "hunter2" not in outcome.why
    (result,) = results
    assert (result.outcome, result.host, result.status, result.why) == ("dead", None, None, outcome.why)


async def test_damaged_headers_harm_only_a_route_that_needs_them(receiver: Receiver, post: WebhookPost) -> None:
    damaged = Task[Any](replace(task().record, options=b"\xc1"))
    assert await post.sink(receiver.url).deliver(damaged) is None
    outcome = await post.sink(per_task=True).deliver(damaged)
    assert isinstance(outcome, Dead)
    assert "damaged" in outcome.why


# --- the observer


async def test_each_outcome_is_told_once(receiver: Receiver, post: WebhookPost, results: list[WebhookResult]) -> None:
    sink = post.sink(receiver.url)
    for status in (200, 500, 410):
        receiver.answer = says(status, b"so it is")
        await sink.deliver(task(attempt=2))
    assert [(result.outcome, result.status, result.excerpt) for result in results] == [
        ("done", 200, "so it is"),
        ("retry", 500, "so it is"),
        ("dead", 410, "so it is"),
    ]
    for result in results:
        assert (result.topic, result.key, result.attempt) == ("order.close", "42", 2)
        assert result.host == receiver.place
        assert result.seconds > 0


async def test_an_observer_that_fails_changes_nothing(receiver: Receiver, caplog: pytest.LogCaptureFixture) -> None:
    def fails(result: WebhookResult) -> None:
        raise KeyError(result.topic)

    async with WebhookPost(allow=[receiver.place], observe=fails) as post:
        assert await post.sink(receiver.url).deliver(task()) is None
    assert "the observer of webhooks failed for order.close/42" in caplog.text


# --- connections


async def test_connections_are_kept(receiver: Receiver, post: WebhookPost) -> None:
    sink = post.sink(receiver.url)
    for status in (200, 500, 204, 410):
        receiver.answer = says(status, b"" if status == 204 else b"something")
        await sink.deliver(task())
    assert len(receiver.received) == 4
    assert receiver.connections == 1


async def test_a_receiver_that_closes_after_each_answer(receiver: Receiver, post: WebhookPost) -> None:
    receiver.answer = says(200, b"bye", "Connection: close")
    sink = post.sink(receiver.url)
    assert [await sink.deliver(task()) for _ in range(3)] == [None] * 3
    assert receiver.connections == 3


async def test_no_cookie_is_kept(receiver: Receiver) -> None:
    receiver.answer = says(200, b"", "Set-Cookie: session=1; Path=/")
    named = f"localhost:{receiver.port}"  # clients keep no cookies of bare addresses anyway
    async with WebhookPost(allow=[named]) as post:
        sink = post.sink(f"http://{named}/")
        await sink.deliver(task())
        await sink.deliver(task())
    assert "cookie" not in receiver.received[1].headers


async def test_packed_answers_are_not_unpacked(receiver: Receiver, post: WebhookPost) -> None:
    receiver.answer = says(500, b"\x1f\x8b\x08 not gzip at all", "Content-Encoding: gzip")
    assert "500 Internal Server Error: \\x1f" in why(await post.sink(receiver.url).deliver(task()))


async def test_many_at_once(receiver: Receiver, post: WebhookPost, results: list[WebhookResult]) -> None:
    """More than the host's places: what was not deferred has arrived, once each."""

    async def slowly(request: Received, writer: Any) -> None:
        await pause(0.01, why="more come than are answered")
        await says(200)(request, writer)

    receiver.answer = slowly
    sink = post.sink(receiver.url)
    outcomes = await asyncio.gather(*(sink.deliver(task(key=str(number))) for number in range(100)))
    done = [result.key for result in results if result.outcome == "done"]
    assert len(outcomes) == len(results) == 100
    assert outcomes.count(None) == len(done) >= 20
    assert sorted(request.headers["bide-key"] for request in receiver.received) == sorted(done)
    assert receiver.connections <= 20
    assert post.hosts.busy(receiver.place) == 0


# --- put together wrongly


def test_a_route_has_one_url_or_one_for_each_task() -> None:
    with pytest.raises(BadInput, match="url, per_task"):
        WebhookPost().sink()
    with pytest.raises(BadInput, match="url, per_task"):
        WebhookPost().sink("https://hooks.example.com/", per_task=True)
    with pytest.raises(BadInput, match="loopback"):
        WebhookPost().sink("https://127.0.0.1/")
    with pytest.raises(BadInput, match="a list"):
        WebhookPost().sink(["https://hooks.example.com/"])  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["connect", "total"])
@pytest.mark.parametrize("length", ["0s", "2h", "soon", 5])
def test_timeouts_are_lengths(field: str, length: Any) -> None:
    with pytest.raises(BadInput, match=field):
        WebhookPost().sink("https://hooks.example.com/", **{field: length})


@pytest.mark.parametrize("field", ["per_host", "connections"])
@pytest.mark.parametrize("count", [0, -1, 2.5, True, "20"])
def test_limits_are_counts(field: str, count: Any) -> None:
    with pytest.raises(BadInput, match=field):
        WebhookPost(**{field: count})


async def test_a_post_that_is_not_open_says_so(receiver: Receiver) -> None:
    post = WebhookPost(allow=[receiver.place])
    sink = post.sink(receiver.url)
    with pytest.raises(SetupError, match="not open"):
        await sink.deliver(task())
    async with post:
        assert await sink.deliver(task()) is None
        with pytest.raises(SetupError, match="open already"):
            await post.open()
    with pytest.raises(SetupError, match="not open"):
        await sink.deliver(task())
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(post)
        assert await sink.deliver(task()) is None
    await post.close()


def test_how_many_at_once_suits_a_route() -> None:
    post = WebhookPost(per_host=7)
    assert post.sink("https://hooks.example.com/").concurrency == 7
    assert post.sink(per_task=True).concurrency == 35


def test_the_wiring_makes_one() -> None:
    post = webhook_post(allow=["10.0.0.0/8"], per_host=3)
    assert isinstance(post, WebhookPost)
    assert post.per_host == 3


def test_without_aiohttp_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("bide.sinks.webhook")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    with pytest.raises(MissingExtra, match=r"webhooks needs an optional package: pip install 'bide\[serve\]'"):
        webhook_post()
