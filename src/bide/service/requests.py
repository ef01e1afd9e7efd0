"""One request as the calls see it: read from ASGI with a limit in bytes and in time, the path still as it was sent."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar
from urllib.parse import parse_qsl, unquote_to_bytes

import msgspec
from starlette.types import Receive, Scope

from bide.core.errors import BadInput
from bide.core.names import check_name, check_topic
from bide.service.callers import Caller
from bide.service.origins import Networks, peer_of
from bide.service.problems import Problem, bad_body, bad_input, too_large

BODY_LIMIT = 16 * 2**20
"""Bytes that a request may have."""
BODY_PATIENCE = 30.0
"""Seconds that a request's body may take."""
OPEN_LIMIT = 16_384
"""Bytes that a request may have of which nobody knows who sent it."""
Ask = TypeVar("Ask")
T = TypeVar("T")
_HALF_ENCODED = re.compile(rb"%(?![0-9A-Fa-f]{2})")
_NOBODY = Caller("nobody", verbs=frozenset(), topics=())


class Gone(Exception):
    """The client has gone: nobody is there to be answered."""


class Request:
    """A request. `caller` is who sent it, once that is known."""

    __slots__ = (
        "_query", "_receive", "_scope", "body", "caller", "headers", "limits", "method", "path", "proxies", "segments",
        "still",
    )  # fmt: skip

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self._receive = receive
        self.method: str = scope["method"]
        self.path: bytes = (scope.get("raw_path") or scope["path"].encode()).partition(b"?")[0]
        self._query: bytes = scope["query_string"]
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self._scope = scope
        self.proxies: Networks = ()
        """Whose word on the address of a caller counts."""
        self.limits = (BODY_LIMIT, BODY_PATIENCE)
        """Bytes and seconds that its body may take."""
        self.body = b""
        self.caller = _NOBODY
        self.segments: tuple[str, ...] = ()
        self.still: Callable[[], Awaitable[float]]
        """Raises when the caller may call no longer; else the seconds after which to ask again. Set with `caller`."""

    @property
    def raw_query(self) -> bytes:
        """What follows the question mark, as it was sent."""
        return self._query

    def header(self, name: bytes) -> str | None:
        """The value of a header. Raises Problem where it is not text."""
        value = self.headers.get(name)
        return None if value is None else value.decode("latin-1")

    @property
    def peer(self) -> str:
        """The address that it came from."""
        client = self._scope.get("client")
        return peer_of(client[0] if client else "local", self.header(b"x-forwarded-for"), self.proxies)

    def check_host(self) -> None:
        """Raises Problem where Host comes twice: which of them counts is not to be guessed (RFC 9112, 3.2)."""
        sent = self._scope["headers"]
        if len(sent) != len(self.headers) and sum(name == b"host" for name, _ in sent) > 1:
            raise Problem(400, "bad-host", "Host comes twice", "send one Host header", field="host")

    async def read(self, most: int | None = None) -> None:
        """Take in the body; at most `most` bytes where nobody is known yet.

        Raises Problem for one that is too large or comes too slowly; Gone.
        """
        limit, patience = self.limits
        limit = limit if most is None else min(limit, most)
        length = self.headers.get(b"content-length")
        if length is not None and length.isdigit() and (len(length) > 19 or int(length) > limit):
            raise too_large(limit)
        try:
            async with asyncio.timeout(patience):
                await self._read(limit)
        except TimeoutError:
            raise Problem(
                408, "too-slow", "The body came too slowly", f"the body was not complete after {patience:g} s",
                headers={"connection": "close"},
            ) from None  # fmt: skip

    async def _read(self, limit: int) -> None:
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] != "http.request":
                raise Gone
            part = message.get("body", b"")
            size += len(part)
            if size > limit:
                raise too_large(limit)
            if not message.get("more_body"):
                self.body = part if not parts else b"".join([*parts, part])
                return
            parts.append(part)

    async def gone(self) -> None:
        """Returns when the client has gone."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def attended(self, work: Coroutine[Any, Any, T], undo: Callable[[T], object] = lambda _: None) -> T:
        """What `work` returns, however long it takes. The one place that looks after a caller who waits.

        Raises Gone as the client goes, and what `still` raises as they may call no longer: that is asked by the clock,
        and once more before the result is theirs. Then `work` is cancelled; what it has returned is undone.
        """
        working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(self.gone())
        theirs = False
        try:
            while not working.done():
                lasts = await self.still()
                await asyncio.wait([working, leaving], timeout=max(0.0, lasts), return_when=asyncio.FIRST_COMPLETED)
                if leaving.done():
                    raise Gone
            await self.still()
            theirs = True
            return working.result()
        finally:
            for task in (working, leaving):
                task.cancel()
            [result, _] = await asyncio.gather(working, leaving, return_exceptions=True)
            if not theirs and not isinstance(result, BaseException):
                undo(result)

    def decoded(self, decoder: msgspec.json.Decoder[Ask], accepted: str) -> Ask:
        """The body as what the call takes. Raises Problem that names the field."""
        kind = self.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if kind != b"application/json":
            raise Problem(
                415, "not-json", "Only JSON is taken",
                f"content-type: {kind.decode('latin-1') or 'none'}; send application/json",
                field="content-type", accepted="application/json",
            )  # fmt: skip
        try:
            if not self.body.isascii():
                self.body.decode()  # the decoder passes over a payload without looking into its text
            return decoder.decode(self.body)
        except (ValueError, RecursionError) as error:
            raise bad_body(error, accepted, decoder.type, self.body) from None

    def query(self, known: tuple[str, ...]) -> dict[str, str]:
        """The parameters after the question mark, each at most once. Raises Problem for one that is not known."""
        try:
            _check_percents(self._query)
            pairs = parse_qsl(
                self._query.decode("ascii"), keep_blank_values=True, strict_parsing=bool(self._query), errors="strict"
            )
        except ValueError:
            raise bad_input(
                BadInput("query", self._query.decode("latin-1"), "name=value&..., percent-encoded")
            ) from None
        found: dict[str, str] = {}
        for name, value in pairs:
            if name not in known:
                raise bad_input(
                    BadInput("query", name, f"parameters named {', '.join(known)}" if known else "no query")
                )
            if name in found:
                raise bad_input(BadInput(name, value, "one value"))
            found[name] = value
        return found

    @property
    def ref(self) -> tuple[str, str]:
        """The topic and the key in the path. Raises Problem."""
        topic, key = self.segments
        try:
            return check_topic(topic), check_name("key", key)
        except BadInput as error:
            raise bad_input(error) from None


def segment(raw: bytes, field: str) -> str:
    """One part of a path, percent-decoded. Raises Problem."""
    try:
        _check_percents(raw)
        return unquote_to_bytes(raw).decode()
    except ValueError:
        raise bad_input(BadInput(field, raw.decode("latin-1"), "percent-encoded UTF-8")) from None


def _check_percents(raw: bytes) -> None:
    """Decoding would leave them as they are, and so two paths would mean one key. Raises ValueError."""
    if _HALF_ENCODED.search(raw):
        raise ValueError("a % that begins no encoded byte")
