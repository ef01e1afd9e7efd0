"""HTTP requests of any kind, put to the service without a network, on a store in memory.

Whatever comes, it is answered: with a documented success, or with an error that says what is wrong in the form that its
kind of call promises (`application/problem+json`, an answer that names what stood in the way, a Failure of the store
calls, a page). There is no excuse for a 5xx. And what was refused has changed nothing.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import msgspec
from msgspec import Raw

from bide.app import Bide
from bide.core.names import RESERVED_TOPICS, new_id
from bide.core.records import At, Cancel, Filter, In, Lease, Move, NewTask, Page, Record, Ref, Settlement, Verdict
from bide.ports import wire
from bide.ports.remote import OPERATIONS
from bide.ports.wire import Call
from bide.service.config import ServeConfig
from bide.service.contract import CALLS
from bide.service.serving import Serving
from bide.stores.memory import MemoryStore
from bide_proofs.fuzz.drawing import ODD_NUMBERS, Draw
from bide_proofs.fuzz.running import Case, Target, check

_NAMES = ("t", "a", "b", "g", "a/b", "é", "?", "%", "x" * 200, "x" * 201, "bide:settings", "", "\0")
_JSON = b"application/json"
PAGES = (
    "/", "/tasks", "/tasks?topic=t&state=dead", "/topics", "/timeline", "/dead", "/login", "/healthz", "/readyz",
    "/metrics",
    "/openapi.json", "/static/bide.css", "/t/t/a", "/task?topic=t&key=a", "/actions", "/language", "/logout", "/v1",
    "/v1/store/",
)  # fmt: skip


class FreshStore(MemoryStore):
    """A store in memory that forgets everything between two cases; who listens stays."""

    def start_anew(self) -> None:
        ears = self._ears
        MemoryStore.__init__(self)
        self._ears, self._is_open = ears, True


class Answered:
    """What the service said."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.body = b""

    async def take(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            check(not self.status, "one answer")
            self.status, pairs = message["status"], message["headers"]
            for name, value in pairs:
                check(
                    name == name.lower() and b"\n" not in value and b"\r" not in value,
                    f"the header {name!r}: {value!r}",
                )
            self.headers = dict(pairs)
        else:
            self.body += message.get("body", b"")

    @property
    def kind(self) -> str:
        return self.headers.get(b"content-type", b"").decode("latin-1").partition(";")[0]


def odd_value(draw: Draw) -> Any:
    """A value of JSON that is mostly of no use."""
    kind = draw.randrange(8)
    if kind == 0:
        return draw.choice(ODD_NUMBERS)
    if kind == 1:
        return draw.of(1.5, -0.0, 1e308, float("nan"), float("inf"), 5e-324)
    if kind == 2:
        return draw.noise()
    if kind == 3:
        return draw.choice(_NAMES)
    if kind == 4:
        deep: Any = draw.of({}, [], 1)
        for _ in range(draw.of(3, 60, 900)):
            deep = [deep] if draw.chance(0.5) else {"a": deep}
        return deep
    return draw.of(
        None, True, False, [], {}, "", "15m", "-1s", "2030-01-01T00:00:00Z", "aGk=", ["1s"], {"policy": "fixed"}, 0
    )


def mutated(draw: Draw, value: Any) -> Any:
    """With a part of it replaced, lost, doubled or renamed."""
    if isinstance(value, dict) and value and draw.chance(0.8):
        changed = dict(value)
        name = draw.choice(list(changed))
        kind = draw.randrange(5)
        if kind == 0:
            del changed[name]
        elif kind == 1:
            changed[draw.changed(name)] = odd_value(draw)
        elif kind == 2:
            changed[name] = odd_value(draw)
        else:
            changed[name] = mutated(draw, changed[name])
        return changed
    if isinstance(value, list) and value and draw.chance(0.8):
        place = draw.randrange(len(value))
        return draw.of(
            [*value, *value], value[:place], [*value[:place], mutated(draw, value[place]), *value[place + 1 :]]
        )
    if isinstance(value, str) and draw.chance(0.6):
        return draw.changed(value)
    return odd_value(draw)


def json_of(draw: Draw, value: Any) -> bytes:
    """As text, which may be damaged, have a key twice, or be in another encoding."""
    try:
        body = json.dumps(value, ensure_ascii=draw.chance(0.5)).encode("utf-8", "surrogatepass")
    except RecursionError:
        body = b"[" * 2_000
    kind = draw.random()
    if kind < 0.1:
        return draw.damaged(body)
    if kind < 0.13 and body.startswith(b"{"):
        return b'{"topic":1,"topic":"t",' + body[1:]
    if kind < 0.16:
        return draw.of(
            b"[" * 100_000,
            b'{"a":' * 3_000,
            b"",
            b"\xef\xbb\xbf" + body,
            body.decode("utf-8", "replace").encode("utf-16"),
            b"9" * 5_000,
        )
    return body


def sound_bodies(token: int) -> dict[str, Any]:
    """What each call takes, by its name."""
    ref = {"topic": "t", "key": "a"}
    held = {"topic": "t", "key": "held", "token": token}
    task = {
        "payload": {"n": 1}, "delay": "15m", "group": "g", "on_conflict": "keep", "retry": ["1s", "5m"],
        "deadline": "2d", "headers": {"a": "b"},
    }  # fmt: skip
    return {
        "schedule": task, "reschedule": {"delay": "1h", "if_token": 5},
        "schedule_many": [{**ref, **task}, {**task, "topic": "t"}],
        "reschedule_many": [{**ref, "at": "2030-01-01T00:00:00Z"}], "fire_many": [ref],
        "cancel_many": [{**ref, "if_token": 1}],
        "redrive_many": [{**ref, "delay": "5s"}], "shift": {"group": "g", "by": "-2h", "topic": "t", "deadlines": True},
        "lease": {"topics": {"t": 2}, "wait": "0s", "lease_for": "30s"},
        "settle": [{**held, "outcome": "retry", "delay": "5s", "error": "bad"}],
        "extend": {"leases": [held], "lease_for": "30s"},
    }  # fmt: skip


def store_call(draw: Draw, token: int) -> tuple[str, bytes]:
    """One of bide's own clients', damaged or not."""
    ref, now = Ref("t", "a"), 1_800_000_000_000
    asked: dict[str, Any] = {
        "add": wire.Batch([NewTask("t", draw.of("n", "a"), new_id(), In(5))]),
        "change": wire.Batch([Move("t", "a", At(now)), Cancel("t", "b")]),
        "settle": wire.Batch([Settlement("t", "held", token, draw.of(*Verdict), In(5))]), "get": [ref, Ref("u", "x")],
        "tally": wire.TallyRequest([0, now], None),
        "extend": wire.Batch([Lease("t", "held", token)], 5_000), "lease": wire.LeaseRequest({"t": 1}, 5_000, "w"),
        "purge": 10, "record": [], "find": wire.FindRequest(Filter(topic="t"), Page(limit=2)), "time": None,
        "paused": None,
        "minutes": (29_999_990, 30_000_000),
        "announce": wire.AnnounceRequest("w", ["t"], 5_000), "events": wire.EventsRequest(ref, 10),
        "pause": wire.PauseRequest("t", None),
        "resume": wire.PauseRequest("t", "x"), "listen": ["t"],
    }  # fmt: skip
    operation = draw.choice([*asked, "open"])
    if operation == "open":
        return operation, draw.bytes(wire.encode(wire.Hello(1, "server")))
    inner = wire.encode(asked[operation])
    if draw.chance(0.7):
        inner = draw.bytes(inner) if draw.chance(0.9) else b"\x91" * draw.of(50, 2_000, 100_000) + b"\x01"
    try:
        body = wire.encode(Call("?", 1, None, Raw(inner or b"\xc0")))
    except msgspec.MsgspecError:
        body = inner
    return operation, draw.damaged(body) if draw.chance(0.2) else body


class Fuzzed:
    """The service, and a store that begins each case with the same few tasks."""

    def __init__(self, app: Bide, store: FreshStore, serving: Serving) -> None:
        self.app, self.store, self.service = app, store, serving.service

    async def begin(self) -> int:
        """The token of the one that is held."""
        self.store.start_anew()
        now = self.app.clock.now()
        await self.store.add(
            [NewTask("t", key, new_id(), At(now + 60_000), b"{}", "g") for key in "ab"]
            + [NewTask("t", key, new_id(), At(now)) for key in ("held", "dead")],
            now=now,
        )
        leased = await self.store.lease({"t": 2}, now=now, until=now + 60_000, holder="w")
        for one in leased.tasks:
            if one.key == "dead":
                outcome = Settlement("t", "dead", one.token, Verdict.DEAD, keep_until=now + 60_000, error="bad")
                await self.store.settle([outcome], now=now)
        return next(one.token for one in leased.tasks if one.key == "held")

    async def everything(self) -> set[tuple[Any, ...]]:
        found = await self.store.find(Filter(), Page(limit=10_000))
        return {tuple(msgspec.structs.astuple(one)) for one in found.tasks if one.topic not in RESERVED_TOPICS}

    async def session(self) -> str:
        """Of the store calls."""
        answered = await self.ask("POST", b"/v1/store/open", b"", {}, wire.encode(wire.Hello(1, "server")))
        return wire.read_welcome(answered.body).session

    async def ask(
        self, method: str, path: bytes, query: bytes, headers: dict[bytes, bytes], body: bytes, parts: int = 1
    ) -> Answered:
        """Send it, as a server would hand it over; who waits for longer is gone."""
        size = -(-len(body) // parts) or 1
        messages: list[Any] = [
            {"type": "http.request", "body": body[at : at + size], "more_body": at + size < len(body)}
            for at in range(0, max(len(body), 1), size)
        ]
        messages.reverse()
        answered = Answered()

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await asyncio.sleep(0.002)
            return {"type": "http.disconnect"}

        scope = {
            "type": "http", "method": method, "raw_path": path, "path": path.decode("utf-8", "replace"),
            "query_string": query,
            "headers": [(b"host", b"127.0.0.1"), *headers.items()], "client": ("127.0.0.1", 1), "http_version": "1.1",
        }  # fmt: skip
        await self.service(cast(Any, scope), receive, answered.take)
        return answered

    async def case(self, draw: Draw) -> None:
        token = await self.begin()
        method, path, query, headers, body = await self.drawn(draw, token)
        draw.note((method, path, query, headers, body[:300]))
        before = await self.everything()
        answered = await self.ask(method, path, query, headers, body, draw.of(1, 1, 1, 2, 3))
        draw.note((answered.status, answered.kind, answered.body[:200]))
        if not answered.status:
            check(path.endswith((b"/lease", b"/events", b"/listen")), "no answer")
            return
        check(100 <= answered.status < 500, f"a {answered.status}")
        well_formed(answered, method, path)
        if answered.status >= 400:
            check(await self.everything() == before, f"a {answered.status} has changed something")
        else:
            for record in (await self.store.find(Filter(), Page(limit=10_000))).tasks:
                stored_right(record)

    async def drawn(self, draw: Draw, token: int) -> tuple[str, bytes, bytes, dict[bytes, bytes], bytes]:
        headers: dict[bytes, bytes] = {b"content-type": _JSON}
        query, body = "", b""
        kind = draw.random()
        if kind < 0.2:
            operation, body = store_call(draw, token)
            if (
                operation in OPERATIONS and OPERATIONS[operation].once and body[1:3] == b"\xa1?"
            ):  # where the session is to be said
                body = body[:1] + msgspec.msgpack.encode(await self.session()) + body[3:]
            path = f"/v1/store/{operation if draw.chance(0.95) else draw.changed(operation)}"
            headers = {b"content-type": wire.CONTENT_TYPE.encode()}
            method = "POST"
        elif kind < 0.3:
            method, (path, _, query) = draw.of("GET", "GET", "GET", "POST", "HEAD"), draw.choice(PAGES).partition("?")
            path = draw.changed(path) if draw.chance(0.3) else path
            if draw.chance(0.5):
                query = draw.changed(f"{query}&lang={draw.noise(8)}&cursor={draw.noise(20)}&limit={draw.number()}")
            headers = {b"accept": b"text/html"} if draw.chance(0.7) else {}
        else:
            call = draw.choice(CALLS)
            method = call.method if draw.chance(0.97) else draw.of("GET", "POST", "PUT", "OPTIONS", "TRACE", "get", "")
            names = {
                "{topic}": draw.of("t", "t", draw.choice(_NAMES)),
                "{key}": draw.of("a", "held", "dead", "b", draw.choice(_NAMES)),
            }
            path = call.path
            for hole, name in names.items():
                path = path.replace(hole, quote(name, safe=draw.of("", "/:")))
            path = draw.changed(path, 2) if draw.chance(0.15) else path
            if call.query and draw.chance(0.9):
                values = {
                    "topic": "t", "state": "waiting", "group": "g", "wake_before": "2030-01-01T00:00:00Z", "limit": "2",
                    "cursor": "x", "wake_from": "2020-01-01T00:00:00Z",
                }  # fmt: skip
                chosen = draw.some([name for name in values if name in call.query], 3)
                query = "&".join(
                    f"{name}={quote(draw.text(values[name]), safe='', errors='replace')}" for name in chosen
                )
                query = draw.changed(query) if draw.chance(0.3) else query
            sound = sound_bodies(token).get(call.name)
            if sound is not None:
                body = json_of(draw, mutated(draw, sound) if draw.chance(0.75) else sound)
            if draw.chance(0.1):
                headers = {
                    b"content-type": draw.of(
                        b"text/plain", b"", b"application/json; charset=latin-1", b"\xff", b"APPLICATION/JSON"
                    )
                }
            for name in call.headers if draw.chance(0.5) else ():
                value = draw.of("*", f'"{token}"', 'W/"1"', "0", draw.noise(20), str(draw.number()))
                headers[name.lower().encode()] = value.encode("utf-8", "replace").translate(None, b"\r\n\0")
        if draw.chance(0.1):
            odd = draw.of(
                b"content-length", b"traceparent", b"accept", b"authorization", b"cookie", b"origin", b"host",
                b"accept-language", b"if-none-match", b"sec-fetch-site", b"hx-request", b"x-forwarded-for",
                b"accept-encoding",
            )  # fmt: skip
            headers[odd] = draw.noise(60).encode("utf-8", "replace").translate(None, b"\r\n\0")
        # a server hands over paths and queries of visible characters alone
        sent = path.encode("utf-8", "replace").translate(None, bytes(range(33)) + b"?#")
        return (
            method,
            sent or b"/",
            query.encode("ascii", "replace").translate(None, bytes(range(33)) + b"#"),
            headers,
            body,
        )


def well_formed(answered: Answered, method: str, path: bytes) -> None:
    """In the form that this kind of call promises."""
    length = answered.headers.get(b"content-length")
    check(length is None or method == "HEAD" or int(length) == len(answered.body), "its length")
    if method == "HEAD" or not answered.body:
        check(answered.status in (200, 303, 304, 401) or method == "HEAD", f"a {answered.status} without a body")
        return
    if answered.kind == wire.CONTENT_TYPE:
        if answered.status == 200:
            with suppress(msgspec.ValidationError):
                wire.read_welcome(answered.body)
                return
            wire.read_success(answered.body)
        else:
            failure = wire.read_failure(answered.body)
            check(failure.kind and (failure.text or failure.field), "what is wrong")
        return
    if answered.kind == "application/problem+json":
        problem = json.loads(answered.body)
        check(problem["status"] == answered.status, "its status")
        check(problem["type"].startswith("urn:bide:") and problem["title"] and problem["detail"], "what is wrong")
        if answered.status == 422:
            check(problem["field"] and problem["accepted"], "the field, and what would be accepted")
        return
    if answered.kind == "application/json":
        told = json.loads(answered.body)
        refused = answered.status in (404, 409, 412) and isinstance(told, dict) and told["answer"]
        check(answered.status < 300 or refused, f"a {answered.status} that is no problem")
        return
    check(
        not path.startswith(b"/v1/") or answered.kind == "application/x-ndjson" or answered.status == 200,
        f"{answered.kind} of a call",
    )


def stored_right(record: Record) -> None:
    """What came over the wire and is stored now could have been stored by the library."""
    from bide_proofs.fuzz.targets.stored import worked_on

    worked_on(record)
    check(record.topic and record.key and 0 <= record.due_at <= 253_402_300_799_999, f"stored: {record}")


@asynccontextmanager
async def opened(_: Path) -> AsyncIterator[Case]:
    store = FreshStore()
    app = Bide(cast(Any, store), history="off")
    async with Serving(app, ServeConfig(), host="127.0.0.1") as serving:
        yield Fuzzed(app, store, serving).case


TARGETS = (
    Target("requests", "HTTP requests of any kind to the service, store calls and pages too", opened, weight=4.0),
)
