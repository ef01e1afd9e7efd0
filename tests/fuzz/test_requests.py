"""HTTP requests of any kind, put to the service without a network, on a store in memory.

Whatever comes, it is answered: with a documented success, or with an error that says what is wrong in the form that its
kind of call promises (`application/problem+json`, an answer that names what stood in the way, a Failure of the store
calls, a page). There is no excuse for a 5xx. And what was refused has changed nothing. What the OpenAPI document says
is played by schemathesis, in `tests/service/test_contract.py`; here is what no document describes: damaged JSON, the
store calls of bide's own clients, pages, odd paths and headers.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any, NamedTuple, cast
from urllib.parse import quote

import msgspec
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from msgspec import Raw
from tests.fuzz.cases import NOISE, NUMBERS, changed, damaged, fuzz, mostly, near, near_bytes
from tests.fuzz.conftest import Loop
from tests.fuzz.tasks import worked_on
from tests.waiting import pause

from bide.app import Bide
from bide.core.instants import At, In
from bide.core.names import RESERVED_TOPICS, new_id
from bide.core.records import Cancel, Filter, Lease, Move, NewTask, OutcomeKind, Page, Record, Ref, Settlement
from bide.ports import remote
from bide.service.contract import CALLS
from bide.service.serving import ServeConfig, ServiceInstance
from bide.stores.memory import MemoryStore

PAGES = (
    "/", "/tasks", "/tasks?topic=t&state=dead", "/topics", "/timeline", "/dead", "/login", "/healthz", "/readyz",
    "/metrics", "/openapi.json", "/static/bide.css", "/t/t/a", "/task?topic=t&key=a", "/actions", "/language",
    "/logout", "/v1", "/v1/store/", "/recurring", "/recurring?topic=t", "/recurring/t/a",
)  # fmt: skip
NAMES = st.sampled_from(
    ("t", "t", "a", "a", "b", "held", "dead", "g", "a/b", "é", "?", "%", "x" * 200, "x" * 201, "bide:settings", "\0")
)
HEADERS = st.sampled_from(
    [b"content-length", b"traceparent", b"accept", b"authorization", b"cookie", b"origin", b"host", b"accept-language",
     b"if-none-match", b"if-match", b"sec-fetch-site", b"hx-request", b"x-forwarded-for", b"accept-encoding"]
)  # fmt: skip
QUERY = {
    "topic": "t", "state": "waiting", "group": "g", "wake_before": "2030-01-01T00:00:00Z", "limit": "2", "cursor": "x",
    "wake_from": "2020-01-01T00:00:00Z", "lang": "en",
}  # fmt: skip
METHODS = st.sampled_from(["GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "get", ""])
TOKEN = 1_234_567_890_123_456
"""Stands for that of the task that is held."""
REF, HELD, NOW = {"topic": "t", "key": "a"}, {"topic": "t", "key": "held", "token": TOKEN}, 1_800_000_000_000
TASK: dict[str, Any] = {
    "payload": {"n": 1}, "delay": "15m", "group": "g", "on_conflict": "keep", "retry": ["1s", "5m"], "deadline": "2d",
    "headers": {"a": "b"}, "if_token": 5,
}  # fmt: skip
BODIES: dict[str, Any] = {
    "schedule": TASK, "reschedule": {"delay": "1h", "if_token": 5},
    "schedule_many": [{**REF, **TASK}, {**TASK, "topic": "t"}],
    "reschedule_many": [{**REF, "at": "2030-01-01T00:00:00Z"}], "fire_many": [REF],
    "cancel_many": [{**REF, "if_token": 1}], "redrive_many": [{**REF, "delay": "5s"}],
    "shift": {"group": "g", "by": "-2h", "topic": "t", "deadlines": True},
    "lease": {"topics": {"t": 2}, "wait": "0s", "lease_for": "30s"},
    "settle": [{**HELD, "outcome": "retry", "delay": "5s", "error": "bad"}],
    "extend": {"leases": [HELD], "lease_for": "30s"},
}  # fmt: skip
"""What each call takes, by its name."""
STORE_CALLS: dict[str, Any] = {
    "add": remote.Batch([NewTask("t", "n", new_id(), In(5)), NewTask("t", "a", new_id(), In(5))]),
    "change": remote.Batch([Move("t", "a", At(NOW)), Cancel("t", "b")]), "get": [Ref("t", "a"), Ref("u", "x")],
    "tally": remote.TallyRequest([0, NOW], None),
    "settle": remote.Batch([Settlement("t", "held", TOKEN, OutcomeKind.RETRY, In(5))]),
    "extend": remote.Batch([Lease("t", "held", TOKEN)], 5_000),
    "lease": remote.LeaseRequest({"t": 1}, 5_000, "w"), "purge": 10, "record": [], "time": None, "paused": None,
    "find": remote.FindRequest(Filter(topic="t"), Page(limit=2)), "minutes": (29_999_990, 30_000_000),
    "announce": remote.AnnounceRequest("w", ["t"], 5_000), "events": remote.EventsRequest(Ref("t", "a"), 10),
    "pause": remote.PauseRequest("t", None), "resume": remote.PauseRequest("t", "x"), "listen": ["t"],
    "open": remote.Hello(remote.WIRE, "server"),
}  # fmt: skip
"""What bide's own clients ask."""


class Request(NamedTuple):
    method: str
    path: bytes
    query: bytes = b""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = b""
    in_session: bool = False
    """The body is what a store call asks, and goes out within a session."""
    parts: int = 1


def deep(depth: int) -> Any:
    value: Any = 1
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


ODD: SearchStrategy[Any] = st.one_of(
    NUMBERS, st.floats(), NOISE, NAMES, st.sampled_from([3, 60, 900]).map(deep),
    st.sampled_from([None, True, False, [], {}, "", "15m", "-1s", "2030-01-01T00:00:00Z", "aGk=", ["1s"]]),
    st.just({"policy": "fixed"}),
)  # fmt: skip


def mutated(value: Any) -> SearchStrategy[Any]:
    """With a part of it replaced, lost, doubled or renamed."""
    if isinstance(value, dict) and value:
        names = st.sampled_from(list(value))
        return st.one_of(
            names.flatmap(lambda name: mutated(value[name]).map(lambda part: {**value, name: part})),
            names.map(lambda lost: {name: part for name, part in value.items() if name != lost}),
            st.builds(lambda name, part: {**value, name: part}, names | names.flatmap(changed), ODD),
            ODD,
        )
    if isinstance(value, list) and value:
        return st.sampled_from([[*value, *value], value[:-1]]) | mutated(value[0]).map(lambda one: [one, *value[1:]])
    return changed(value) | ODD if isinstance(value, str) else ODD


def as_json(value: Any) -> SearchStrategy[bytes]:
    """As text, which may be damaged, have a key twice, be nested without end, or be in another encoding."""
    body = json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
    utf_16 = body.decode("utf-8", "replace").encode("utf-16")
    odd = [
        b"[" * 100_000,
        b'{"a":' * 3_000,
        b"",
        b"9" * 5_000,
        b"\xef\xbb\xbf" + body,
        utf_16,
        b'{"n":1,"n":2,' + body[1:],
    ]
    return mostly(st.just(body), damaged(body) | st.sampled_from(odd), 7)


@st.composite
def store_calls(draw: DrawFn) -> Request:
    operation = draw(st.sampled_from(list(STORE_CALLS)))
    inner = draw(mostly(near_bytes(remote.encode(STORE_CALLS[operation])), st.just(b"\x91" * 100_000 + b"\x01")))
    path = f"/v1/store/{draw(mostly(st.just(operation), changed(operation)))}"
    headers = ((b"content-type", remote.CONTENT_TYPE.encode()),)
    return Request("POST", sent(path), b"", headers, inner, in_session=operation != "open" and draw(st.booleans()))


@st.composite
def calls(draw: DrawFn) -> Request:
    call = draw(st.sampled_from(CALLS))
    path = call.path
    for hole in ("{topic}", "{key}"):
        path = path.replace(hole, quote(draw(NAMES), safe=draw(st.sampled_from(["", "/:"]))))
    body, kind = b"", b"application/json"
    if call.name in BODIES:
        body = draw((st.just(BODIES[call.name]) | mutated(BODIES[call.name])).flatmap(as_json))
        kinds = [b"text/plain", b"", b"application/json; charset=latin-1", b"\xff", b"APPLICATION/JSON"]
        kind = draw(mostly(st.just(kind), st.sampled_from(kinds)))
    headers = [(b"content-type", kind)]
    for name in call.headers:
        value = draw(st.sampled_from(["*", f'"{TOKEN}"', 'W/"1"', "0"]) | NOISE | NUMBERS.map(str))
        headers += draw(st.sampled_from([[], [(name.lower().encode(), in_header(value))]]))
    method = draw(mostly(st.just(call.method), METHODS))
    return Request(method, sent(draw(mostly(st.just(path), changed(path, 2)))), draw(queries()), tuple(headers), body)


@st.composite
def pages(draw: DrawFn) -> Request:
    path, _, query = draw(st.sampled_from(PAGES)).partition("?")
    path = draw(mostly(st.just(path), changed(path), 7))
    return Request(draw(METHODS), sent(path), query.encode() or draw(queries()), ((b"accept", b"text/html"),))


@st.composite
def queries(draw: DrawFn) -> bytes:
    chosen = draw(st.lists(st.sampled_from(list(QUERY)), max_size=3))
    said = "&".join(f"{name}={quote(draw(near(QUERY[name])), safe='', errors='replace')}" for name in chosen)
    said = draw(mostly(changed(said), st.sampled_from(["a", "topic=%zz", "topic=%ff", "topic=t&topic=u"]), 7))
    return said.encode("ascii", "replace").translate(None, bytes(range(33)) + b"#")


def sent(path: str) -> bytes:
    """A server hands over visible characters alone."""
    return path.encode("utf-8", "replace").translate(None, bytes(range(33)) + b"?#") or b"/"


def in_header(value: str) -> bytes:
    return value.encode("utf-8", "replace").translate(None, b"\r\n\0")


@st.composite
def requests(draw: DrawFn) -> Request:
    request = draw(mostly(calls(), pages() | store_calls(), 6))
    odd = draw(mostly(st.just(()), st.tuples(st.tuples(HEADERS, NOISE.map(in_header)))))
    return request._replace(headers=(*request.headers, *odd), parts=draw(st.sampled_from([1, 1, 1, 2, 3])))


class Answered:
    """What the service said."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.body = b""

    async def take(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            assert not self.status, "two answers"
            self.status, self.headers = message["status"], dict(message["headers"])
            for name, value in message["headers"]:
                assert name == name.lower()
                assert not {10, 13} & set(value)
        else:
            self.body += message.get("body", b"")

    @property
    def kind(self) -> str:
        return self.headers.get(b"content-type", b"").decode("latin-1").partition(";")[0]


class Service:
    """An instance, and a store that begins with the same few tasks."""

    def __init__(self, serving: ServiceInstance, store: MemoryStore) -> None:
        self._service, self._store = serving.service, store

    async def begin(self, now: int) -> int:
        """The token of the task that is held."""
        await self._store.add(
            [NewTask("t", key, new_id(), At(now + 60_000), b"{}", "g") for key in "ab"]
            + [NewTask("t", key, new_id(), At(now)) for key in ("held", "dead")],
            now=now,
        )
        leased = await self._store.lease({"t": 2}, now=now, until=now + 60_000, holder="w")
        tokens = {one.key: one.token for one in leased.tasks}
        dead = Settlement("t", "dead", tokens["dead"], OutcomeKind.DEAD, keep_until=now + 60_000, error="bad")
        await self._store.settle([dead], now=now)
        return tokens["held"]

    async def tasks(self) -> list[Record]:
        found = await self._store.find(Filter(), Page(limit=10_000))
        return [one for one in found.tasks if one.topic not in RESERVED_TOPICS]

    async def ask(self, request: Request) -> Answered:
        """Send it, as a server would hand it over; who waits for longer is gone."""
        size = -(-len(request.body) // request.parts) or 1
        messages: list[Any] = [
            {"type": "http.request", "body": request.body[at : at + size], "more_body": at + size < len(request.body)}
            for at in range(0, max(len(request.body), 1), size)
        ]
        answered = Answered()

        async def receive() -> Any:
            if messages:
                return messages.pop(0)
            await pause(0.002, why="the caller goes away while the service has something else to do")
            return {"type": "http.disconnect"}

        scope = {
            "type": "http", "method": request.method, "raw_path": request.path, "http_version": "1.1",
            "path": request.path.decode("utf-8", "replace"), "query_string": request.query,
            "headers": [(b"host", b"127.0.0.1"), *request.headers], "client": ("127.0.0.1", 1),
        }  # fmt: skip
        await self._service(cast(Any, scope), receive, answered.take)
        return answered

    async def in_session(self, request: Request, token: int) -> Request:
        """With the token of the held task in the place of TOKEN, and a store call as one of a session's."""
        body = request.body.replace(str(TOKEN).encode(), str(token).encode())
        body = body.replace(TOKEN.to_bytes(8, "big"), token.to_bytes(8, "big"))
        if request.in_session:
            hello = remote.encode(remote.Hello(remote.WIRE, "server"))
            session = remote.read_welcome((await self.ask(Request("POST", b"/v1/store/open", body=hello))).body).session
            with suppress(msgspec.MsgspecError):
                body = remote.encode(remote.Call(session, 1, None, Raw(body or b"\xc0")))
        return request._replace(body=body)


async def answer_to(request: Request) -> Answered:
    store = MemoryStore()
    app = Bide(store, history="off")
    async with ServiceInstance(app, ServeConfig(), host="127.0.0.1") as serving:
        service = Service(serving, store)
        token = await service.begin(app.clock.now())
        request = await service.in_session(request, token)
        before = await service.tasks()
        answered = await service.ask(request)
        if not answered.status:
            assert request.path.endswith((b"/lease", b"/events", b"/listen")), "no answer"
            return answered
        assert 100 <= answered.status < 500
        well_formed(answered, request)
        after = await service.tasks()
        if answered.status >= 400:
            assert after == before, f"a {answered.status} has changed something"
        for record in after:  # what came over the wire could have been stored by the library
            worked_on(record)
            assert record.topic
            assert record.key
            assert 0 <= record.due_at <= 253_402_300_799_999
        return answered


def well_formed(answered: Answered, request: Request) -> None:
    """In the form that this kind of call promises."""
    length = answered.headers.get(b"content-length")
    if request.method == "HEAD":
        return
    assert length is None or int(length) == len(answered.body)
    if not answered.body:
        assert answered.status in (200, 303, 304, 401)
    elif answered.kind == remote.CONTENT_TYPE and answered.status == 200:
        try:
            remote.read_welcome(answered.body)
        except msgspec.ValidationError:
            remote.read_success(answered.body)
    elif answered.kind == remote.CONTENT_TYPE:
        failure = remote.read_failure(answered.body)
        assert failure.kind
        assert failure.text or failure.field
    elif answered.kind == "application/problem+json":
        problem = json.loads(answered.body)
        assert problem["status"] == answered.status
        assert problem["type"].startswith("urn:bide:")
        assert all(problem[name] for name in ("title", "detail"))
        assert answered.status != 422 or (problem["field"] and problem["accepted"])
    elif answered.kind == "application/json":
        told = json.loads(answered.body)
        assert answered.status < 300 or (answered.status in (404, 409, 412) and told["answer"])
    else:
        assert not request.path.startswith(b"/v1/") or answered.kind == remote.STREAM_TYPE or answered.status == 200


@fuzz(250, request_=requests())
def test_requests(loop: Loop, request_: Request) -> None:
    loop.finish(answer_to(request_))


def test_a_subscription_that_is_nested_too_deeply_is_refused(loop: Loop) -> None:
    body = remote.encode(remote.Call("", 1, None, Raw(b"\x91" * 5_000 + b"\x01")))
    assert loop.finish(answer_to(Request("POST", b"/v1/store/listen", body=body))).status == 422
