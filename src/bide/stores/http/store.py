"""The store of another process: every operation is one call to bide's service, which has a store of its own.

**The cost**: a round trip for a batch, about half a millisecond of this process and as much of the service; each task
of a batch adds a microsecond or two here, and there what the service's store takes. See docs/remote.md.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

from msgspec.structs import replace

from bide.core.answers import Answer
from bide.core.errors import BadInput, OutcomeUnknown, PartlyFailed, StoreError, StoreUnavailable
from bide.core.events import Event
from bide.core.instants import Millis
from bide.core.pause import Pause
from bide.core.records import (
    Change,
    Filter,
    Found,
    Lease,
    Leased,
    NewTask,
    Page,
    Record,
    Ref,
    Settlement,
    Tally,
    Topic,
)
from bide.core.texts import storable
from bide.ports import COUNTED, Clock, Heard, Listening, wire
from bide.ports.wire import Failure, Told
from bide.stores.batches import gathered
from bide.stores.http.address import address_of
from bide.stores.http.calls import Calls
from bide.stores.http.errors import TooLarge, not_allowed
from bide.stores.http.link import Link
from bide.stores.http.wakes import Hearing
from bide.stores.server_time import ServerTime, StoreClock

T = TypeVar("T")
_log = logging.getLogger("bide.http")
_LAST_TOKEN = 2**63 - 1


class _Opened(NamedTuple):
    link: Link
    calls: Calls
    hearing: Hearing


class HttpStore:
    """Tasks in the store of the service at `url`; see `address` for what that may say. `token` goes with every call.

    `clock`: by default the service's; "caller" goes by the `now` of each call, which only a service in a test takes.
    `patience`: seconds that a call goes on trying while the service is away. `silence`: seconds without an answer after
    which a call is sent again.
    """

    served = True

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        clock: Literal["server", "caller"] = "server",
        patience: float = 10.0,
        silence: float = 3.0,
    ) -> None:
        self._address = address_of(url, token)
        if clock not in ("server", "caller"):
            raise BadInput("clock", clock, '"server" or "caller"')
        for name, seconds in (("patience", patience), ("silence", silence)):
            if not 0 < seconds <= wire.CALL_LASTS:
                raise BadInput(name, seconds, f"seconds above 0, at most {wire.CALL_LASTS}")
        self._token = token
        self._clock: Literal["server", "caller"] = clock
        self._patience = patience
        self._silence = silence
        self._time = ServerTime()
        self._opened: _Opened | None = None

    def __repr__(self) -> str:
        return f"<HttpStore {self._address.shown}>"

    async def open(self) -> None:
        """Find out who answers there. Raises StoreUnavailable, StoreMismatch, and SetupError for a wrong token."""
        if self._opened is not None:
            return
        self._time = ServerTime()
        link = Link(self._address, self._token)
        calls = Calls(link, self._time, clock=self._clock, patience=self._patience, silence=self._silence)
        try:
            await calls.begin()
        except BaseException:
            await link.close()
            raise
        if self._clock == "server":
            self._time.warn_of_skew(self._address.shown)
        self._opened = _Opened(link, calls, Hearing(link, self._time, patience=self._silence))

    async def close(self) -> None:
        if self._opened is not None:
            opened, self._opened = self._opened, None
            opened.calls.closed = True
            await opened.hearing.close()
            await opened.link.close()

    def _open(self) -> _Opened:
        if self._opened is None:
            raise StoreUnavailable(f"{self._address.shown}: the store is not open")
        return self._opened

    def _now(self, now: Millis) -> Millis | None:
        """What the service is told of the time: nothing where it is to look at its own clock."""
        return now if self._clock == "caller" else None

    # --- clients

    async def add(self, tasks: Sequence[NewTask], *, now: Millis) -> list[Answer]:
        return await self._batch("add", tasks, wire.read_answers, now)

    async def change(self, changes: Sequence[Change], *, now: Millis) -> list[Answer]:
        if any(change.if_token is not None and not 0 <= change.if_token <= _LAST_TOKEN for change in changes):
            changes = [_that_can_be_said(change) for change in changes]
        return await self._batch("change", changes, wire.read_answers, now)

    async def settle(self, outcomes: Sequence[Settlement], *, now: Millis) -> list[bool]:
        try:
            return await self._truths("settle", outcomes, now)
        except UnicodeEncodeError:  # an error may quote what no UTF-8 can say
            said = [one if one.error is None else replace(one, error=storable(one.error)) for one in outcomes]
            return await self._truths("settle", said, now)

    async def extend(self, leases: Sequence[Lease], *, now: Millis, until: Millis) -> list[bool]:
        lasts = until - now
        return await self._truths("extend", leases, now, lambda part: wire.encode(wire.ExtendAsk(list(part), lasts)))

    async def get(self, refs: Sequence[Ref]) -> list[Record | None]:
        """In as many calls as it takes: an answer has as many as fit into it."""
        calls = self._open().calls
        records: list[Record | None] = []
        while len(records) < len(refs):
            part = refs[len(records) : len(records) + wire.LONGEST_PAGE]
            got = self._read(wire.read_records, await calls.look("get", wire.encode(part)))
            if not got:
                raise StoreUnavailable(f"{self._address.shown}: an answer without an end")
            records += got
        return records

    async def find(self, where: Filter, page: Page) -> Found:
        asked = wire.encode(wire.FindAsk(where, page))
        return self._read(wire.read_found, await self._open().calls.look("find", asked))

    async def tally(
        self, edges: Sequence[Millis] | None = None, *, upto: int = COUNTED, topics: Collection[Topic] | None = None
    ) -> Tally:
        asked = wire.encode(wire.TallyAsk(edges, None if topics is None else list(topics)))
        return self._read(wire.read_tally, await self._open().calls.look("tally", asked))

    # --- workers

    async def lease(self, wants: Mapping[Topic, int], *, now: Millis, until: Millis, holder: str) -> Leased:
        calls = self._open().calls
        room, asked = wire.MOST, {}
        for topic, want in wants.items():
            asked[topic] = min(max(want, 0), room)
            room -= asked[topic]
        told = await calls.once("lease", wire.encode(wire.LeaseAsk(asked, until - now, holder)), self._now(now))
        leased = self._read(wire.read_leased, told)
        if not room and len(leased.tasks) == wire.MOST:  # there may be more than one call asks for
            return Leased(leased.tasks, leased.now, leased.now)
        return leased

    async def purge(self, *, now: Millis, limit: int) -> int:
        told = await self._open().calls.once("purge", wire.encode(max(limit, 0)), self._now(now))
        return self._read(wire.read_number, told)

    # --- Notifies

    async def listen(self, topics: Collection[Topic], heard: Heard) -> Listening:
        return await self._open().hearing.listen(topics, heard)

    # --- Shares

    async def announce(
        self, holder: str, topics: Collection[Topic], until: Millis, *, now: Millis
    ) -> dict[str, list[Topic]]:
        asked = wire.encode(wire.AnnounceAsk(holder, list(topics), max(until - now, 0)))
        return self._read(wire.read_live, await self._open().calls.look("announce", asked, self._now(now)))

    # --- KeepsEvents

    async def record(self, events: Sequence[Event]) -> None:
        calls = self._open().calls
        for first in range(0, len(events), calls.most):
            part = events[first : first + calls.most]
            try:
                asked = wire.encode(part)
            except UnicodeEncodeError:
                asked = wire.encode([replace(event, what=storable(event.what)) for event in part])
            await calls.once("record", asked, None)

    async def events(self, ref: Ref | None = None, *, limit: int = 100) -> list[Event]:
        asked = wire.encode(wire.EventsAsk(ref, max(limit, 0)))
        return self._read(wire.read_events, await self._open().calls.look("events", asked))

    # --- Served

    async def pause(self, topic: Topic, who: str | None) -> bool:
        return await self._pausing("pause", topic, who)

    async def resume(self, topic: Topic, who: str | None) -> bool:
        return await self._pausing("resume", topic, who)

    async def paused(self) -> list[Pause]:
        return self._read(wire.read_pauses, await self._open().calls.look("paused"))

    async def minutes(self, first: int, last: int) -> bytes:
        return bytes((await self._open().calls.look("minutes", wire.encode((first, last)))).answer)

    async def _pausing(self, operation: str, topic: Topic, who: str | None) -> bool:
        told = await self._open().calls.once(operation, wire.encode(wire.PauseAsk(topic, who)), None)
        return self._read(wire.read_truth, told)

    # --- TellsTime

    async def time(self) -> Millis:
        told = await self._open().calls.look("time")
        return told.micros // 1000  # what it said: our own reckoning of it may go back by a part of a millisecond

    def clock(self) -> Clock | None:
        return StoreClock(self._time) if self._clock == "server" else None

    # --- within

    async def _batch(
        self,
        operation: str,
        items: Sequence[Any],
        read: Callable[[Any], list[Any]],
        now: Millis,
        encode: Callable[[Sequence[Any]], bytes] = wire.encode,
    ) -> list[Any]:
        """Do it in as many calls as it takes, in order; mostly one. Raises PartlyFailed where only some were done."""
        calls = self._open().calls
        answers: list[Any] = []
        ahead = [items[first : first + calls.most] for first in range(0, len(items), calls.most)]
        ahead.reverse()
        while ahead:
            part = ahead.pop()
            try:
                told = await calls.once(operation, encode(part), self._now(now))
                got = self._read(read, told)
                if len(got) != len(part):
                    raise OutcomeUnknown(f"{self._address.shown}: {len(got)} answers to {len(part)} items")
                for place, failure in told.failed.items():
                    if not 0 <= place < len(got):
                        raise OutcomeUnknown(f"{self._address.shown}: a failure of item {place}, of {len(got)}")
                    got[place] = self._error(failure)
                if None in got:
                    raise OutcomeUnknown(f"{self._address.shown}: an item without an answer")
                answers += got
            except TooLarge:
                if len(part) == 1:
                    answers.append(_too_large(calls.body_limit))
                else:
                    ahead += [part[len(part) // 2 :], part[: len(part) // 2]]
            except (StoreError, BadInput) as error:
                if not answers:
                    raise
                answers += [error] * len(part)
                if isinstance(error, StoreError):
                    left = StoreUnavailable(f"{self._address.shown}: not sent, since what went before failed: {error}")
                    answers += [left] * sum(map(len, ahead))
                    ahead.clear()
        return gathered(answers)

    async def _truths(
        self,
        operation: str,
        items: Sequence[Any],
        now: Millis,
        encode: Callable[[Sequence[Any]], bytes] = wire.encode,
    ) -> list[bool]:
        """What was not accepted has changed nothing: false, as for a lease that is gone."""
        try:
            return await self._batch(operation, items, wire.read_truths, now, encode)
        except BadInput as refused:
            _log.error("%s: %s of %d was refused: %s", self._address.shown, operation, len(items), refused)
            return [False] * len(items)
        except PartlyFailed as partly:
            wrong = [one for one in partly.answers if isinstance(one, BadInput)]
            if wrong:
                _log.error("%s: %s of %d was refused: %s", self._address.shown, operation, len(wrong), wrong[0])
                return gathered([False if isinstance(one, BadInput) else one for one in partly.answers])
            raise

    def _error(self, failure: Failure) -> Exception:
        if failure.kind == wire.REFUSED:
            return not_allowed(403, failure.text, self._address.shown, token=self._token is not None)
        return wire.error_of(failure, self._address.shown)

    def _read(self, read: Callable[[Any], T], told: Told) -> T:
        """What the service answered; it has done what was asked. Raises OutcomeUnknown where that cannot be read."""
        try:
            return read(told.answer)
        except wire.UNREADABLE as error:
            raise OutcomeUnknown(f"{self._address.shown}: an answer that cannot be read ({error})") from error


def _that_can_be_said(change: Change) -> Change:
    """A token that is too large for any number of the wire is one that no task has, as 0 is."""
    token = change.if_token
    return change if token is None or 0 <= token <= _LAST_TOKEN else replace(change, if_token=0)


def _too_large(limit: int) -> BadInput:
    return BadInput("payload", "a task that is too large for one call", f"less than {limit} bytes, with all it has")
