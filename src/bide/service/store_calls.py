"""The store calls: how bide's own clients use the service as their store. See `ports.wire` for what is said.

calls = StoreCalls(client, told=audit.told, body_limit=limit)   # the client is open
answered = await calls.answer(operation, body, caller)          # POST /v1/store/{operation}; errors are answers too
async for line in calls.listen(body, caller): ...               # POST /v1/store/listen
await calls.close()                                             # before the client
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import nullcontext

from msgspec import Raw

from bide._version import __version__
from bide.core.errors import BadInput, BideError
from bide.core.instants import Millis
from bide.core.records import Topic
from bide.engine.acting import Told, acting_as
from bide.engine.client import Client
from bide.engine.pauses import HeldBack
from bide.ports import wire
from bide.ports.wire import Call, Failure
from bide.service import store_checks as checks
from bide.service.callers import ALL_VERBS, AccessRefused, Caller, Verb
from bide.service.store_operations import Act, Operations
from bide.service.store_repeats import Answered, PassedOver, Repeats
from bide.service.store_tidings import Streams, tidings

__all__ = ["Answered", "StoreCalls"]

_log = logging.getLogger("bide.service")
BODY_LIMIT = 8 << 20
_HEADERS = {"content-type": wire.CONTENT_TYPE}
_WRITING = ALL_VERBS - {Verb.READ, Verb.METRICS, Verb.EVENTS}
"""With any of these a caller has something to do in a session."""
_AWAY = {**_HEADERS, "retry-after": "1"}


class StoreCalls:
    """Belongs to the event loop in which `client` is open.

    `told` hears of every change, by whom; `body_limit` is what clients are told to keep to. `trusting` is for tests of
    the wire alone: the callers' clocks count, options may be any bytes, and the log of events is theirs alone.
    `held_back`: what is paused, which nobody leases from here.
    """

    def __init__(
        self,
        client: Client,
        *,
        told: Told | None = None,
        body_limit: int = BODY_LIMIT,
        trusting: bool = False,
        held_back: HeldBack | None = None,
    ) -> None:
        self._client = client
        self._told = told
        self._body_limit = body_limit
        self._trusting = trusting
        self._repeats = Repeats()
        self._streams = Streams()
        self._operations = Operations(client, trusting=trusting, held_back=held_back)

    async def answer(self, operation: str, body: bytes, caller: Caller) -> Answered:
        """The answer to one call, also where it is an error. A body that is too large is for the caller to refuse."""
        try:
            if operation == "open":
                return self._open(body, caller)
            prepare = self._operations.all.get(operation)
            if prepare is None:
                raise BadInput("operation", operation, f"one of open, listen, {', '.join(self._operations.all)}")
            call = wire.read_call(body)
            act = prepare(call.asked, caller, self._now(call))
            if operation not in wire.ONCE:
                return await self._do(act, call, caller)
            session = self._repeats.session(call.session, _who(caller))
            if session is None:
                if self._repeats.began(call.session):
                    return _failed(409, Failure(wire.SESSION, "this session has ended; begin another"))
                return _failed(409, Failure(wire.ELSEWHERE, "this session began with another instance"))
            return await self._repeats.once(session, operation, call.number, lambda: self._do(act, call, caller))
        except PassedOver:
            return _failed(409, Failure(wire.FORGOTTEN, "the answer to this call is no longer known"))
        except wire.UNREADABLE as error:
            return _failed(400, Failure("bad_input", "", "body", None, f"what a client of bide sends ({error})"))
        except Exception as error:  # noqa: BLE001 - a defect is this call's alone
            return self._refused(error, operation)

    def listen(self, body: bytes, caller: Caller) -> AsyncGenerator[bytes, None]:
        """The lines of a stream, for as long as somebody reads them. Check with `check_listen` before it begins."""
        return tidings(self._client.store, self.check_listen(body, caller), self._streams)

    def check_listen(self, body: bytes, caller: Caller) -> list[Topic]:
        """What they want to listen to. Raises BadInput, Forbidden."""
        try:
            topics = wire.read_topics(wire.read_call(body).asked)
        except wire.UNREADABLE as error:
            raise BadInput("body", f"{len(body)} bytes", f"what a client of bide sends ({error})") from None
        checks.check_count("topics", topics)
        checks.check_topics(topics)
        caller.check_all(Verb.WORK, topics)
        return topics

    def let_go(self) -> None:
        """End the streams, so that their connections end; whoever listened subscribes again, here or elsewhere."""
        self._streams.end()

    async def close(self) -> None:
        """End the streams, and wait for what is under way."""
        self.let_go()
        await self._repeats.close()
        await self._operations.close()

    # --- around the operations

    def _open(self, body: bytes, caller: Caller) -> Answered:
        hello = wire.read_hello(body)
        session = ""
        if hello.wire == wire.WIRE:
            if hello.clock != "server" and not self._trusting:
                raise BadInput("clock", hello.clock, '"server": the service goes by its own')
            session = self._repeats.begin(_who(caller), writes=not _WRITING.isdisjoint(caller.verbs))
        welcome = wire.Welcome(
            service=wire.SERVICE, wire=wire.WIRE, version=__version__, session=session, micros=self._micros(),
            body_limit=self._body_limit,
        )  # fmt: skip
        return Answered(200, wire.encode(welcome), _HEADERS)

    def _now(self, call: Call) -> Millis:
        if self._trusting and call.now is not None:
            return call.now
        return self._client.clock.now()

    def _micros(self) -> int:
        """What time it is, with what the clock's milliseconds leave out."""
        clock = self._client.clock
        now = clock.now()
        return now * 1000 + min(max(int(-clock.seconds_until(now) * 1e6), 0), 999)

    async def _do(self, act: Act, call: Call, caller: Caller) -> Answered:
        try:
            with nullcontext() if self._trusting else acting_as(caller.name, self._told):
                answer, failed = await act(self._now(call))
            body = wire.encode(wire.Told(self._micros(), Raw(wire.encode(answer)), failed))
            return Answered(200, body, _HEADERS)
        except Exception as error:  # noqa: BLE001 - the answer of a call that is sent again is an error as well
            return self._refused(error, "a call")

    def _refused(self, error: Exception, operation: str) -> Answered:
        if isinstance(error, AccessRefused):
            challenge = {**_HEADERS, "www-authenticate": error.challenge}
            return _failed(error.status, Failure(wire.REFUSED, str(error)), challenge)
        if not isinstance(error, BideError):
            _log.error("a defect in %s of the store calls", operation, exc_info=error)
        status, failure = wire.failure_of(error)
        return _failed(status, failure, _AWAY if status in (503, 507) else _HEADERS)


def _who(caller: Caller) -> str:
    return caller.id or caller.name


def _failed(status: int, failure: Failure, headers: dict[str, str] = _HEADERS) -> Answered:
    return Answered(status, wire.encode(failure), headers)
