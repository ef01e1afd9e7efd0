"""Calls to a service, each done once however often it is sent.

A call that writes carries the session and a number that only rises; the service keeps the answer to the last one, so a
call whose answer was lost is sent again over another connection and answered the same. That is why one call of each
operation is under way at a time. A session belongs to the instance that it began with, which alone can say what was
done. Where a proxy leads to another one, that one refuses and has done nothing, so the call is sent again until it
comes to the right one. Where that one seems to be gone, a call that was never sent before goes out in a new session;
of any other nobody can say whether it was done, and that is `OutcomeUnknown`. Calls that only read are sent again as
they are, to any instance.
"""

from __future__ import annotations

import asyncio
import logging
import random
from typing import Any, Literal

from msgspec import Raw

from bide.core.errors import OutcomeUnknown, SetupError, StoreError, StoreFull, StoreMismatch, StoreUnavailable
from bide.core.instants import Millis
from bide.ports import wire
from bide.ports.remote import OPERATIONS, Operation
from bide.ports.wire import Call, Failure, Hello, Success, Welcome
from bide.stores.http.link import Link, Lost, NotSent, Reply, TooLarge
from bide.stores.server_time import ServerTime

_log = logging.getLogger("bide.http")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.5
_AT_FIRST = 3.0
"""Seconds that opening waits for a service that cannot be reached."""
_REFUSALS = 16
"""Refusals in turn, by instances that a session did not begin with, after which the right one is taken to be gone. Of
two that are chosen at random this errs once in 65,536 times, and costs a new session, or `OutcomeUnknown` at worst."""
_AT_ONCE = 3
"""Refusals after which the next is asked without a pause: a proxy that deals in turn comes round in so many."""
_BEHIND = (500, 502, 504, 408)
"""The answers of somebody on the way when the service behind may have been reached, or not."""
_LATER = (429, 503)
"""The answers that mean: not now."""


class _Foreign(Exception):
    """An error that was not the store calls' answer to this number, so it tells nothing of a call sent before."""

    def __init__(self, error: StoreError) -> None:
        self.error = error
        super().__init__(str(error))


class Calls:
    """One client's, in one session after another. Belongs to one event loop."""

    def __init__(
        self, link: Link, time: ServerTime, *, clock: Literal["server", "caller"], patience: float, silence: float
    ) -> None:
        self._link = link
        self._time = time
        self._clock = clock
        self._patience = patience
        self._silence = silence
        self._loop = asyncio.get_running_loop()
        self._session = ""
        self._beginning: asyncio.Task[None] | None = None
        self._turns = {name: asyncio.Lock() for name, operation in OPERATIONS.items() if operation.once}
        self._numbers = dict.fromkeys(self._turns, 0)
        self.closed = False
        self.body_limit = 1 << 20
        self.most = 1_000
        self.resent = 0
        """Calls that had to be sent more than once."""

    async def begin(self) -> None:
        """Find out who answers there, and begin a session. Raises StoreUnavailable, StoreMismatch, NotAllowed."""
        ends = self._loop.time() + _AT_FIRST
        pause = _FIRST_PAUSE
        while True:
            try:
                return await self._begin()
            except (NotSent, Lost) as error:
                left = ends - self._loop.time()
                if left <= 0:
                    raise StoreUnavailable(str(error)) from error
                await _rest(pause, left)
                pause = min(pause * 2, _LONGEST_PAUSE)

    async def ask(self, operation: Operation[Any, Any], request: bytes, now: Millis | None) -> Success:
        """Do it, once if it has to be done once. Raises StoreError, BadInput, SetupError, TooLarge."""
        if not operation.once:
            return await self._insist(operation.name, 0, request, now)
        async with self._turns[operation.name]:
            self._numbers[operation.name] += 1
            return await self._insist(operation.name, self._numbers[operation.name], request, now)

    async def _insist(self, name: str, number: int, request: bytes, now: Millis | None) -> Success:
        """Send it until there is an answer that will not change, or patience is over."""
        if len(request) + 512 > self.body_limit:
            raise TooLarge
        where, ends = self._link.where, self._loop.time() + self._patience
        pause, silence, refusals, body = _FIRST_PAUSE, self._silence, 0, b""
        session: str | None = None
        may_be_done = False
        while True:
            if self.closed:
                raise _not_known(may_be_done, f"{where}: {name}: the store is closed")
            if may_be_done and session != self._session:
                raise OutcomeUnknown(f"{where}: {name}: the answer was lost, and the service has begun anew")
            error: Exception
            try:
                if number and not self._session:
                    await self._begin_again()
                if session != self._session:
                    session, refusals = self._session, 0
                    body = wire.encode(Call(session, number, now, Raw(request)))
                at = self._time.clock()
                answer = self._read(await self._link.post(name, body, min(silence, max(ends - at, 0.05))))
                if not isinstance(answer, Failure):
                    if not may_be_done:  # else it may be a repeated answer, with the time of the first
                        self._time.saw(answer.micros, at, self._time.clock())
                    return answer
                if answer.kind not in (wire.SESSION, wire.ELSEWHERE):
                    raise wire.error_of(answer, where)
                refusals += 1
                if self._session == session and (answer.kind == wire.SESSION or refusals >= _REFUSALS):
                    self._session = ""
                error, rest = NotSent(f"{where}: {answer.text}"), _FIRST_PAUSE / 2 if refusals > _AT_ONCE else 0.0
            except (NotSent, Lost) as met:
                error, rest, pause, silence = met, pause, min(pause * 2, _LONGEST_PAUSE), silence * 2
                may_be_done = may_be_done or (number > 0 and isinstance(met, Lost))
            except _Foreign as foreign:
                if may_be_done:
                    raise OutcomeUnknown(str(foreign.error)) from foreign.error
                raise foreign.error from None
            self.resent += 1
            left = ends - self._loop.time()
            if left <= 0:
                raise _not_known(may_be_done, f"{name}: {error}")
            if rest:
                await _rest(rest, left)

    def _read(self, reply: Reply) -> Success | Failure:
        """The answer. Raises NotSent, Lost, TooLarge, and `_Foreign` where asking again would not help."""
        where = self._link.where
        if reply.kind == wire.CONTENT_TYPE:
            try:
                if reply.status == 200:
                    return wire.read_success(reply.body)
                failure = wire.read_failure(reply.body)
            except wire.UNREADABLE as error:
                raise Lost(f"{where}: an answer that cannot be read ({error})") from error
            if failure.kind == wire.REFUSED:
                raise _Foreign(self._link.not_allowed(reply.status, failure.text))
            return failure
        text = reply.text
        if reply.status in (401, 403):
            raise _Foreign(self._link.not_allowed(reply.status, text))
        if reply.status == 413:
            raise TooLarge
        if reply.status == 507:
            raise _Foreign(StoreFull(f"{where}: {text or 'the store is full'}"))
        if reply.status == 503 and text:
            raise _Foreign(StoreUnavailable(f"{where}: {text}"))
        if reply.status in _LATER:
            raise NotSent(f"{where}: it answers {reply.status}")
        answers = f"{where}: it answers {reply.status} ({reply.kind})"
        if reply.status == 200 or reply.status in _BEHIND:
            raise Lost(f"{answers}, which is not what bide's service says")
        raise _Foreign(StoreUnavailable(f"{answers}: something else than bide's service is there now"))

    # --- sessions

    async def _begin_again(self) -> None:
        """A new session, one for all who need it."""
        if self._beginning is None:
            self._beginning = self._loop.create_task(self._begin(), name="bide http session")
            self._beginning.add_done_callback(self._begun)
        await asyncio.shield(self._beginning)

    def _begun(self, task: asyncio.Task[None]) -> None:
        self._beginning = None
        if not task.cancelled():
            task.exception()  # raised to everyone who waited for it

    async def _begin(self) -> None:
        at = self._time.clock()
        welcome = self._welcome(
            await self._link.post("open", wire.encode(Hello(wire.WIRE, self._clock)), self._silence)
        )
        self._time.saw(welcome.micros, at, self._time.clock())
        self.body_limit = welcome.body_limit
        self.most = max(1, min(welcome.most, 1_000))
        self._session = welcome.session

    def _welcome(self, reply: Reply) -> Welcome:
        where = self._link.where
        if reply.kind == wire.CONTENT_TYPE and reply.status == 200:
            try:
                welcome = wire.read_welcome(reply.body)
            except wire.UNREADABLE as error:
                raise StoreMismatch(f"{where}: an answer that cannot be read ({error})") from error
            if welcome.service != wire.SERVICE or welcome.wire != wire.WIRE or not welcome.session:
                raise StoreMismatch(
                    f"{where}: {welcome.service} {welcome.version} speaks version {welcome.wire} of the store calls, "
                    f"and this client {wire.WIRE}; install the same version of bide on both sides"
                )
            return welcome
        if reply.status in (401, 403, 507, *_LATER, *_BEHIND) or reply.kind == wire.CONTENT_TYPE:
            try:
                answer = self._read(reply)
            except _Foreign as foreign:
                raise foreign.error from None
            if isinstance(answer, Failure):
                meant = wire.error_of(answer, where)
                raise meant if isinstance(meant, StoreError | SetupError) else StoreMismatch(f"{where}: {meant}")
        elsewhere = "; it leads elsewhere: give the URL that it leads to" if 300 <= reply.status < 400 else ""
        raise StoreMismatch(
            f"{where}: this is not bide's service, or a path of it: it answers {reply.status} ({reply.kind}){elsewhere}"
        )


def _not_known(may_be_done: bool, text: str) -> StoreError:
    return OutcomeUnknown(text) if may_be_done else StoreUnavailable(text)


async def _rest(pause: float, most: float) -> None:
    await asyncio.sleep(min(most, pause * (0.5 + random.random())))
