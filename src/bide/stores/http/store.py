"""The store of another process: every operation is one call to bide's service, which has a store of its own.

**The cost**: one round trip per batch, about half a millisecond in this process and as much in the service. Each task
of a batch adds one or two microseconds here, and the cost of the service's store there. See docs/remote.md.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from msgspec import Raw
from msgspec.structs import replace

from bide.core.answers import Answer
from bide.core.errors import BadInput, OutcomeUnknown, PartlyFailed, StoreError, StoreUnavailable
from bide.core.events import Event, EventKind
from bide.core.instants import Millis
from bide.core.names import storable
from bide.core.payloads import slices
from bide.core.records import (
    Change,
    Filter,
    Found,
    Lease,
    Leased,
    NewTask,
    Page,
    Pause,
    Record,
    Ref,
    Settlement,
    Tally,
    Topic,
)
from bide.ports import COUNTED, Features, Listening, OnTaken, OnWake, remote
from bide.ports.remote import Batch, Operation, Success
from bide.stores.batches import gathered
from bide.stores.http.calls import Calls, NotAllowed, TooLarge, Transport, base_of
from bide.stores.http.wakes import Subscriber
from bide.stores.server import ServerStore, ServerTime, WhichClock

Request = TypeVar("Request")
Answered = TypeVar("Answered")
Conditional = TypeVar("Conditional", NewTask, Change)
_log = logging.getLogger("bide.http")


class _Opened(NamedTuple):
    transport: Transport
    calls: Calls
    wakes: Subscriber
    time: ServerTime

    async def read_clock(self) -> int:
        return (await self.calls.ask(remote.TIME, remote.encode(None), None)).micros

    async def close(self) -> None:
        self.calls.closed = True
        await self.wakes.close()
        await self.transport.close()


class HttpStore(ServerStore[_Opened]):
    """Tasks in the store of the service at `url`; see `calls` for the accepted URLs. Every call carries `token`.

    `clock`: by default the service's; "caller" uses the `now` of each call, which only a service under test accepts.
    `patience`: seconds for which a call is retried while the service is away. `silence`: seconds without an answer
    after which a call is sent again.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        clock: WhichClock = "server",
        patience: float = 10.0,
        silence: float = 3.0,
    ) -> None:
        super().__init__(base_of(url, token), clock, remote.CALL_LASTS, patience=patience, silence=silence)
        self._token = token
        self._patience = patience
        self._silence = silence

    def __repr__(self) -> str:
        return f"<HttpStore {self._shown}>"

    @property
    def features(self) -> Features:
        return Features(wakes=self, workers=self, events=self, clock=self, remote=self)

    async def _connect(self) -> _Opened:
        """Connect to the service. Raises StoreUnavailable, StoreMismatch, and SetupError for a wrong token."""
        time = ServerTime()
        transport = Transport(self._shown, self._token)
        calls = Calls(transport, time, clock=self._clock, patience=self._patience, silence=self._silence)
        try:
            await calls.begin()
        except BaseException:
            await transport.close()
            raise
        if self._by_server:
            time.warn_of_skew(self._shown)
        return _Opened(transport, calls, Subscriber(transport, time, patience=self._silence), time)

    # --- clients

    async def add(self, tasks: Sequence[NewTask], *, now: Millis) -> list[Answer]:
        return await self._batch(remote.ADD, _sendable(tasks), now)

    async def change(self, changes: Sequence[Change], *, now: Millis) -> list[Answer]:
        return await self._batch(remote.CHANGE, _sendable(changes), now)

    async def settle(self, outcomes: Sequence[Settlement], *, now: Millis) -> list[bool]:
        try:
            return await self._truths(remote.SETTLE, outcomes, now)
        except UnicodeEncodeError:  # an error may quote text that UTF-8 cannot encode
            plain = [one if one.error is None else replace(one, error=storable(one.error)) for one in outcomes]
            return await self._truths(remote.SETTLE, plain, now)

    async def extend(self, leases: Sequence[Lease], *, now: Millis, until: Millis) -> list[bool]:
        return await self._truths(remote.EXTEND, leases, now, until - now)

    async def get(self, refs: Sequence[Ref]) -> list[Record | None]:
        """Read tasks, in several calls if one answer cannot hold all of them."""
        records: list[Record | None] = []
        while len(records) < len(refs):
            got = await self._ask(remote.GET, list(refs[len(records) : len(records) + remote.LONGEST_PAGE]))
            if not got:
                raise StoreUnavailable(f"{self._shown}: the answer did not end")
            records += got
        return records

    async def find(self, where: Filter, page: Page) -> Found:
        return await self._ask(remote.FIND, remote.FindRequest(where, page))

    async def tally(
        self, edges: Sequence[Millis] | None = None, *, upto: int = COUNTED, topics: Collection[Topic] | None = None
    ) -> Tally:
        request = remote.TallyRequest(edges, None if topics is None else list(topics))
        return (await self._ask(remote.TALLY, request)).tally()

    # --- workers

    async def lease(self, wants: Mapping[Topic, int], *, now: Millis, until: Millis, holder: str) -> Leased:
        room, wanted = remote.MOST, {}
        for topic, want in wants.items():
            wanted[topic] = min(max(want, 0), room)
            room -= wanted[topic]
        leased = await self._ask(remote.LEASE, remote.LeaseRequest(wanted, until - now, holder), now)
        if not room and len(leased.tasks) == remote.MOST:  # more may be due than one call can ask for
            return replace(leased, heads=dict.fromkeys(wants, leased.now))
        return leased

    async def purge(self, *, now: Millis, limit: int) -> int:
        return await self._ask(remote.PURGE, max(limit, 0), now)

    # --- features.wakes

    async def listen(self, topics: Collection[Topic], on_wake: OnWake, on_taken: OnTaken | None = None) -> Listening:
        return await self._open().wakes.listen(topics, on_wake)

    # --- features.workers

    async def announce(
        self, holder: str, topics: Collection[Topic], until: Millis, *, now: Millis
    ) -> dict[str, list[Topic]]:
        return await self._ask(remote.ANNOUNCE, remote.AnnounceRequest(holder, list(topics), max(until - now, 0)), now)

    # --- features.events

    async def record(self, events: Sequence[Event]) -> None:
        """Record all but changes, which the service records itself."""
        if self._by_server:
            events = [event for event in events if event.kind is not EventKind.CHANGE]
        for part in map(list, slices(events, self._open().calls.most)):
            try:
                await self._ask(remote.RECORD, part)
            except UnicodeEncodeError:
                await self._ask(remote.RECORD, [replace(event, what=storable(event.what)) for event in part])

    async def events(self, ref: Ref | None = None, *, limit: int = 100) -> list[Event]:
        return await self._ask(remote.EVENTS, remote.EventsRequest(ref, max(limit, 0)))

    # --- features.remote

    async def pause(self, topic: Topic, who: str | None) -> bool:
        return await self._ask(remote.PAUSE, remote.PauseRequest(topic, who))

    async def resume(self, topic: Topic, who: str | None) -> bool:
        return await self._ask(remote.RESUME, remote.PauseRequest(topic, who))

    async def paused(self) -> list[Pause]:
        return await self._ask(remote.PAUSED, None)

    async def minutes(self, first: int, last: int) -> bytes:
        rows: Raw = await self._ask(remote.MINUTES, (first, last))
        return bytes(rows)

    # --- calls

    async def _ask(
        self, operation: Operation[Request, Answered], request: Request, now: Millis | None = None
    ) -> Answered:
        return self._read(operation, await self._send(operation, request, now))

    async def _send(self, operation: Operation[Request, Any], request: Request, now: Millis | None = None) -> Success:
        """Send a call. It carries `now` only if the service must not use its own clock."""
        now = None if self._by_server else now
        return await self._open().calls.ask(operation, remote.encode(request), now)

    def _read(self, operation: Operation[Any, Answered], success: Success) -> Answered:
        """Decode the answer of a completed call. Raises OutcomeUnknown if it cannot be read."""
        try:
            return operation.read_answer(success.answer)
        except remote.UNREADABLE as error:
            raise OutcomeUnknown(f"{self._shown}: an answer that cannot be read ({error})") from error

    async def _batch(
        self, operation: Operation[Batch[Any], list[Any]], items: Sequence[Any], now: Millis, lasts: Millis = 0
    ) -> list[Any]:
        """Do a batch in order, mostly in one call, else in several. Raises PartlyFailed if only some were done."""
        calls = self._open().calls
        answers: list[Any] = []
        ahead = [list(part) for part in slices(items, calls.most)]
        ahead.reverse()
        while ahead:
            part = ahead.pop()
            try:
                answers += self._answers(operation, len(part), await self._send(operation, Batch(part, lasts), now))
            except TooLarge:
                if len(part) == 1:
                    limit = f"less than {calls.body_limit} bytes, with all it has"
                    answers.append(BadInput("payload", "a task that is too large for one call", limit))
                else:
                    ahead += [part[len(part) // 2 :], part[: len(part) // 2]]
            except (StoreError, BadInput) as error:
                if not answers:
                    raise
                answers += [error] * len(part)
                if isinstance(error, StoreError):
                    left = StoreUnavailable(f"{self._shown}: not sent, because an earlier part failed: {error}")
                    answers += [left] * sum(map(len, ahead))
                    ahead.clear()
        return gathered(answers)

    def _answers(self, operation: Operation[Any, list[Any]], asked: int, success: Success) -> list[Any]:
        """The answers, one for each item, with an error in place of each that failed. Raises OutcomeUnknown."""
        answers = self._read(operation, success)
        if len(answers) != asked:
            raise OutcomeUnknown(f"{self._shown}: {len(answers)} answers to {asked} items")
        for place, failure in success.failed.items():
            if not 0 <= place < asked:
                raise OutcomeUnknown(f"{self._shown}: a failure of item {place}, of {asked}")
            refused = NotAllowed(f"{self._shown} refused: {failure.text}")
            answers[place] = refused if failure.kind == remote.REFUSED else remote.error_of(failure, self._shown)
        if None in answers:
            raise OutcomeUnknown(f"{self._shown}: an item without an answer")
        return answers

    async def _truths(
        self, operation: Operation[Batch[Any], list[Any]], items: Sequence[Any], now: Millis, lasts: Millis = 0
    ) -> list[bool]:
        """Do a batch that answers true or false. A refused item has changed nothing: False, as for a lost lease."""
        try:
            answers = await self._batch(operation, items, now, lasts)
        except BadInput as refusal:
            answers = [refusal] * len(items)
        except PartlyFailed as partly:
            answers = list(partly.answers)
        refused = [one for one in answers if isinstance(one, BadInput)]
        if refused:
            _log.error("%s: %s of %d was refused: %s", self._shown, operation.name, len(refused), refused[0])
        return gathered([False if isinstance(one, BadInput) else one for one in answers])


def _sendable(asked: Sequence[Conditional]) -> list[Conditional]:
    """`asked`; no task has a token that is too large for the wire, so 0 is sent in its place."""
    return [
        one if one.if_token is None or 0 <= one.if_token <= remote.LAST_TOKEN else replace(one, if_token=0)
        for one in asked
    ]
