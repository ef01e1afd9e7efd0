"""Carries out bulk requests in the background; every instance can show and stop them.

**One run.** It reads pages, changes tasks by the plural verbs, limits its pace, and counts the answers. No task is
changed twice: if a move puts a task ahead of the walk, the run remembers its id, some hundred bytes each. A task that
another caller has changed since it was read is read again, and changed if the request still covers it.

**Many instances.** A run writes its progress to the store once a second. So any instance can show and stop it, and the
progress survives a crash. A run that has not written for ten seconds has lost its instance.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from contextvars import Context
from enum import StrEnum
from typing import TypeAlias, TypeVar

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from bide.core.answers import Answer
from bide.core.errors import BideError, OutcomeUnknown, PartlyFailed, StoreError, StoreFull, StoreUnavailable
from bide.core.events import EventKind
from bide.core.instants import LAST_INSTANT, Millis
from bide.core.names import SHOWN_TOPIC
from bide.core.records import Change, Record, Ref, Result, State, Token, Topic
from bide.engine.client import Client
from bide.engine.session import current_caller, verb_of
from bide.engine.settings_store import SettingsStore
from bide.insight.bulk import (
    FAILED,
    PAGE,
    UNKNOWN,
    BulkRequest,
    BulkScope,
    BulkVerb,
    May,
    MissedTask,
    Version,
    Walk,
    change_of,
)

_log = logging.getLogger("bide.bulk")
T = TypeVar("T")
CheckAllowed: TypeAlias = Callable[[], Awaitable[object]]
"""Raises BideError once the caller of the request has lost the right to make it."""
MOST_MISSED = 1_000
"""The most unchanged tasks that are listed one by one; further ones are only counted."""
_MOST_EXPLAINED = 50
"""The most listed tasks for which the last change is read from the event log."""
MOST_NOTED = 5_000
"""The most changes of one request that are recorded in the event log. It holds some ten thousand events, so a large
request would push everything else out of it, and then its own beginning. The audit log has all changes."""
_TRIES = 5
_PATIENCE = 60.0
"""Seconds for which a store may be unavailable before a request is given up."""
_SECOND: Token = 1_000_000
"""A second in tokens, which are microseconds of the clock or ahead of it."""
_SMOOTH = 10
"""Batches per second, if the pace allows that many."""
AT_ONCE = 4
"""Concurrent runs in one instance; others wait."""
LOST_AFTER: Millis = 10_000
"""The time after its last write at which a run counts as lost."""
_EVERY = 1.0
"""Seconds between two writes of the progress."""
_MISSED_EVERY = 5
"""The list of missed tasks is written only with every fifth progress, since it may have some hundred kB."""
_DAY: Millis = 86_400_000
KEPT: Millis = 9 * _DAY
"""How long the progress of an ended run is kept."""
_MISSED_KEPT: Millis = _DAY
"""How long the missed tasks are kept. Everything else in this topic ends within two days, so entries that are kept
longer are progress, and are listed without reading the rest."""
_LISTED: Millis = 2 * _DAY
_HEAD, _MISSED, _STOP = "change:", "missed:", "stop:"
"""Prefixes of the names of a run's progress, its missed tasks, and the request to stop it."""
_CLOSING = 5.0
"""Seconds that the current batches have when the instance ends."""


class BulkState(StrEnum):
    QUEUED = "queued"
    """It waits for other runs in this instance."""
    RUNNING = "running"
    ENDED = "ended"
    STOPPED = "stopped"
    FAILED = "failed"

    @property
    def over(self) -> bool:
        return self in (BulkState.ENDED, BulkState.STOPPED, BulkState.FAILED)


class Progress(Struct, kw_only=True):
    """The progress of a request. Times are by the store's clock."""

    id: str
    bulk: BulkRequest
    """The request, with only the first of its chosen tasks."""
    chosen: int
    """The number of chosen tasks; 0: all that match."""
    topics: tuple[Topic, ...] = ()
    who: str
    instance: str
    asked_at: Millis
    alive_at: Millis
    """When the instance last wrote the progress."""
    state: BulkState = BulkState.QUEUED
    started_at: Millis | None = None
    ended_at: Millis | None = None
    total: int | None = None
    total_exact: bool = True
    looked: int = 0
    """The number of tasks with an answer."""
    counts: dict[str, int] = field(default_factory=dict)
    """The number of tasks by answer: a `Result`, or UNKNOWN or FAILED."""
    missed: int = 0
    """The number of tasks that were not changed as requested."""
    first_token: Token | None = None
    """Every task changed by the run has this token or a newer one; None: no known change."""
    stopped_by: str | None = None
    """The name of the caller who stopped it; None: the instance ended."""
    error: str | None = None
    identity: str = ""
    """The caller's identity, since names may not be unique."""


def untouched_by(progress: Progress) -> Token | None:
    """The token below which the run has changed no task; None: it has changed no task.

    For a run whose instance died it is a second lower, since it may have got lower tokens from other servers later.
    """
    if progress.state.over:
        return progress.first_token
    earliest = _earliest(progress)
    return earliest if progress.first_token is None else max(earliest, progress.first_token - _SECOND)


def _earliest(progress: Progress) -> Token:
    """The lowest token that the run can have got, since tokens follow the clock; less a second for clock skew."""
    return (progress.started_at or progress.asked_at) * 1000 - _SECOND


class BulkRun:
    """One request in progress. It ends after the current batch at `stop`, or if `still`, called before each, raises."""

    def __init__(self, meant: BulkScope, progress: Progress, still: CheckAllowed) -> None:
        self.scope = meant
        self.progress = progress
        self.missed: list[MissedTask] = []
        self._client = meant.client
        self._bulk = meant.bulk
        self._still = still
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._ahead: set[int | str] = set()
        self._free_at = 0.0

    @property
    def stopping(self) -> bool:
        return self._stop.is_set()

    def stop(self, who: str | None) -> None:
        """End after the current batch; `who` is the caller, or None if the instance ends."""
        if not self.stopping:
            self.progress.stopped_by = who
            self._stop.set()

    async def go(self) -> None:
        """Change all tasks of the request, unless it is stopped. Raises StoreError if the store stays unavailable."""
        if self._bulk.chosen:
            await self._in_turn(self._bulk.chosen, self._change_chosen)
            return
        most = PAGE if self._bulk.pace is None else min(PAGE, 10 * self._piece)
        walk = Walk(self.scope, limit=most)
        while not walk.over and not self.stopping:
            page = await self._patiently(walk.page)
            unmet = [(one, one.token) for one in page if _number(one.id) not in self._ahead]
            await self._in_turn(unmet, self._change)

    # --- pace

    @property
    def _piece(self) -> int:
        pace = self._bulk.pace
        return PAGE if pace is None else max(1, min(PAGE, pace // _SMOOTH))

    async def _in_turn(self, tasks: Sequence[T], change: Callable[[Sequence[T]], Awaitable[None]]) -> None:
        """Change `tasks` batch by batch, each as soon as the pace allows. Raises the errors of `still`."""
        for place in range(0, len(tasks), self._piece):
            piece = tasks[place : place + self._piece]
            if self._bulk.pace is not None:
                await self._pause(self._free_at - self._loop.time())
                self._free_at = max(self._free_at, self._loop.time()) + len(piece) / self._bulk.pace
            await self._patiently(self._still)
            if self.stopping:
                return
            await change(piece)

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, seconds)):
                await self._stop.wait()

    # --- change

    async def _change_chosen(self, chosen: Sequence[Version]) -> None:
        """Change each task if it is still as it was seen."""
        refs = [seen.ref for seen in chosen]
        records = await self._patiently(lambda: self._client.store.get(refs))
        there: list[tuple[Record, Token]] = []
        for seen, record in zip(chosen, records, strict=True):
            if record is None:
                await self._count(seen.ref, seen.token, Answer(Result.NOT_FOUND))
            else:
                there.append((record, seen.token))
        await self._change(there)

    async def _change(self, left: Sequence[tuple[Record, Token]]) -> None:
        """Change these tasks; retry while the store is unavailable. With a filter, a task that another caller changed
        meanwhile is changed in its current version. Raises StoreUnavailable if the store stays unavailable for all.
        """
        tries, again, counted = _TRIES, self._patience(), False
        while left:
            stale: list[tuple[Record, Token]] = []
            away: list[tuple[Record, Token, StoreUnavailable]] = []
            answers = await self._send([change_of(self._bulk, *one, self._client) for one in left])
            for (record, token), answer in zip(left, answers, strict=True):
                if isinstance(answer, StoreUnavailable):
                    away.append((record, token, answer))
                elif tries > 1 and (now := self._changed_meanwhile(answer)) is not None:
                    stale.append((now, now.token))
                else:
                    counted = True
                    self._remember(record, answer)
                    await self._count(record.ref, token, answer)
            if away and not await again():
                if not counted and not stale:
                    raise away[0][2]
                for record, token, error in away:
                    await self._count(record.ref, token, error)
                away = []
            tries -= bool(stale)
            left = stale + [(record, token) for record, token, _ in away]

    def _changed_meanwhile(self, answer: Answer | StoreError) -> Record | None:
        """The current version of a task that another caller has changed, if the filter still covers it."""
        if self._bulk.where is None or not isinstance(answer, Answer) or answer.result is not Result.STALE_TOKEN:
            return None
        return answer.record if answer.record is not None and self.scope.admits(answer.record) else None

    def _remember(self, before: Record, answer: Answer | StoreError) -> None:
        """Remember a changed task that the walk could meet again."""
        where, now = self._bulk.where, answer.record if isinstance(answer, Answer) else None
        if where is None or now is None:
            return
        if self._bulk.verb is BulkVerb.REDRIVE:
            # it may die again at a time at which its old death would still have matched
            ahead = self.scope.began_before(now)
        else:  # within a group the order is by keys, which do not change
            ahead = now.state.live and where.group is None and now.wake_at >= before.wake_at
            ahead = ahead and (where.wake_before is None or now.wake_at < where.wake_before)
        if ahead:
            self._ahead.add(_number(now.id))

    async def _count(self, ref: Ref, seen: Token, answer: Answer | StoreError) -> None:
        """Count the answer; list the task if it was not changed as requested."""
        progress = self.progress
        progress.looked += 1
        if isinstance(answer, StoreError):
            word = UNKNOWN if isinstance(answer, OutcomeUnknown) else FAILED
            if word == UNKNOWN:
                progress.first_token = _earliest(progress)
        else:
            word = answer.result.value
        progress.counts[word] = progress.counts.get(word, 0) + 1
        if isinstance(answer, Answer) and answer.ok:
            if answer.record is not None:
                token = answer.record.token
                progress.first_token = token if progress.first_token is None else min(token, progress.first_token)
            return
        progress.missed += 1
        if len(self.missed) < MOST_MISSED:
            self.missed.append(await self._missed(ref, seen, word, answer))

    async def _missed(self, ref: Ref, seen: Token, word: str, answer: Answer | StoreError) -> MissedTask:
        if isinstance(answer, StoreError):
            return MissedTask(ref.topic, ref.key, word, seen=seen, what=str(answer)[:200])
        record = answer.record
        missed = MissedTask(ref.topic, ref.key, word, seen=seen)
        if record is not None:
            holder = record.holder if record.state is State.LEASED else None
            missed = MissedTask(
                ref.topic, ref.key, word, record.state, record.wake_at, record.deadline, holder, seen, record.token
            )
        changed = answer.result in (Result.STALE_TOKEN, Result.FINISHED, Result.NOT_FOUND)
        if changed and self._bulk.chosen and len(self.missed) < _MOST_EXPLAINED:
            with suppress(StoreError):  # the answer is valid without the event
                for event in await self._client.events(ref.topic, ref.key, limit=5):
                    if event.at * 1000 + 999 >= seen:
                        what = event.what if event.kind is EventKind.CHANGE else event.kind.value
                        return replace(missed, who=event.who, what=what)
        return missed

    # --- the store

    async def _send(self, changes: Sequence[Change]) -> Sequence[Answer | StoreError]:
        """An answer, or an error in its place, for each change."""
        caller = current_caller() if self.progress.looked >= MOST_NOTED else None
        changing = self._client.change_many(changes)
        answers: Sequence[object]
        try:
            # beyond the recorded number, run in a context without a caller
            answers = await (changing if caller is None else self._loop.create_task(changing, context=Context()))
        except PartlyFailed as partly:
            answers = partly.answers
        except (StoreUnavailable, OutcomeUnknown) as error:
            return [error] * len(changes)
        if (
            caller is not None
            and caller.on_change is not None
            and (done := [one for one in answers if isinstance(one, Answer)])
        ):
            caller.on_change(verb_of(changes[0]), done, caller.who)
        return [one for one in answers if isinstance(one, Answer | StoreError)]

    async def _patiently(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Call `ask`, and retry while the store is unavailable. Raises StoreUnavailable if it stays so."""
        again = self._patience()
        while True:
            try:
                return await ask()
            except StoreUnavailable:
                if not await again():
                    raise

    def _patience(self) -> Callable[[], Awaitable[bool]]:
        """A function that waits, longer each time, and returns True while there is time for another try."""
        until, delay = self._loop.time() + _PATIENCE, 0.1

        async def again() -> bool:
            nonlocal delay
            if self.stopping or self._loop.time() >= until:
                return False
            await self._pause(delay)
            delay = min(2 * delay, 5.0)
            return True

        return again


def _number(id: str) -> int | str:
    """An id in fewer bytes, or unchanged if it is not a UUID."""
    try:
        return int(id.replace("-", ""), 16)
    except ValueError:
        return id


_encode = msgspec.msgpack.encode
_decode = msgspec.msgpack.Decoder(Progress).decode
_decode_missed = msgspec.msgpack.Decoder(list[MissedTask]).decode


async def _always() -> None:
    """Never raise: for callers whose rights do not end."""


class BulkRunner:
    """The runs of one instance. Belongs to the event loop it was made in; `client` is open."""

    def __init__(self, client: Client, instance: str) -> None:
        self._client = client
        self._instance = instance
        self._store = SettingsStore(client.store, client.clock, SHOWN_TOPIC)
        self._loop = asyncio.get_running_loop()
        self._runs: dict[str, BulkRun] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._closing = False

    async def start(
        self, id: str, bulk: BulkRequest, may: May, *, who: str, identity: str = "", still: CheckAllowed = _always,
        asked_at: Millis = LAST_INSTANT,
    ) -> bool:  # fmt: skip
        """Start a run in the background, in the context of its caller; it ends if `still` raises.

        False if a run with this `id` was already started, here or in another instance, so that a resent form does not
        start a second run. `asked_at`: when the caller saw what the request covers, if that was before now.
        """
        if id in self._runs:
            return False
        now = self._client.clock.now()
        progress = Progress(
            id=id, bulk=msgspec.structs.replace(bulk, chosen=bulk.chosen[:1]), chosen=len(bulk.chosen), who=who,
            instance=self._instance, asked_at=now, alive_at=now, identity=identity,
            topics=tuple({one.ref.topic for one in bulk.chosen}),
        )  # fmt: skip
        run = BulkRun(BulkScope(self._client, bulk, may, min(asked_at, now), now), progress, still)
        self._runs[id] = run  # set before the store call, so that a second call finds it
        begun = False
        try:
            begun = await self._store.put_if_absent(f"{_HEAD}{id}", _encode(progress), until=now + KEPT)
        except StoreFull:  # a full store still drains, so the run goes on, known only to this instance
            begun = True
        finally:
            if not begun:
                del self._runs[id]
        if begun:
            self._tasks[id] = self._loop.create_task(self._carry_out(run), name=f"bide bulk {id}")
        return begun

    async def get(self, id: str) -> Progress | None:
        """The progress of a run; None: never started, or no longer kept. Raises StoreError."""
        run = self._runs.get(id)
        if run is not None:
            return run.progress
        value = await self._store.get(f"{_HEAD}{id}")
        return None if value is None else _read(id, value)

    async def missed(self, id: str) -> list[MissedTask]:
        """The first thousand tasks that were not changed as requested; empty once they are no longer kept."""
        run = self._runs.get(id)
        if run is not None:
            return run.missed
        value = await self._store.get(f"{_MISSED}{id}")
        return [] if value is None else _decode_missed(value)

    async def all(self) -> list[Progress]:
        """The runs of the last days, newest first. O(found)."""
        now = self._client.clock.now()
        kept = await self._store.ending(now + _LISTED, now + KEPT + _DAY)
        read = (_read(name, value) for name, value in kept.items() if name.startswith(_HEAD))
        found = {progress.id: progress for progress in read if progress is not None}
        found.update({id: run.progress for id, run in self._runs.items()})
        return sorted(found.values(), key=lambda one: one.asked_at, reverse=True)

    def is_lost(self, progress: Progress) -> bool:
        """True if the run is not over but its instance is gone."""
        if progress.state.over or progress.id in self._tasks:
            return False
        return progress.alive_at + self._client.clock.span(LOST_AFTER) < self._client.clock.now()

    async def stop(self, id: str, *, who: str) -> None:
        """Let the run end after the current batch, whichever instance runs it."""
        run = self._runs.get(id)
        if run is not None:
            run.stop(who)
        else:
            until = self._client.clock.now() + _DAY
            await self._store.put(f"{_STOP}{id}", who.encode(errors="replace"), until=until)

    async def close(self) -> None:
        """End the runs after their current batches, and write their progress."""
        self._closing = True
        for run in self._runs.values():
            run.stop(None)
        if self._tasks:
            _, left = await asyncio.wait(list(self._tasks.values()), timeout=_CLOSING)
            for task in left:
                task.cancel()
            if left:
                await asyncio.wait(left)

    # --- in the background

    async def _carry_out(self, run: BulkRun) -> None:
        progress = run.progress
        ended = BulkState.STOPPED
        attending = self._loop.create_task(self._attend(run), name="bide bulk progress")
        try:
            async with self._turns:
                progress.state = BulkState.RUNNING
                progress.started_at = self._client.clock.now()
                if not run.stopping:
                    await self._count_total(run)
                    await run.go()
                ended = BulkState.STOPPED if run.stopping else BulkState.ENDED
        except BideError as error:
            ended = BulkState.FAILED
            progress.error = str(error)[:500]
        except Exception as error:  # noqa: BLE001 - no caller awaits this task: the page and the log show the error
            ended = BulkState.FAILED
            progress.error = f"a defect of the service ({type(error).__name__}): its log says more"
            _log.exception("a defect in the change %s", progress.id)
        finally:
            attending.cancel()
            await asyncio.wait([attending])
            progress.state = ended
            progress.ended_at = progress.alive_at = self._client.clock.now()
            self._tasks.pop(progress.id, None)
            if await self._write(run, missed=True) and not self._closing:
                self._runs.pop(progress.id, None)  # from now on the progress is read from the store

    async def _count_total(self, run: BulkRun) -> None:
        """Count the tasks, so that the progress can be shown as a fraction."""
        progress = run.progress
        if progress.chosen:
            progress.total = progress.chosen
            return
        try:
            count, _ = await run.scope.total()
        except StoreUnavailable as error:
            _log.info("the number of tasks of the change %s is unknown: %s", progress.id, error)
        else:
            progress.total, progress.total_exact = count

    async def _attend(self, run: BulkRun) -> None:
        written = turn = 0
        while True:
            await asyncio.sleep(_EVERY)
            turn += 1
            more = turn % _MISSED_EVERY == 0 and len(run.missed) != written
            if await self._write(run, missed=more) and more:
                written = len(run.missed)

    async def _write(self, run: BulkRun, *, missed: bool) -> bool:
        """Write the progress; False if the store does not accept it now."""
        progress, store, now = run.progress, self._store, self._client.clock.now()
        try:
            if not progress.state.over:
                progress.alive_at = now
                who = await store.get(f"{_STOP}{progress.id}")
                if who is not None:
                    run.stop(who.decode(errors="replace"))
            if missed and run.missed:
                await store.put(f"{_MISSED}{progress.id}", _encode(run.missed), until=now + _MISSED_KEPT)
            await store.put(f"{_HEAD}{progress.id}", _encode(progress), until=progress.asked_at + KEPT)
        except StoreError as error:
            _log.warning("the progress of the change %s cannot be saved now: %s", progress.id, error)
            return False
        return True


def _read(id: str, value: bytes) -> Progress | None:
    try:
        return _decode(value)
    except msgspec.MsgspecError:
        _log.error("the record of the change %s cannot be read and is skipped", id)
        return None
