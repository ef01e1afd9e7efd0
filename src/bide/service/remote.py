"""The store calls, by which bide's own clients use the service as their store, and the idempotency of these calls.

    calls = StoreCalls(client)                              # the client is open
    reply = await calls.answer(operation, body, caller)     # POST /v1/store/{operation}; errors are replies too
    async for line in calls.listen(body, caller): ...       # POST /v1/store/listen
    await calls.close()                                     # before the client

No input is trusted. The table in `ports.remote` defines the checks of each operation's fields and the access that the
caller needs; `StoreOperations` has one method for each of its rows. Answers leave out everything that the caller may
not see.

A resent call (see `ports.remote`) waits for the first one if that is still running. A lower number is refused, so that
a call delayed on the network cannot undo a later change. An unknown session is refused before anything is done, so that
a call from before a restart, or from a forgotten session, changes nothing.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial, partialmethod
from itertools import groupby
from operator import attrgetter
from typing import Any, Generic, TypeVar

from msgspec import Raw
from msgspec.structs import replace

from bide._version import __version__
from bide.core.answers import Answer
from bide.core.errors import BadInput, PartlyFailed
from bide.core.events import Event, EventKind
from bide.core.instants import LAST_INSTANT, Millis
from bide.core.names import LONGEST_NAME
from bide.core.payloads import fitting
from bide.core.records import Change, Found, Lease, Leased, NewTask, Page, Pause, Record, Ref, Settlement, Tally, Topic
from bide.engine.client import Client
from bide.engine.delivery.settlement import release
from bide.engine.history import MinuteRow, rows_between
from bide.engine.pauses import PauseGate
from bide.engine.session import Session, acting_as, verb_of
from bide.ports import Pending, all_answers, remote
from bide.ports.remote import CALL_LASTS, OPERATIONS, SHORTEST_LEASE, Batch, Bounds, Call, Failure, FlatTally, Operation
from bide.service.access import ALL_VERBS, AccessRefused, Caller, EventQuota, Verb, audit
from bide.service.metrics import Metrics
from bide.service.requests import BODY_LIMIT, Reply, problem_of
from bide.service.verbs import set_paused

ANSWER_LASTS = CALL_LASTS + 15.0
"""Seconds for which an answer is kept."""
SESSION_LASTS = 600.0
"""Seconds without a call after which a session is forgotten."""
MOST_SESSIONS = 10_000
"""The most sessions; beyond it, the oldest session of the caller with the most sessions is forgotten."""
MOST_BYTES = 64 << 20
"""The most bytes of kept answers; beyond it, the oldest answers of the caller with the most bytes are forgotten."""

Work = Callable[[], Coroutine[Any, Any, Reply]]
Key = TypeVar("Key")


class StaleCall(Exception):
    """The number of the call is lower than the last one, or its answer is forgotten."""


class _CallSequence:
    """The calls of one operation in one session: the last number, and the work that answers it."""

    number = -1
    work: asyncio.Task[Reply] | None = None


class ClientSession:
    def __init__(self, who: str) -> None:
        self.who = who
        self.sequences: defaultdict[str, _CallSequence] = defaultdict(_CallSequence)


class _LruByOwner(Generic[Key]):
    """Entries in order of their last use, each with an owner and a weight."""

    def __init__(self) -> None:
        self._all: OrderedDict[Key, tuple[str, int, float]] = OrderedDict()
        self._weights: Counter[str] = Counter()
        self.weight = 0

    def put(self, one: Key, who: str, weight: int, now: float) -> None:
        """Add or move the entry to the end, as used now."""
        self.drop(one)
        self._all[one] = (who, weight, now)
        self._weights[who] += weight
        self.weight += weight

    def drop(self, one: Key) -> None:
        who, weight, _ = self._all.pop(one, ("", 0, 0.0))
        self._weights[who] -= weight
        self.weight -= weight
        if not self._weights[who]:
            del self._weights[who]

    def surplus(self, before: float, most: int) -> Iterator[Key]:
        """Drop and yield the entries last used up to `before`; then, while the rest weighs more than `most`, the oldest
        entry of the owner with the greatest weight."""
        while self._all:
            one, (_, _, used) = next(iter(self._all.items()))
            if used > before:
                if self.weight <= most:
                    break
                [(greedy, _)] = self._weights.most_common(1)
                one = next(one for one, (who, _, _) in self._all.items() if who == greedy)
            self.drop(one)
            yield one


class ClientSessions:
    """All sessions of this instance. Belongs to one event loop."""

    def __init__(
        self, *, most_bytes: int = MOST_BYTES, most_sessions: int = MOST_SESSIONS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._clock = clock
        self._prefix = f"{secrets.token_urlsafe(6)}."
        self._sessions: dict[str, ClientSession] = {}
        self._names: _LruByOwner[str] = _LruByOwner()
        self._answers: _LruByOwner[_CallSequence] = _LruByOwner()
        """The sequences whose last answer is kept."""
        self._under_way: set[asyncio.Task[Reply]] = set()
        self._most_bytes = most_bytes
        self._most_sessions = most_sessions

    def begin(self, who: str, *, writes: bool = True) -> str:
        """Begin a session for this caller alone. Nothing is kept for a caller that only reads."""
        now, name = self._clock(), self._prefix + secrets.token_urlsafe(16)
        for old in self._names.surplus(now - SESSION_LASTS, self._most_sessions - writes):
            del self._sessions[old]
        self._forget_answers(now)
        if writes:
            self._sessions[name] = ClientSession(who)
            self._names.put(name, who, 1, now)
        return name

    def began(self, name: str) -> bool:
        """Return True if a session of this name began here."""
        return name.startswith(self._prefix)

    def session(self, name: str, who: str) -> ClientSession | None:
        """The session, if it belongs to the caller and was not forgotten."""
        session = self._sessions.get(name)
        if session is None or session.who != who:
            return None
        self._names.put(name, who, 1, self._clock())
        return session

    async def once(self, session: ClientSession, operation: str, number: int, work: Work) -> Reply:
        """Return the answer to this number: run `work`, or wait for the earlier call with the same number.

        The work goes on when its caller disconnects. Raises StaleCall.
        """
        sequence = session.sequences[operation]
        if number < sequence.number or (number == sequence.number and sequence.work is None):
            raise StaleCall
        if number > sequence.number:
            self._answers.drop(sequence)
            task = asyncio.get_running_loop().create_task(self._run(sequence.work, work), name=f"bide {operation} call")
            sequence.number, sequence.work = number, task
            self._under_way.add(task)
            task.add_done_callback(partial(self._keep, sequence, session.who))
            self._forget_answers(self._clock())
        assert sequence.work is not None
        return await asyncio.shield(sequence.work)

    async def _run(self, before: asyncio.Task[Reply] | None, work: Work) -> Reply:
        """Run in the order of the numbers: the previous call may still run although its caller has given it up."""
        if before is not None and not before.done():
            await asyncio.wait([before])
        return await work()

    def _keep(self, sequence: _CallSequence, who: str, done: asyncio.Task[Reply]) -> None:
        self._under_way.discard(done)
        if sequence.work is done and not done.cancelled() and done.exception() is None:
            self._answers.put(sequence, who, len(done.result().body), self._clock())

    def _forget_answers(self, now: float) -> None:
        for sequence in self._answers.surplus(now - ANSWER_LASTS, self._most_bytes):
            sequence.work = None

    async def close(self) -> None:
        if self._under_way:
            await asyncio.wait(self._under_way)


# --- the calls

Request = TypeVar("Request")
_WRITING = ALL_VERBS - {Verb.READ, Verb.METRICS, Verb.EVENTS}
"""Verbs whose calls are numbered, so that a caller with any of them needs a session."""


class StoreCalls:
    """Answers the store calls. Belongs to the event loop in which `client` is open.

    `pause_gate`: knows the paused topics, whose tasks are not leased. `body_limit`: the limit that is sent to clients.
    `trusting` is only for tests of the messages: the callers' clocks apply, options may be any bytes, and only callers
    write events.
    """

    def __init__(
        self, client: Client, *, pause_gate: PauseGate | None = None, body_limit: int = BODY_LIMIT,
        trusting: bool = False, metrics: Metrics | None = None,
    ) -> None:  # fmt: skip
        self._client = client
        self._body_limit = body_limit
        self._trusting = trusting
        self._bounds = Bounds(client.config.payload_limit, trusting)
        self._sessions = ClientSessions()
        self._ending = False
        self._streams: set[asyncio.Event] = set()
        """The event that wakes each open stream."""
        self._operations = StoreOperations(client, trusting=trusting, pause_gate=pause_gate, metrics=metrics)
        self._handlers = {name: getattr(self._operations, name) for name in OPERATIONS}

    async def answer(
        self, name: str, body: bytes, caller: Caller, note: Callable[[Exception], object] = lambda error: None
    ) -> Reply:
        """Answer one call; errors are replies too. The size of the body has been checked before.

        `note`: called with each error of the call, and of each item that is refused in a batch, for the logs.
        """
        try:
            if name == "open":
                return self._open(body, caller)
            operation = OPERATIONS.get(name)
            if operation is None:
                raise BadInput("operation", name, f"one of open, listen, {', '.join(OPERATIONS)}")
            call = remote.read_call(body)
            request, refused = self._checked(operation, call.request, caller)
            for error in refused.values():
                note(error)
            work = partial(self._do, operation, request, refused, call, caller, note)
            if not operation.once:
                return await work()
            session = self._sessions.session(call.session, _identity(caller))
            if session is not None:
                return await self._sessions.once(session, name, call.number, work)
            if self._sessions.began(call.session):
                return _failed(409, Failure(remote.SESSION, "this session has ended; begin another"))
            return _failed(409, Failure(remote.ELSEWHERE, "this session began with another instance"))
        except StaleCall:
            return _failed(409, Failure(remote.FORGOTTEN, "the answer to this call is no longer known"))
        except remote.UNREADABLE as error:
            return _failed(400, Failure("bad_input", "", "body", None, f"what a client of bide sends ({error})"))
        except Exception as error:  # noqa: BLE001 - a defect fails this call alone
            return _refused(error, note)

    def listen(self, body: bytes, caller: Caller) -> AsyncGenerator[bytes, None]:
        """Stream the wakes of topics to a client. Raises BadInput, Forbidden before the stream begins."""
        try:
            topics = remote.LISTEN.read_request(remote.read_call(body).request)
        except remote.UNREADABLE as error:
            raise BadInput("body", f"{len(body)} bytes", f"what a client of bide sends ({error})") from None
        self._check(remote.LISTEN, topics, caller)
        return self._wakes(topics)

    def drain(self) -> None:
        """End all streams, and new ones at once; their clients subscribe again, here or elsewhere."""
        self._ending = True
        for changed in self._streams:
            changed.set()

    async def close(self) -> None:
        """End all streams, and wait for the running calls."""
        self.drain()
        await self._sessions.close()
        await self._operations.close()

    # --- around the operations

    def _open(self, body: bytes, caller: Caller) -> Reply:
        hello = remote.read_hello(body)
        session = ""
        if hello.wire == remote.WIRE:
            if hello.clock != "server" and not self._trusting:
                raise BadInput("clock", hello.clock, '"server": the service uses its own')
            session = self._sessions.begin(_identity(caller), writes=not _WRITING.isdisjoint(caller.verbs))
        welcome = remote.Welcome(
            service=remote.SERVICE, wire=remote.WIRE, version=__version__, session=session, micros=self._micros(),
            body_limit=self._body_limit,
        )  # fmt: skip
        return Reply(200, remote.encode(welcome), remote.CONTENT_TYPE)

    def _checked(self, operation: Operation[Any, Any], raw: Raw, caller: Caller) -> tuple[Any, dict[int, Exception]]:
        """Return the checked request, and the errors of refused items by index: clients combine many calls into one, so
        a bad item must not fail the others. Raises BadInput, AccessRefused if no item is left."""
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
        """Raise BadInput; Forbidden unless the caller has the needed access."""
        operation.check(request, self._bounds)
        for name, topics in operation.needs(request).items():
            verb = Verb(name)
            if topics:
                caller.check_all(verb, topics)
            elif topics is None or verb not in caller.verbs:
                caller.check(verb, None)

    async def _do(
        self, operation: Operation[Any, Any], request: Any, refused: Mapping[int, Exception], call: Call,
        caller: Caller, note: Callable[[Exception], object],
    ) -> Reply:  # fmt: skip
        try:
            now = self._client.clock.now() if call.now is None or not self._trusting else call.now
            with nullcontext() if self._trusting else acting_as(caller.name, audit):
                answer = await self._handlers[operation.name](request, caller, now)
            failed: dict[int, Failure] = {}
            if isinstance(request, Batch):
                answer, failed = _by_place(answer, refused, caller)
            body = remote.encode(remote.Success(self._micros(), Raw(remote.encode(answer)), failed))
            return Reply(200, body, remote.CONTENT_TYPE)
        except Exception as error:  # noqa: BLE001 - a resent call gets the same error as its answer
            return _refused(error, note)

    def _micros(self) -> int:
        """The current time in microseconds, more precise than the clock's milliseconds."""
        clock = self._client.clock
        now = clock.now()
        return now * 1000 + min(max(int(-clock.seconds_until(now) * 1e6), 0), 999)

    async def _wakes(self, topics: Sequence[Topic]) -> AsyncGenerator[bytes, None]:
        """Lines of JSON; an empty one confirms the subscription. Only the earliest wake of each topic waits to be sent,
        so a slow reader costs no more memory than its topics."""
        earliest: dict[Topic, Millis] = {}
        changed = asyncio.Event()

        def on_wake(topic: Topic, wake: Millis) -> None:
            earliest[topic] = min(wake, earliest.get(topic, wake))
            changed.set()

        wakes = self._client.store.features.wakes
        listening = None if wakes is None else await wakes.listen(topics, on_wake)
        self._streams.add(changed)
        try:
            yield b"\n"
            while not self._ending:
                try:
                    async with asyncio.timeout(remote.HEARTBEAT):
                        await changed.wait()
                except TimeoutError:
                    yield b"\n"
                    continue
                changed.clear()
                lines = b"".join(remote.encode_wake(wake) + b"\n" for wake in earliest.items())
                earliest.clear()
                if lines:
                    yield lines
        finally:
            self._streams.discard(changed)
            if listening is not None:
                await listening.close()


def _by_place(
    answers: Sequence[object], refused: Mapping[int, Exception], caller: Caller
) -> tuple[list[object], dict[int, Failure]]:
    """The parts of the answers that the caller may see, with None in place of each error, and the errors by index."""
    rest = iter(answers)
    all_ = [refused[at] if at in refused else next(rest) for at in range(len(answers) + len(refused))]
    failed = {at: _failure(one) for at, one in enumerate(all_) if isinstance(one, Exception)}
    seen = [caller.seen(one) if isinstance(one, Answer) else one for one in all_]
    return [None if at in failed else one for at, one in enumerate(seen)], failed


def _identity(caller: Caller) -> str:
    return caller.id or caller.name


def _failure(error: Exception) -> Failure:
    return Failure(remote.REFUSED, str(error)) if isinstance(error, AccessRefused) else remote.failure_of(error)


def _refused(error: Exception, note: Callable[[Exception], object]) -> Reply:
    note(error)
    problem = problem_of(error)
    return _failed(problem.status, _failure(error), problem.headers)


def _failed(status: int, failure: Failure, headers: Mapping[str, str] = {}) -> Reply:
    return Reply(status, remote.encode(failure), remote.CONTENT_TYPE, headers)


# --- the operations

Got = TypeVar("Got")
_PRESENCE: Millis = 60_000
"""The most milliseconds for which a worker counts as alive after its announcement."""
_MOST_HOLDERS = 10_000
_PAGE_BYTES = 8 << 20
"""The most bytes of payloads and errors in one page: a larger page is read again with a lower limit."""
_LEASE_AGAIN: Millis = 2_000
"""Milliseconds after which a client leases again if only paused topics have tasks."""


class StoreOperations:
    """The operations of a remote store, carried out on the store of an open client.

    Each gets a checked request, a caller with the needed access, and the time. The answer to a failed item of a batch
    is its error. `pause_gate`: knows the paused topics. `metrics`: count the deliveries and outcomes of the remote
    workers. `trusting` is only for tests of the messages.
    """

    def __init__(
        self, client: Client, *, trusting: bool, pause_gate: PauseGate | None, metrics: Metrics | None = None
    ) -> None:
        self._client = client
        self._store = client.store
        self._trusting = trusting
        self._pause_gate = pause_gate
        self._metrics = metrics
        self._session = Session(client.store, client.clock, None)
        """Combines single calls of many clients into batches, and records changes with their callers."""
        self._holders: dict[str, Millis] = {}
        """The workers that announced themselves here, and the times until which they count as alive."""
        self._rates = EventQuota()

    async def close(self) -> None:
        await self._session.recorder.close()

    # --- clients

    async def add(self, batch: Batch[NewTask], caller: Caller, now: Millis) -> Sequence[object]:
        self._client.history.scheduled(len(batch.items))
        if len(batch.items) == 1 and not self._trusting:
            return [await self._session.add(batch.items[0])]
        answers = await _each(self._store.add(batch.items, now=now))
        self._session.note("schedule", [one for one in answers if isinstance(one, Answer)], bulk=True)
        return answers

    async def change(self, batch: Batch[Change], caller: Caller, now: Millis) -> Sequence[object]:
        if len(batch.items) == 1 and not self._trusting:
            return [await self._session.change(batch.items[0])]
        answers = await _each(self._store.change(batch.items, now=now))
        by_verb: dict[str, list[Answer]] = {}
        for change, answer in zip(batch.items, answers, strict=True):
            if isinstance(answer, Answer):
                by_verb.setdefault(verb_of(change), []).append(answer)
        for verb, its in by_verb.items():
            self._session.note(verb, its)
        return answers

    async def get(self, refs: list[Ref], caller: Caller, now: Millis) -> list[Record | None]:
        """The first tasks, as many as fit into one answer; the client requests the others again."""
        found = await self._store.get(refs[: remote.LONGEST_PAGE])
        records = [one if one is not None and caller.visible([one]) else None for one in found]
        return records[: _that_fit(records)]

    async def find(self, request: remote.FindRequest, caller: Caller, now: Millis) -> Found:
        """A page that fits into one answer, possibly with fewer tasks than its limit."""
        page = replace(request.page, limit=min(request.page.limit, remote.LONGEST_PAGE))
        while True:
            found = await self._store.find(request.where, page)
            fit = _that_fit(found.tasks)
            if fit == len(found.tasks):
                return Found(caller.visible(found.tasks), found.cursor)
            page = Page(limit=fit, cursor=page.cursor)

    async def tally(self, request: remote.TallyRequest, caller: Caller, now: Millis) -> FlatTally:
        found = await self._store.tally(request.edges, topics=request.topics)
        may = {topic: caller.may(Verb.READ, topic) for topic in {*found.forecast, *(of for of, _ in found.counts)}}
        counts = {of: count for of, count in found.counts.items() if may[of[0]]}
        return FlatTally.of(Tally(counts, {topic: its for topic, its in found.forecast.items() if may[topic]}))

    # --- workers

    async def lease(self, request: remote.LeaseRequest, caller: Caller, now: Millis) -> Leased:
        """Lease from topics that are not paused. If only paused ones have tasks, the client must lease again soon."""
        wants: Mapping[Topic, int] = request.wants
        until, holder = self._until(now, request.lasts), self._holder(caller, request.holder)
        held: dict[Topic, int] = {}
        if self._pause_gate is not None:
            await self._pause_gate.first()
            held = {topic: 0 for topic in wants if topic in self._pause_gate.topics}
            wants = {topic: want for topic, want in wants.items() if topic not in held}
        leased = Leased([], {}, now)
        if wants or not held:
            leased = await self._store.lease(wants, now=now, until=until, holder=holder)
        if held and not leased.heads:
            waits = await self._store.lease(held, now=now, until=until, holder=holder)
            if waits.heads:  # without the heads, the client would lease continuously
                heads = {topic: max(head, waits.now + _LEASE_AGAIN) for topic, head in waits.heads.items()}
                leased = replace(leased, heads=heads)
        if self._pause_gate is not None:
            topics = self._pause_gate.topics
            paused = [release(task) for task in leased.tasks if task.topic in topics]
            if paused:  # since the lease was sent
                await _each(self._store.settle(paused, now=now))
                leased = replace(leased, tasks=[task for task in leased.tasks if task.topic not in topics])
        for topic, tasks in groupby(leased.tasks, attrgetter("topic")):
            its = list(tasks)
            self._client.history.began(topic, [task.planned_at for task in its], leased.now)
            if self._metrics is not None:
                for task in its:
                    self._metrics.started(task, leased.now)
        return leased

    async def extend(self, batch: Batch[Lease], caller: Caller, now: Millis) -> Sequence[object]:
        return await _each(self._store.extend(batch.items, now=now, until=self._until(now, batch.lasts)))

    async def settle(self, batch: Batch[Settlement], caller: Caller, now: Millis) -> Sequence[object]:
        accepted = await _each(self._store.settle(batch.items, now=now))
        for one, ok in zip(batch.items, accepted, strict=True):
            if ok is True:
                self._client.history.ended(one.topic, one.kind)
                if self._metrics is not None:
                    self._metrics.settled(one.topic, one.kind)
        return accepted

    async def purge(self, limit: int, caller: Caller, now: Millis) -> int:
        """Purge expired tasks; do nothing for a caller who may not work on all topics."""
        if not caller.may(Verb.WORK, None):
            return 0
        return await self._store.purge(now=now, limit=min(max(limit, 0), remote.MOST))

    async def announce(self, request: remote.AnnounceRequest, caller: Caller, now: Millis) -> dict[str, list[Topic]]:
        if (workers := self._store.features.workers) is None:
            return {}
        holder = self._holder(caller, request.holder)
        until = min(now + (request.lasts if self._trusting else min(request.lasts, _PRESENCE)), LAST_INSTANT)
        if request.topics and holder not in self._holders and len(self._holders) >= _MOST_HOLDERS:
            raise BadInput("holder", request.holder, f"one of at most {_MOST_HOLDERS} workers at once")
        live = await workers.announce(holder, request.topics, until, now=now)
        if request.topics:
            self._holders[holder] = until
        else:
            self._holders.pop(holder, None)
        for gone in [holder for holder, ends in self._holders.items() if ends <= now]:
            del self._holders[gone]  # it died: the store, which counts it as a worker of this process, drops it
            live = await workers.announce(gone, [], now, now=now)
        seen = {holder: [topic for topic in its if caller.may(Verb.WORK, topic)] for holder, its in live.items()}
        return {holder: its for holder, its in seen.items() if its}

    def _until(self, now: Millis, lasts: Millis) -> Millis:
        """The end of a lease. Its length is at least a second, as in the calls for other languages."""
        return min(now + (lasts if self._trusting else max(lasts, SHORTEST_LEASE)), LAST_INSTANT)

    def _holder(self, caller: Caller, holder: str) -> str:
        """A worker's name prefixed with the caller's, so that it cannot pose as another caller's worker."""
        if self._trusting:
            return holder
        return f"{caller.name[:64]}@{holder}".encode()[:LONGEST_NAME].decode(errors="ignore")

    # --- pauses, the history, the log, and the time

    async def _set_paused(self, request: remote.PauseRequest, caller: Caller, now: Millis, *, paused: bool) -> bool:
        return await set_paused(self._client, request.topic, _on_behalf(caller, request.who), paused=paused)

    pause, resume = partialmethod(_set_paused, paused=True), partialmethod(_set_paused, paused=False)

    async def paused(self, request: None, caller: Caller, now: Millis) -> list[Pause]:
        """The pauses of the topics to which the caller has any access."""
        found = await self._client.paused()
        return [one for one in found.values() if any(caller.may(verb, one.topic) for verb in caller.verbs)]

    async def minutes(self, minutes: tuple[int, int], caller: Caller, now: Millis) -> dict[int, MinuteRow]:
        return await rows_between(self._store, self._client.clock, *minutes)

    async def record(self, events: list[Event], caller: Caller, now: Millis) -> None:
        """Record events within a quota, except changes, which the service records itself."""
        if not self._trusting:
            fresh = [event for event in events if event.kind is not EventKind.CHANGE]
            most = self._rates.take(caller.id, len(fresh))
            events = [replace(one, who=_on_behalf(caller, one.who), at=now) for one in fresh[:most]]
        if (log := self._store.features.events) is not None and events:
            await log.record(events)

    async def events(self, request: remote.EventsRequest, caller: Caller, now: Millis) -> list[Event]:
        if (log := self._store.features.events) is None:
            return []
        await self._client.recorder.flush()
        await self._session.recorder.flush()
        found = await log.events(request.ref, limit=min(max(request.limit, 0), remote.MOST))
        return [event for event in found if caller.may(Verb.EVENTS, event.topic)]

    async def time(self, request: None, caller: Caller, now: Millis) -> None:
        """Answer nothing: every answer carries the time."""


async def _each(verb: Awaitable[Sequence[Got | Pending[Got]]]) -> Sequence[object]:
    """The answers of a batch; if it partly failed, the errors in their places."""
    try:
        return await all_answers(await verb)
    except PartlyFailed as partly:
        return partly.answers


def _on_behalf(caller: Caller, who: str | None) -> str:
    """The name to record: the caller, and the name given by the caller."""
    return caller.name if who is None else f"{caller.name}/{who}".encode()[:LONGEST_NAME].decode(errors="ignore")


def _that_fit(records: Iterable[Record | None]) -> int:
    """The number of first records that fit into one answer; at least one."""
    sizes = [0 if one is None else len(one.payload) + len(one.error or "") for one in records]
    return fitting(sizes, _PAGE_BYTES)
