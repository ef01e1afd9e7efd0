"""Requests and replies of the service: bounded reading, routing by the raw path, and errors as problem documents.

All input from unauthenticated callers is limited in bytes and in time: bodies by `Request.read`, heads by
`BoundedHeads`. The HTTP parser itself has no limit and would keep a header that never ends. `BoundedHeads` counts bytes
by chunk. A chunk with the beginning of a head is at most one read of the socket, and is measured exactly only if it
could exceed the limit. So an ordinary request costs two comparisons. The same limit applies between the chunks of a
chunked body, and after the last one. A client that is answered before its body has arrived gets some time to finish.

Errors are `application/problem+json` (RFC 9457); each names the field and the accepted values.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Container, Coroutine, Iterable, Mapping, MutableMapping
from difflib import get_close_matches
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar, get_args, get_origin
from urllib.parse import parse_qsl, unquote_to_bytes

import msgspec
from msgspec import Struct
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from bide.core import errors
from bide.core.answers import Answer
from bide.core.errors import BadInput
from bide.core.names import check_name, check_topic, text_of
from bide.core.records import Result, Topic
from bide.service.access import AccessRefused, Caller, Networks, Verb, header, peer_of
from bide.service.schemas import AnswerShape, ProblemShape, answer_shape

CONTENT_TYPE = "application/problem+json"


class Problem(Exception):
    """An error answer, with the problem and the accepted values."""

    def __init__(
        self, status: int, kind: str, title: str, detail: str, *, headers: dict[str, str] | None = None, **more: Any
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.headers = headers or {}
        self.shape = ProblemShape(type=f"urn:bide:{kind}", title=title, status=status, detail=detail, **more)

    @property
    def body(self) -> bytes:
        return msgspec.json.encode(self.shape)


def shown_value(value: object) -> str | int | float | bool | None:
    """A value in the form in which an answer may repeat it: text cut to 200 characters."""
    if value is None or isinstance(value, bool | int | float):
        return value
    text = text_of(value)
    return text if len(text) <= 200 else f"{text[:199]}…"


_LENGTHS = frozenset({"by", "deadline", "delay", "lease_for", "wait"})
_PLACE = re.compile(r" - at `(?:key in )?\$(.*)`$", re.DOTALL)

_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_LONE_SURROGATE = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])")


def bad_body(error: Exception, kind: Any, body: bytes) -> Problem:
    """The answer to a body that is not JSON, or has a wrong field. `kind`: the type that the call takes."""
    if not isinstance(error, msgspec.ValidationError):
        why = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        cut = _LONE_SURROGATE.search(body)
        if cut is not None:
            why = f"{cut[0].decode()} is half of a character: a text was cut within it"
        fields = ", ".join(sorted(_fields_of(kind, []) | _fields_of(kind, ["["])))
        return Problem(
            400, "bad-json", "The body is not JSON", f"the body is not JSON: {why}", accepted=f"JSON with {fields}"
        )
    text = str(error)
    found = _PLACE.search(text)
    field = found[1].removeprefix(".") if found else "body"
    said = text[: found.start()] if found else text
    unknown = _UNKNOWN_FIELD.fullmatch(said)
    if unknown is not None:
        names = sorted(_fields_of(kind, re.findall(r"\.\w+|\[", found[1]) if found else []))
        near = get_close_matches(unknown[1], names, n=1)
        said = f"no such field; did you mean {near[0]}?" if near else f"no such field; there are {', '.join(names)}"
        field = unknown[1] if field in ("body", "") else f"{field}.{unknown[1]}"
    if field in _LENGTHS and said.endswith(("got `int`", "got `float`")):
        said = 'a duration as text, such as "15m", "1h30m" or "1.5s"'
    return Problem(
        422, "bad-input", "A value is not accepted", f"{field or 'body'}: {said}", field=field or "body", accepted=said
    )


def _fields_of(kind: Any, place: list[str]) -> set[str]:
    """The names of the fields at a place within a type of `schemas`: by `.name` in an object and by `[` in a list."""
    if isinstance(kind, type) and issubclass(kind, Struct):
        fields = msgspec.structs.fields(kind)
        if not place:
            return {one.encode_name for one in fields}
        return set[str]().union(
            *(_fields_of(one.type, place[1:]) for one in fields if f".{one.encode_name}" == place[0])
        )
    if get_origin(kind) in (list, dict):
        place = place[1:] if place[:1] == ["["] else [""]
    return set[str]().union(*(_fields_of(one, place) for one in get_args(kind)))


class _Meaning(NamedTuple):
    status: int
    kind: str
    title: str
    detail: str = ""
    """Empty: the text of the error itself, which callers may read."""
    retry_after: str = ""
    """Seconds after which a retry makes sense."""


_DAMAGED = _Meaning(503, "store-damaged", "The store is damaged", "the service's log says what is wrong", "5")
_MEANINGS: Mapping[type[Exception], _Meaning] = {
    errors.StoreFull: _Meaning(
        507, "store-full", "The store is full", "nothing was done; the tasks in it still drain", "5"
    ),
    errors.OutcomeUnknown: _Meaning(
        504,
        "outcome-unknown",
        "The store's answer was lost",
        "the call was done once or not at all; check before you try again",
    ),
    errors.StoreCorrupt: _DAMAGED,
    errors.StoreMismatch: _DAMAGED,
    errors.StoreError: _Meaning(503, "store-away", "The store is unavailable", "nothing was done; try again", "1"),
    errors.SetupError: _Meaning(501, "not-here", "This store does not support it"),
    errors.BideError: _Meaning(409, "conflict", "Not possible now"),
    Exception: _Meaning(500, "defect", "A defect", "a defect of the service; its log says where"),
}
"""The answer to each error of the engine or the store, by the first type that matches. The address of the store and
the text of its driver are for the log, not for callers."""


def problem_of(error: Exception) -> Problem:
    """The answer to any error of the service, the engine or the store."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, BadInput):
        return Problem(
            422, "bad-input", "A value is not accepted", f"{error.field}: {error.accepted}",
            field=error.field, value=shown_value(error.value), accepted=error.accepted,
        )  # fmt: skip
    if isinstance(error, AccessRefused):
        challenge = {"www-authenticate": error.challenge}
        return Problem(error.status, error.title.lower(), error.title, error.detail, headers=challenge)
    meaning = next(meaning for kind, meaning in _MEANINGS.items() if isinstance(error, kind))
    return Problem(
        meaning.status, meaning.kind, meaning.title, meaning.detail or str(error),
        headers={"retry-after": meaning.retry_after} if meaning.retry_after else {},
    )  # fmt: skip


def too_large(limit: int) -> Problem:
    return Problem(
        413, "too-large", "The body is too large", f"the body is larger than {limit} bytes; send several smaller ones",
        field="body", accepted=f"at most {limit} bytes",
    )  # fmt: skip


JSON = "application/json"
STATUS: Mapping[Result, int] = {
    Result.CREATED: 201,
    Result.NOT_FOUND: 404,
    Result.REFUSED: 409,
    Result.UNDER_WAY: 409,
    Result.FINISHED: 409,
    Result.STALE_TOKEN: 409,
}
"""The status by result; 200 for all others, which mean success."""

encode = msgspec.json.Encoder().encode


class Reply(Struct, frozen=True):
    status: int
    body: bytes
    content_type: str = JSON
    headers: Mapping[str, str] = {}


class StreamingReply(NamedTuple):
    parts: AsyncGenerator[bytes, None]
    content_type: str


def reply(shape: Any) -> Reply:
    """200 with this body."""
    return Reply(200, encode(shape))


def reply_to(
    answer: Answer, caller: Caller, *, condition: Container[Result] = (), paused: Container[Topic] = ()
) -> Reply:
    """The part of the reply to a verb that the caller may see. `condition`: the results that mean an unmet condition of
    the headers. `paused`: see `answer_shape`."""
    status = 412 if answer.result in condition else STATUS.get(answer.result, 200)
    return Reply(status, encode(shape_for(caller, answer, paused)), headers=etag(answer))


def shape_for(caller: Caller, answer: Answer, paused: Container[Topic], *, sent: bool = True) -> AnswerShape:
    """The part of the answer to a verb that the caller may see. `sent`: see `Caller.seen`."""
    seen = caller.seen(answer, sent=sent)
    return answer_shape(seen, paused=paused, withheld=seen is not answer)


def etag(answer: Answer) -> dict[str, str]:
    record = answer.record
    return {} if record is None or answer.result is Result.NOT_FOUND else {"etag": f'"{record.token}"'}


BODY_LIMIT = 16 * 2**20
"""The most bytes of a body."""
BODY_PATIENCE = 30.0
"""The most seconds for a body to arrive."""
OPEN_LIMIT = 16_384
"""The most bytes of a body whose sender is not authenticated."""
Ask = TypeVar("Ask")
T = TypeVar("T")
_HALF_ENCODED = re.compile(rb"%(?![0-9A-Fa-f]{2})")
_NOBODY = Caller("nobody", verbs=frozenset(), topics=())
Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
"""An ASGI event, received or sent."""
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class ClientDisconnected(Exception):
    """The client has disconnected, so there is no one to answer."""


class Request:
    """A request, read from ASGI. `caller` is its sender, once authenticated."""

    __slots__ = (
        "_receive", "_scope", "body", "caller", "headers", "method", "path", "proxies", "raw_query",
        "reauthorize", "segments",
    )  # fmt: skip

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self._receive = receive
        self.method: str = scope["method"]
        self.path: bytes = (scope.get("raw_path") or scope["path"].encode()).partition(b"?")[0]
        self.raw_query: bytes = scope["query_string"]
        """The query after the question mark, as it was sent; an empty one is `?`."""
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        if len(self.headers) != len(scope["headers"]):
            for name in (b"if-match", b"if-none-match"):
                if name in self.headers:  # several lines are one list (RFC 9110, 5.3)
                    self.headers[name] = b", ".join(value for sent, value in scope["headers"] if sent == name)
        self._scope = scope
        self.proxies: Networks = ()
        """The proxies whose X-Forwarded-For is trusted."""
        self.body = b""
        self.caller = _NOBODY
        self.segments: tuple[str, ...] = ()
        self.reauthorize: Callable[[], Awaitable[float]]
        """Checks the caller again: raises if they lost access, else returns the seconds until the next check."""

    def header(self, name: bytes) -> str | None:
        return header(self.headers, name)

    @property
    def peer(self) -> str:
        client = self._scope.get("client")
        return peer_of(client[0] if client else "local", self.header(b"x-forwarded-for"), self.proxies)

    def check_host(self) -> None:
        """Raise Problem if Host comes twice, since it is ambiguous which one applies (RFC 9112, 3.2)."""
        sent = self._scope["headers"]
        if len(sent) != len(self.headers) and sum(name == b"host" for name, _ in sent) > 1:
            raise Problem(400, "bad-host", "Host comes twice", "send one Host header", field="host")

    async def read(self, limit: int = BODY_LIMIT) -> None:
        """Read the body, at most `limit` bytes.

        Raises Problem for one that is too large or comes too slowly; ClientDisconnected.
        """
        length = self.headers.get(b"content-length")
        if length is not None and length.isdigit() and (len(length) > 19 or int(length) > limit):
            raise too_large(limit)
        try:
            async with asyncio.timeout(BODY_PATIENCE):
                parts: list[bytes] = []
                size, more = 0, True
                while more:
                    message = await self._receive()
                    if message["type"] != "http.request":
                        raise ClientDisconnected
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > limit:
                        raise too_large(limit)
                    more = message.get("more_body", False)
                self.body = b"".join(parts)
        except TimeoutError:
            raise Problem(
                408, "too-slow", "The body arrived too slowly", f"the body was not complete after {BODY_PATIENCE:g} s",
                headers={"connection": "close"},
            ) from None  # fmt: skip

    async def gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def while_connected(self, work: Coroutine[Any, Any, T], undo: Callable[[T], object] = lambda _: None) -> T:
        """Return the result of `work`, however long it takes, while the caller is connected and has access.

        Raises ClientDisconnected if the client disconnects, and the error of `reauthorize` if the caller loses access;
        that is checked periodically, and once more before the result is returned. In both cases `work` is cancelled,
        and `undo` is called with any result it has returned.
        """
        working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(self.gone())
        theirs = False
        try:
            while not working.done():
                lasts = await self.reauthorize()
                await asyncio.wait([working, leaving], timeout=max(0.0, lasts), return_when=asyncio.FIRST_COMPLETED)
                if leaving.done():
                    raise ClientDisconnected
            await self.reauthorize()
            theirs = True
            return working.result()
        finally:
            for task in (working, leaving):
                task.cancel()
            [result, _] = await asyncio.gather(working, leaving, return_exceptions=True)
            if not theirs and not isinstance(result, BaseException):
                undo(result)

    def decoded(self, decoder: msgspec.json.Decoder[Ask]) -> Ask:
        """Decode the body as the type that the call takes. Raises Problem that names the field."""
        kind = self.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if kind != b"application/json":
            raise Problem(
                415, "not-json", "The body has to be application/json",
                f"content-type: {kind.decode('latin-1') or 'none'}; send application/json",
                field="content-type", accepted="application/json",
            )  # fmt: skip
        try:
            if not self.body.isascii():
                self.body.decode()  # the decoder skips a payload without checking that its text is UTF-8
            return decoder.decode(self.body)
        except (ValueError, RecursionError) as error:
            raise bad_body(error, decoder.type, self.body) from None

    def query(self, known: tuple[str, ...]) -> dict[str, str]:
        """The query parameters, each at most once. Raises BadInput for an unknown one."""
        query = b"" if self.raw_query == b"?" and not self.segments else self.raw_query
        try:
            _check_percents(query)
            pairs = parse_qsl(
                query.decode("ascii"), keep_blank_values=True, strict_parsing=bool(query), errors="strict"
            )
        except ValueError:
            raise BadInput("query", query.decode("latin-1"), "name=value&..., percent-encoded") from None
        found: dict[str, str] = {}
        for name, value in pairs:
            if name not in known:
                raise BadInput("query", name, f"parameters named {', '.join(known)}" if known else "no query")
            if name in found:
                raise BadInput(name, value, "one value")
            found[name] = value
        return found

    def ref(self, verb: Verb) -> tuple[str, str]:
        """The topic and the key in the path, if the caller may use `verb` on the topic. Raises BadInput, Forbidden."""
        topic, key = self.segments
        check_topic(topic)
        check_name("key", key)
        self.caller.check(verb, topic)
        return topic, key


class Routes(Generic[T]):
    """A table by path and method. A part of a path in braces matches any text, still percent-encoded."""

    def __init__(self, routes: Iterable[tuple[str, str, T]]) -> None:
        by_path: dict[str, dict[str, T]] = {}
        for method, path, one in routes:
            its = by_path.setdefault(path, {})
            its[method] = one
            if method == "GET":
                its["HEAD"] = one
        self._exact = {path.encode(): its for path, its in by_path.items() if "{" not in path}
        self._open = [
            (re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", path).encode()), its)
            for path, its in by_path.items()
            if "{" in path
        ]

    def find(self, path: bytes) -> tuple[Mapping[str, T], Mapping[str, bytes]] | None:
        """Return the entries at this path by method, and the parts in braces by name; None if there is no such path."""
        exact = self._exact.get(path)
        if exact is not None:
            return exact, {}
        for pattern, its in self._open:
            found = pattern.fullmatch(path)
            if found is not None:
                return its, found.groupdict()
        return None


def segment(raw: bytes, field: str) -> str:
    """Decode one part of a path. Raises BadInput."""
    try:
        _check_percents(raw)
        return unquote_to_bytes(raw).decode()
    except ValueError:
        raise BadInput(field, raw.decode("latin-1"), "percent-encoded UTF-8") from None


def _check_percents(raw: bytes) -> None:
    """Raise ValueError for a stray `%`: decoding would keep it, so that two paths would mean one key."""
    if _HALF_ENCODED.search(raw):
        raise ValueError("a % that begins no encoded byte")


HEAD_LIMIT = 65_536
"""The most bytes of a request line and its headers."""
HEAD_PATIENCE = 30.0
"""The most seconds for them to arrive, from the connection or from their first byte."""


class BoundedHeads(HttpToolsProtocol):
    """uvicorn's protocol with limits on the head of a request."""

    _begun = 0
    """Heads so far."""
    _open = True
    """True while a head is awaited or read."""
    _size = 0
    """Bytes of this head; within a chunked body, bytes that are not part of the body."""
    _part = False
    """True if the last bytes held part of a body, or the end of a request."""
    _doubtful = False
    """True if the last bytes may be too many."""
    _too_large = False
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._timer = self.loop.call_later(HEAD_PATIENCE, self._late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        begun, self._part = self._begun, False
        self._doubtful = self._size + len(data) > HEAD_LIMIT
        super().data_received(data)
        if self.transport.is_closing():
            return
        if begun == self._begun and not self._part:
            self._size += len(data)
        if self._size > HEAD_LIMIT:
            if self._open:
                self._refuse(_TOO_LARGE)
            else:
                self.transport.close()
        elif self._open and self._timer is None:
            self._timer = self.loop.call_later(HEAD_PATIENCE, self._late)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._begun += 1
        self._open, self._size = True, 0

    def on_headers_complete(self) -> None:
        self._closed()
        if self._doubtful and len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > HEAD_LIMIT:
            self._too_large = True
            raise ValueError("too large")  # the parser turns this into a bad request
        super().on_headers_complete()
        if self.url.find(b"?") == len(self.url) - 1:  # an empty query, which the parser cannot tell from none
            self.scope["query_string"] = b"?"
        self._size = 0

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._part, self._size = True, 0

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._closed()
        self._part, self._size = True, 0

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.more_body and self.cycle.response_complete and self._timer is None:
            self._timer = self.loop.call_later(HEAD_PATIENCE, self.transport.close)

    def send_400_response(self, msg: str) -> None:
        if self._too_large:
            self._refuse(_TOO_LARGE)
        else:
            super().send_400_response(msg)

    def _closed(self) -> None:
        self._open = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        if self._begun:
            self._refuse(_TOO_SLOW)
        else:
            self.transport.close()

    def _refuse(self, problem: Problem) -> None:
        self._closed()
        said = f"content-type: {CONTENT_TYPE}\r\ncontent-length: {len(problem.body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(f"HTTP/1.1 {problem.status} {problem.shape.title}\r\n{said}".encode() + problem.body)
        self.transport.close()


_TOO_LARGE = Problem(
    431, "head-too-large", "Request Header Fields Too Large", f"the headers are larger than {HEAD_LIMIT} bytes",
    field="headers", accepted=f"at most {HEAD_LIMIT} bytes",
)  # fmt: skip
_TOO_SLOW = Problem(408, "too-slow", "Request Timeout", f"the headers were not complete after {HEAD_PATIENCE:g} s")
