"""The store calls: bide's own clients use the service as their store. See `ports.wire` and `ports.remote`.

calls = StoreCalls(client)                                      # the client is open
reply = await calls.answer(operation, body, caller)          # POST /v1/store/{operation}; errors are answers too
async for line in calls.listen(body, caller): ...               # POST /v1/store/listen
await calls.close()                                             # before the client

Nothing that comes in is trusted: `ports.remote` says for each operation how every field is checked and which access the
caller needs, and answers leave out what the caller may not see.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar

from msgspec import Raw
from msgspec.structs import replace

from bide._version import __version__
from bide.core.answers import Answer
from bide.core.errors import BadInput, BideError
from bide.core.instants import Millis
from bide.core.records import Topic
from bide.engine.acting import acting_as
from bide.engine.client import Client
from bide.engine.pauses import HeldBack
from bide.ports import Notifies, remote, wire
from bide.ports.remote import OPERATIONS, Bounds, Needs, Operation
from bide.ports.wire import Batch, Call, Failure
from bide.service.audit import audit
from bide.service.authz import ALL_VERBS, AccessRefused, Caller, Verb
from bide.service.remote.idempotency import PassedOver, Sessions
from bide.service.remote.operations import StoreOperations
from bide.service.replies import Reply, of_error
from bide.service.requests import BODY_LIMIT

_log = logging.getLogger("bide.service")
Request = TypeVar("Request")
_WRITING = ALL_VERBS - {Verb.READ, Verb.METRICS, Verb.EVENTS}
"""With any of these a caller has something to do in a session."""


class StoreCalls:
    """Belongs to the event loop in which `client` is open.

    `held_back`: what is paused, which nobody leases from here. `body_limit`: what clients are told to keep to.
    `trusting` is for tests of the messages alone: the callers' clocks count, options may be any bytes, and the log of
    events is theirs alone.
    """

    def __init__(
        self,
        client: Client,
        *,
        held_back: HeldBack | None = None,
        body_limit: int = BODY_LIMIT,
        trusting: bool = False,
    ) -> None:
        self._client = client
        self._body_limit = body_limit
        self._trusting = trusting
        self._bounds = Bounds(client.terms.payload_limit, trusting)
        self._sessions = Sessions()
        self._ending = False
        self._streams: set[asyncio.Event] = set()
        """Of each open stream what wakes it."""
        self._operations = StoreOperations(client, trusting=trusting, held_back=held_back)
        self._handlers = {name: getattr(self._operations, name) for name in OPERATIONS}

    async def answer(self, name: str, body: bytes, caller: Caller) -> Reply:
        """The answer to one call, also where it is an error. A body that is too large is for the caller to refuse."""
        try:
            if name == "open":
                return self._open(body, caller)
            operation = OPERATIONS.get(name)
            if operation is None:
                raise BadInput("operation", name, f"one of open, listen, {', '.join(OPERATIONS)}")
            call = wire.read_call(body)
            request, refused = self._checked(operation, call.request, caller)
            work = partial(self._do, operation, request, refused, call, caller)
            if not operation.once:
                return await work()
            session = self._sessions.session(call.session, _identity(caller))
            if session is not None:
                return await self._sessions.once(session, name, call.number, work)
            if self._sessions.began(call.session):
                return _failed(409, Failure(wire.SESSION, "this session has ended; begin another"))
            return _failed(409, Failure(wire.ELSEWHERE, "this session began with another instance"))
        except PassedOver:
            return _failed(409, Failure(wire.FORGOTTEN, "the answer to this call is no longer known"))
        except wire.UNREADABLE as error:
            return _failed(400, Failure("bad_input", "", "body", None, f"what a client of bide sends ({error})"))
        except Exception as error:  # noqa: BLE001 - a defect is this call's alone
            return self._refused(error, name)

    def listen(self, body: bytes, caller: Caller) -> AsyncGenerator[bytes, None]:
        """The lines of a stream, for as long as somebody reads them. Raises BadInput, Forbidden before it begins."""
        try:
            topics = remote.LISTEN.read_request(wire.read_call(body).request)
        except wire.UNREADABLE as error:
            raise BadInput("body", f"{len(body)} bytes", f"what a client of bide sends ({error})") from None
        self._check(remote.LISTEN, topics, caller)
        return self._wakes(topics)

    def let_go(self) -> None:
        """End the streams, also those to come; their listeners subscribe again, here or elsewhere."""
        self._ending = True
        for news in self._streams:
            news.set()

    async def close(self) -> None:
        """End the streams, and wait for the calls that are under way."""
        self.let_go()
        await self._sessions.close()
        await self._operations.close()

    # --- around the operations

    def _open(self, body: bytes, caller: Caller) -> Reply:
        hello = wire.read_hello(body)
        session = ""
        if hello.wire == wire.WIRE:
            if hello.clock != "server" and not self._trusting:
                raise BadInput("clock", hello.clock, '"server": the service goes by its own')
            session = self._sessions.begin(_identity(caller), writes=not _WRITING.isdisjoint(caller.verbs))
        welcome = wire.Welcome(
            service=wire.SERVICE, wire=wire.WIRE, version=__version__, session=session, micros=self._micros(),
            body_limit=self._body_limit,
        )  # fmt: skip
        return Reply(200, wire.encode(welcome), wire.CONTENT_TYPE)

    def _checked(self, operation: Operation[Any, Any], raw: Raw, caller: Caller) -> tuple[Any, dict[int, Exception]]:
        """The request, if it is in order; of a batch the items that are, and by place what is wrong with the others,
        since clients fold the calls of many into one. Raises BadInput, AccessRefused where nothing is left."""
        request = operation.read_request(raw)
        if not isinstance(request, Batch):
            self._check(operation, request, caller)
            return request, {}
        remote.check_count("items", request.items)
        try:
            self._check(operation, request, caller)
        except (BadInput, AccessRefused):
            if len(request.items) == 1:
                raise
        else:
            return request, {}
        good: list[Any] = []
        refused: dict[int, Exception] = {}
        for place, item in enumerate(request.items):
            try:
                self._check(operation, replace(request, items=[item]), caller)
                good.append(item)
            except (BadInput, AccessRefused) as error:
                refused[place] = error
        if not good:
            self._check(operation, request, caller)
        return replace(request, items=good), refused

    def _check(self, operation: Operation[Request, Any], request: Request, caller: Caller) -> None:
        operation.check(request, self._bounds)
        _permit(caller, operation.needs(request))

    async def _do(
        self, operation: Operation[Any, Any], request: Any, refused: Mapping[int, Exception], call: Call, caller: Caller
    ) -> Reply:
        try:
            now = self._client.clock.now() if call.now is None or not self._trusting else call.now
            with nullcontext() if self._trusting else acting_as(caller.name, audit):
                answer = await self._handlers[operation.name](request, caller, now)
            failed: dict[int, Failure] = {}
            if isinstance(request, Batch):
                answer, failed = _by_place(answer, refused, caller)
            body = wire.encode(wire.Success(self._micros(), Raw(wire.encode(answer)), failed))
            return Reply(200, body, wire.CONTENT_TYPE)
        except Exception as error:  # noqa: BLE001 - the answer of a call that is sent again is an error as well
            return self._refused(error, operation.name)

    def _micros(self) -> int:
        """The time now, with the part that the clock's milliseconds leave out."""
        clock = self._client.clock
        now = clock.now()
        return now * 1000 + min(max(int(-clock.seconds_until(now) * 1e6), 0), 999)

    def _refused(self, error: Exception, name: str) -> Reply:
        if not isinstance(error, BideError):
            _log.error("a defect in %s of the store calls", name, exc_info=error)
        problem = of_error(error)
        return _failed(problem.status, _failure(error), problem.headers)

    async def _wakes(self, topics: Sequence[Topic]) -> AsyncGenerator[bytes, None]:
        """Lines of JSON, the first as soon as it is subscribed. Of a topic only the earliest wake waits to be sent, so
        a client that reads slowly costs no more memory than its topics. Ends with all streams."""
        earliest: dict[Topic, Millis] = {}
        news = asyncio.Event()

        def heard(topic: Topic, wake: Millis) -> None:
            earliest[topic] = min(wake, earliest.get(topic, wake))
            news.set()

        store = self._client.store
        listening = await store.listen(topics, heard) if isinstance(store, Notifies) else None
        self._streams.add(news)
        try:
            yield b"\n"
            while not self._ending:
                try:
                    async with asyncio.timeout(wire.HEARTBEAT):
                        await news.wait()
                except TimeoutError:
                    yield b"\n"
                    continue
                news.clear()
                lines = b"".join(wire.encode_wake(wake) + b"\n" for wake in earliest.items())
                earliest.clear()
                if lines:
                    yield lines
        finally:
            self._streams.discard(news)
            if listening is not None:
                await listening.close()


def _permit(caller: Caller, needs: Needs) -> None:
    """Raises Forbidden unless the caller has the access that is needed."""
    for name, topics in needs.items():
        verb = Verb(name)
        if topics:
            caller.check_all(verb, topics)
        elif topics is None or verb not in caller.verbs:
            caller.check(verb, None)


def _by_place(
    answers: Sequence[object], refused: Mapping[int, Exception], caller: Caller
) -> tuple[list[object], dict[int, Failure]]:
    """The answers as the caller may see them, None in the place of each error, and the errors by place."""
    rest = iter(answers)
    all_ = [refused[at] if at in refused else next(rest) for at in range(len(answers) + len(refused))]
    failed = {at: _failure(one) for at, one in enumerate(all_) if isinstance(one, Exception)}
    seen = [caller.seen(one) if isinstance(one, Answer) else one for one in all_]
    return [None if at in failed else one for at, one in enumerate(seen)], failed


def _identity(caller: Caller) -> str:
    return caller.id or caller.name


def _failure(error: Exception) -> Failure:
    return Failure(wire.REFUSED, str(error)) if isinstance(error, AccessRefused) else wire.failure_of(error)


def _failed(status: int, failure: Failure, headers: Mapping[str, str] = {}) -> Reply:
    return Reply(status, wire.encode(failure), wire.CONTENT_TYPE, headers)
