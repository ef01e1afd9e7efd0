"""Webhooks: what is sent, what each answer means, and a worker that sends them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.sinks.receiver import Received, Receiver, closes, hangs, receiving, says
from tests.waiting import until

from bide import BadInput, Bide, Dead, Fixed, MissingExtra, Retry, SetupError, State, Task
from bide.core.instants import In
from bide.core.outcomes import Outcome
from bide.core.retry import RetryPolicy
from bide.engine.delivery.worker import Worker
from bide.ports import Route
from bide.sinks.webhook import WebhookPost, WebhookResult, WebhookSink
from bide.sinks.webhook.sending import content_type, header_text, inert, outcome_of, pause_asked_for
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
        assert await post.sink(f"{receiver.url}/%7e?shop=%2f7%27").deliver(one) is None
    (request,) = receiver.received
    assert (request.method, request.path, request.body) == ("POST", "/hook/%7e?shop=%2f7%27", b'{"number":42}')
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


async def test_each_outcome_is_told_once_and_the_connection_is_kept(
    receiver: Receiver, post: WebhookPost, results: list[WebhookResult]
) -> None:
    sink = post.sink(receiver.url)
    for status in (200, 500, 204, 410):
        receiver.answer = says(status, b"" if status == 204 else b"so it is")
        await sink.deliver(task(attempt=2))
    assert [(result.outcome, result.status, result.excerpt) for result in results] == [
        ("done", 200, "so it is"), ("retry", 500, "so it is"), ("done", 204, ""), ("dead", 410, "so it is"),
    ]  # fmt: skip
    for result in results:
        assert (result.topic, result.key, result.attempt) == ("order.close", "42", 2)
        assert result.host == receiver.place
        assert result.seconds > 0
    assert (len(receiver.received), receiver.connections) == (4, 1)


async def test_an_observer_that_fails_changes_nothing(receiver: Receiver, caplog: pytest.LogCaptureFixture) -> None:
    def fails(result: WebhookResult) -> None:
        raise KeyError(result.topic)

    async with WebhookPost(allow=[receiver.place], observe=fails) as post:
        assert await post.sink(receiver.url).deliver(task()) is None
    assert "the observer of webhooks failed for order.close/42" in caplog.text


# --- connections


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
        with pytest.raises(SetupError, match="open in another event loop"):
            await asyncio.to_thread(asyncio.run, post.open())
        async with Bide("memory:") as app:
            app.route("order.close", sink)
            await app.schedule("order.close", delay="0s")
            async with app.worker() as worker:
                await worker.until_empty()
        assert await sink.deliver(task()) is None, "the worker does not close what others have opened"
    with pytest.raises(SetupError, match="not open"):
        await sink.deliver(task())
    await post.close()


async def test_a_worker_opens_what_its_sinks_share(receiver: Receiver) -> None:
    app, post = Bide("memory:"), WebhookPost(allow=[receiver.place])
    for topic in ("a", "b"):
        app.route(topic, post.sink(receiver.url))
        assert app.routes[topic].concurrency == 20
    for _ in range(2):
        async with app, app.worker() as worker:
            await app.schedule("b", delay="0s")
            await worker.until_empty()
    assert len(receiver.received) == 2
    assert post.sessions == {}


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


NOW = datetime(2030, 1, 31, 8, 0, 0, tzinfo=UTC)
EPOCH = NOW.timestamp()


def date(**ahead: float) -> str:
    return format_datetime(NOW + timedelta(**ahead), usegmt=True)


ASKED: list[tuple[str | None, float | None]] = [
    (None, None), ("120", 120), (" 7 ", 7), (date(minutes=5), 300),
    (format_datetime((NOW + timedelta(minutes=5)).astimezone()), 300),  # in another zone
    ((NOW + timedelta(hours=1)).strftime("%A, %d-%b-%y %H:%M:%S GMT"), 3600),  # in the old form
    ("172800", 86_400), (date(days=7), 86_400),  # a day at most
    ("0", None), ("-5", None), (date(minutes=-5), None), (str(int(EPOCH) + 60), None),
    ("Fri, 31 Dec 9999 23:59:59 GMT", None), ("9" * 40, None), ("1.5", None), ("soon", None), ("", None), ("١٢", None),
    ("Fri, 31", None), ("Fri, 99 Foo 2030 99:99:99 GMT", None),
]  # fmt: skip


@pytest.mark.parametrize(("retry_after", "seconds"), ASKED)
def test_what_a_receiver_asks_for(retry_after: str | None, seconds: float | None) -> None:
    pause = pause_asked_for(retry_after, EPOCH)
    assert pause == (None if seconds is None else timedelta(seconds=seconds))


@given(st.text(max_size=60))
def test_no_text_breaks_it(retry_after: str) -> None:
    pause = pause_asked_for(retry_after, EPOCH)
    assert pause is None or timedelta(0) < pause <= timedelta(days=1)


def test_each_status_is_a_success_or_left_to_the_retry_policy_or_says_that_nobody_is_there_any_more() -> None:
    for status in (200, 201, 202, 204, 299):
        assert outcome_of(status, "60", None, "thanks", EPOCH) is None
    for status in (400, 401, 403, 404, 408, 422, 429, 451, 500, 502, 503, 504, 599, 999):
        outcome = outcome_of(status, None, None, "no", EPOCH)
        assert isinstance(outcome, Retry)
        assert outcome.due is None
        assert why(outcome).startswith(str(status))
        assert why(outcome).endswith(": no")
    gone = outcome_of(410, "60", None, "moved out", EPOCH)
    assert isinstance(gone, Dead)
    assert gone.why == "410 Gone: moved out"


@pytest.mark.parametrize(
    ("status", "due"), [(429, In(90_000)), (503, In(90_000)), (400, None), (500, None), (302, None)]
)
def test_a_busy_receiver_says_when_and_nobody_else_does(status: int, due: In | None) -> None:
    outcome = outcome_of(status, "90", None, "", EPOCH)
    assert isinstance(outcome, Retry)
    assert outcome.due == due
    assert ("asked to wait 90 s" in str(outcome.why)) is (due is not None)


@pytest.mark.parametrize("status", [300, 301, 302, 303, 307, 308])
def test_a_redirect_is_a_failure_that_says_so(status: int) -> None:
    outcome = outcome_of(status, None, "http://127.0.0.1/\x1b[31m", "", EPOCH)
    assert isinstance(outcome, Retry)
    assert "redirects are not followed (to http://127.0.0.1/\\x1b[31m)" in str(outcome.why)
    assert "a redirect" in str(outcome_of(status, None, None, "", EPOCH))


def test_an_excerpt_does_nothing_where_it_is_shown() -> None:
    assert inert(b"plain, and caf\xc3\xa9") == "plain, and café"
    assert inert(b"a\r\nINFO forged\x1b[2J\x00\x07") == "a\\r\\nINFO forged\\x1b[2J\\x00\\x07"
    assert inert("left\u202eright\u2028line\ufeff".encode()) == "left\\u202eright\\u2028line\\ufeff"
    assert inert(b"\xff\xfe") == "\ufffd\ufffd"
    assert len(inert(b"x" * 10_000)) == 500


@given(st.binary(max_size=600))
def test_any_bytes_become_one_printable_line(answered: bytes) -> None:
    assert inert(answered).isprintable()


TOPIC = "hook"
ONCE = Fixed("0s", tries=1)


def route(app: Bide, sink: WebhookSink, retry: RetryPolicy = ONCE) -> None:
    app.routes[TOPIC] = Route(topic=TOPIC, sink=sink, retry=retry, concurrency=sink.concurrency)


class Told:
    """The results so far, and a wait for as many of them as a test needs."""

    def __init__(self) -> None:
        self.results: list[WebhookResult] = []

    def __call__(self, result: WebhookResult) -> None:
        self.results.append(result)

    def of(self, host: str, outcome: str) -> list[WebhookResult]:
        return [result for result in self.results if result.host == host and result.outcome == outcome]

    def keys(self, host: str, outcome: str) -> set[str]:
        return {result.key for result in self.of(host, outcome)}

    async def until(self, count: int, host: str, outcome: str) -> None:
        """So many tasks have had this outcome."""
        await until(lambda: len(self.keys(host, outcome)) >= count, f"{count} tasks that are {outcome}")


@asynccontextmanager
async def at_work(app: Bide) -> AsyncIterator[Worker]:
    async with app, app.worker() as worker:
        yield worker


async def test_a_receiver_that_hangs_delays_nobody_else() -> None:
    """Three times as many tasks as the topic has slots go to a host that never answers; 200 go to another."""
    told = Told()
    async with (
        receiving(hangs) as stuck,
        receiving() as well,
        WebhookPost(allow=[stuck.place, well.place], observe=told) as post,
    ):
        app = Bide("memory:", grace="0s")
        route(app, post.sink(per_task=True, total="1h"))
        assert app.routes[TOPIC].concurrency == 100
        stuck_tasks = [app.new(TOPIC, n, delay="0s", headers={"webhook": stuck.url}) for n in range(300)]
        async with at_work(app):
            for done in range(10, 201, 10):
                well_tasks = [app.new(TOPIC, n, delay="0s", headers={"webhook": well.url}) for n in range(10)]
                await app.schedule_many([*stuck_tasks, *well_tasks])  # those that get stuck come first
                stuck_tasks = []
                await told.until(done, well.place, "done")
            await told.until(280, stuck.place, "defer")
            await until(lambda: len(stuck.received) == 20, "all requests that hang")
            assert post.hosts.busy(stuck.place) == 20
            assert len(told.keys(stuck.place, "defer")) == 280
            assert not told.of(stuck.place, "retry"), "all this was while it hung"
            assert not told.of(well.place, "retry")


async def test_all_are_delivered_once_a_receiver_is_well_again() -> None:
    """What was deferred meanwhile has counted no attempt."""
    told, broken = Told(), asyncio.Event()

    async def hangs_until_it_breaks(request: Received, writer: asyncio.StreamWriter) -> None:
        await broken.wait()
        await closes(request, writer)

    async with (
        receiving(hangs_until_it_breaks) as one,
        WebhookPost(allow=[one.place], observe=told, per_host=4) as post,
    ):
        app = Bide("memory:", grace="0s")
        route(app, post.sink(per_task=True, total="1h"), Fixed("100ms", tries=3))
        async with at_work(app):
            await app.schedule_many([app.new(TOPIC, n, delay="0s", headers={"webhook": one.url}) for n in range(60)])
            await told.until(56, one.place, "defer")
            await until(lambda: len(one.received) == 4, "all requests that hang")
            one.answer = says(200)
            broken.set()
            await told.until(60, one.place, "done")
    done, failed = told.of(one.place, "done"), told.keys(one.place, "retry")
    assert len(done) == 60
    assert len(told.of(one.place, "retry")) == len(failed) == 4
    assert {result.key for result in done if result.attempt == 1} == told.keys(one.place, "defer") - failed


async def test_a_drain_in_the_middle_of_a_request_gives_the_task_back(receiver: Receiver) -> None:
    receiver.answer = hangs
    told = Told()
    async with WebhookPost(allow=[receiver.place], observe=told) as post:
        app = Bide("memory:", grace="0s")
        route(app, post.sink(receiver.url))
        async with app:
            await app.schedule(TOPIC, {"number": 42}, key="42", delay="0s")
            async with app.worker():
                await receiver.came.wait()
            await receiver.gone.wait()
            task = await app.get(TOPIC, "42")
            assert task is not None
            assert (task.state, task.attempt, task.failures) == (State.WAITING, 0, 0)
            assert not told.results, "it has no outcome"
            receiver.answer = says(200)
            async with app.worker() as worker:
                await worker.until_empty()
        assert [request.headers["bide-attempt"] for request in receiver.received] == ["1", "1"]
        assert len({request.headers["webhook-id"] for request in receiver.received}) == 1
