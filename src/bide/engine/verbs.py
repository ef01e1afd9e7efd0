"""The verbs of a client, for every store.

Single calls are batched (one batcher each for adds, changes and gets), so a thousand coroutines cost one store call.
Inside a joined transaction they go straight to it. An answer is returned once the change is durable in the store.

A verb on a whole group reads pages with `find`, then sends `change` with `if_token`; a task that changed in between is
read again. That is atomic per task, bounded per store call, and safe to repeat: each change names the token with which
the task was read, so one call changes no task twice. A task that has left the group meanwhile is left alone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Never, TypedDict, TypeVar

from msgspec import Struct

from bide.core.answers import Answer
from bide.core.errors import BadInput, NotOpen, PartlyFailed, StoreError, StoreUnavailable
from bide.core.events import Event
from bide.core.instants import (
    LAST_INSTANT,
    LONGEST,
    At,
    Due,
    In,
    Length,
    Millis,
    When,
    as_datetime,
    check_instant,
    due_of,
    duration,
    duration_text,
    instant,
    instant_text,
    one_due,
    with_grain,
)
from bide.core.lifecycle import gone
from bide.core.names import RESERVED_TOPICS, check_name, check_topic, check_topics, new_id
from bide.core.options import encode_options
from bide.core.payloads import encode_payload, next_limit
from bide.core.records import (
    Cancel,
    Change,
    Filter,
    Found,
    Move,
    NewTask,
    OnConflict,
    Page,
    Pause,
    Record,
    Redrive,
    Ref,
    Result,
    State,
    Tally,
    Token,
    Topic,
)
from bide.core.retry import RetryPolicy, policy
from bide.core.tasks import Task
from bide.engine.config import EngineConfig
from bide.engine.pauses import PauseGate, Pauses
from bide.engine.session import Session, SharedSession, current_caller, inherited_headers, running_loop
from bide.ports import COUNTED, Clock, Store, TracePropagator

Chosen = TypeVar("Chosen")
_PAGE = 500
_FIRST_PAGE = 50
"""The most tasks of the first page, when the size of their payloads is unknown."""
_TRIES = 5
_LARGEST: int = 2**31 - 1
"""The largest page, and the largest number of events, that a caller may ask for."""
_LAST_TOKEN: Token = 2**63 - 1
_CANCELLED = (Result.CANCELLED, Result.CANCELLED_WHILE_LEASED)


class Pages(Struct):
    """The tasks that match `where`, page by page: few first, then at most `most` with about 1 MiB of payloads."""

    _where: Filter
    _most: int = _PAGE
    _limit: int = _FIRST_PAGE
    _cursor: str | None = None
    over: bool = False

    def __post_init__(self) -> None:
        whole_number("page", self._most, 1, _LARGEST)

    async def read(self, client: ClientVerbs, most: int | None = None) -> list[Record]:
        """The next tasks, at most `most`; may be empty. A page that fails can be read again. Raises StoreError."""
        limit = min(self._limit, self._most if most is None else most)
        found = await client.find_page(self._where, Page(limit=limit, cursor=self._cursor))
        self._cursor, self.over = found.cursor, found.cursor is None
        if found.tasks:
            self._limit = next_limit(found.tasks, self._most)
        return found.tasks


class ClientVerbs:
    """The verbs of every client. Each uses the session from `_session`.

    Topics, keys and groups are text of 1 to 200 bytes. An instant is an aware datetime, ISO 8601 text with an
    offset, or text such as "08:00 Asia/Tokyo", "tomorrow 20:00 UTC", "mon 09:00 UTC" or "2030-01-31 08:00 UTC"; a
    length is a timedelta, or text such as "15m" or "1h30m". Every verb that writes raises BadInput for an argument that
    is none of these, NotOpen and SetupError if the app is not open here, and StoreUnavailable if the store is
    unavailable: then nothing was done. OutcomeUnknown means that the verb took effect once or not at all.
    """

    config: EngineConfig
    clock: Clock
    actor: str | None
    carrier: TracePropagator | None
    _shared: SharedSession
    _check_payload: Callable[[str, object], None]
    """Raises BadPayload if the type that the topic's handler takes is known and the payload does not match it."""

    @property
    def _session(self) -> Session:
        """The open session. Raises NotOpen, SetupError. Comparing the loop also detects a forked child."""
        session = self._shared.session
        return session if session is not None and session.loop is running_loop() else self._shared.checked()

    @property
    def store(self) -> Store:
        """The open store. Raises NotOpen if nothing is open, SetupError in another event loop."""
        return self._session.store

    def now(self) -> datetime:
        """The time by this app's clock (aware, UTC). Handlers use it so that tests can move the time."""
        return as_datetime(self.clock.now())

    # --- schedule

    def new(
        self,
        topic: str,
        payload: object = None,
        *,
        key: str | None = None,
        group: str | None = None,
        delay: Length | None = None,
        at: When | None = None,
        on_conflict: str = "replace",
        retry: RetryPolicy | str | None = None,
        deadline: When | Length | None = None,
        headers: Mapping[str, str] | None = None,
        if_token: Token | None = None,
        zone: str | None = None,
        **unknown: Never,
    ) -> NewTask:
        """Make the task that `schedule` would send, checked and encoded, for `schedule_many`.

        The arguments are those of `schedule`. Raises BadInput, BadPayload. No I/O.
        """
        if unknown:
            refuse_unknown(unknown, sorted(TaskOptions.__annotations__), "an option of app.schedule")
        topic = check_topic(topic)
        if not isinstance(payload, bytes):  # bytes are taken as already encoded
            self._check_payload(topic, payload)
        if at is None and zone is None:
            due = one_due(None, delay, grain=self.clock.grain)
        else:
            due = one_due(at, delay, grain=self.clock.grain, now=self.clock.now, zone=zone)
            check_past(due, self.config.max_past, self.clock)
        carried = (None if self.carrier is None else self.carrier.headers(topic)) or inherited_headers()
        return NewTask(
            topic,
            new_id() if key is None else check_name("key", key),
            new_id(),
            due,
            encode_payload(payload, self.config.payload_limit),
            None if group is None else check_name("group", group),
            encode_options(None if retry is None else policy(retry), headers, carried)
            if retry or headers or carried
            else b"",
            deadline_of(deadline, due, self.clock, zone) if deadline is not None else None,
            one_of(CONFLICTS, on_conflict, "on_conflict"),
            None if if_token is None else check_token(if_token),
        )

    async def schedule(
        self,
        /,
        topic: str,
        payload: object = None,
        *,
        key: str | None = None,
        group: str | None = None,
        delay: Length | None = None,
        at: When | None = None,
        on_conflict: str = "replace",
        retry: RetryPolicy | str | None = None,
        deadline: When | Length | None = None,
        headers: Mapping[str, str] | None = None,
        if_token: Token | None = None,
        zone: str | None = None,
        **unknown: Never,
    ) -> Answer:
        """Schedule a task after `delay` or at `at`: `created`, `replaced`, `kept`, `refused` or `stale_token`.

        Once this has returned, the task survives any crash.

        - `payload`: a JSON value, dataclass, struct, pydantic model, or bytes; at most 256 KiB encoded.
        - `key`: the name of the task, unique within the topic; a UUIDv7 by default.
        - `group`: its owner, such as "user-7". Tasks of a group can be found, shifted and cancelled together.
        - `delay` or `at`: exactly one of them. A time in the past is due at once.
        - `zone`: the time zone of `at` and `deadline` where they are wall-clock times that do not name it.
        - `on_conflict`: what to do if the key is taken. "replace" begins a new life, "keep" leaves the existing task,
          "earliest" and "latest" compare the two times, "refuse" changes nothing.
        - `retry`: a retry policy, or the name of a preset, instead of the handler's.
        - `deadline`: an instant or a length from now, after which the task must no longer be delivered.
        - `headers`: short text that travels with the task; at most 4 KiB in total.
        - `if_token`: the token that an existing task must have; with another it stays, and the answer is `stale_token`.
          A lease raises the token, so with the token of a waiting task this never ends a delivery.

        Raises BadInput, BadPayload, StoreFull, StoreUnavailable, OutcomeUnknown. O(log n).
        """
        if self.carrier is None:
            return await self._session.add(
                self.new(
                    topic, payload, key=key, group=group, delay=delay, at=at, on_conflict=on_conflict, retry=retry,
                    deadline=deadline, headers=headers, if_token=if_token, zone=zone, **unknown,
                )
            )  # fmt: skip
        with self.carrier.scheduling(topic) as answered:
            task = self.new(
                topic, payload, key=key, group=group, delay=delay, at=at, on_conflict=on_conflict, retry=retry,
                deadline=deadline, headers=headers, if_token=if_token, zone=zone, **unknown,
            )  # fmt: skip
            return answered(await self._session.add(task))

    async def schedule_new(self, task: NewTask) -> Answer:
        """Schedule a task made by `new`, batched with concurrent calls. Raises the same errors as `schedule`."""
        return await self._session.add(_checked_new(task))

    async def schedule_many(self, tasks: Iterable[NewTask]) -> list[Answer]:
        """Schedule all of `tasks` (made by `new`) in one store call; answers in order.

        Raises the errors of `schedule`, and PartlyFailed with the available answers if part of the store is away.
        """
        return await self._session.add_many([_checked_new(task) for task in tasks])

    # --- change

    async def reschedule(
        self,
        topic: str,
        key: str,
        *,
        delay: Length | None = None,
        at: When | None = None,
        deadline: When | Length | None = None,
        if_token: Token | None = None,
        zone: str | None = None,
    ) -> Answer:
        """Make a waiting task due after `delay` or at `at`: `moved`, or `under_way` if it is leased and unchanged.

        A time past the task's deadline is `refused`, unless a new `deadline` is given as well. With `if_token` the task
        is moved only if it has that token, else the answer is `stale_token`. O(log n).
        """
        move = new_move(
            topic, key, delay=delay, at=at, deadline=deadline, if_token=if_token, zone=zone, clock=self.clock
        )
        check_past(move.due, self.config.max_past, self.clock)
        return await self._session.change(move)

    async def fire_now(self, topic: str, key: str, *, if_token: Token | None = None) -> Answer:
        """Make a waiting task due at once: `moved`, or `under_way` if it is leased and unchanged. O(log n)."""
        return await self._session.change(new_fire(topic, key, if_token=if_token))

    async def cancel(self, topic: str, key: str, *, if_token: Token | None = None) -> Answer:
        """Cancel a live task. `cancelled` means that no delivery starts afterwards.

        `cancelled_while_leased` means that a delivery is running: its handler is cancelled when the lease is next
        extended, and no other delivery follows. O(log n).
        """
        asked = self._cancel(topic, key, if_token)
        answer = await self._session.change(asked)
        self._count_kept([asked], [answer])
        return answer

    async def redrive(self, topic: str, key: str, *, delay: Length = "0s", if_token: Token | None = None) -> Answer:
        """Send a dead task again, as a new life, after `delay`: `redriven`; its deadline is cleared. O(log n)."""
        return await self._session.change(new_redrive(topic, key, delay=delay, if_token=if_token, clock=self.clock))

    async def reschedule_many(self, moves: Iterable[tuple[Ref | tuple[str, str], When | Length]]) -> list[Answer]:
        """Move many tasks, each `((topic, key), when)` with an instant or a length from now; answers in order.

        One store call. Like `fire_many`, `cancel_many` and `redrive_many`, it raises PartlyFailed with the available
        answers if a part of the store is unavailable.
        """
        most, clock = self.config.max_past, self.clock
        pairs = (pair_of(move, "moves", "pairs of (topic, key) and a time") for move in moves)
        dues = ((ref_of(ref), due_of(when, grain=clock.grain, now=clock.now)) for ref, when in pairs)
        return await self._session.change_many([Move(*ref, check_past(due, most, clock)) for ref, due in dues])

    async def fire_many(self, refs: Iterable[Ref | tuple[str, str]]) -> list[Answer]:
        """Make many tasks due at once, each a pair of topic and key; answers in order. One store call."""
        return await self._session.change_many([new_fire(*pair_of(ref), if_token=None) for ref in refs])

    async def cancel_many(self, refs: Iterable[Ref | tuple[str, str]]) -> list[Answer]:
        """Cancel many tasks, each a pair of topic and key; answers in order. One store call."""
        return await self.change_many([self._cancel(*pair_of(ref), None) for ref in refs])

    async def redrive_many(self, refs: Iterable[Ref | tuple[str, str]], *, delay: Length = "0s") -> list[Answer]:
        """Send many dead tasks again, each a pair of topic and key; answers in order. One store call."""
        return await self._session.change_many(
            [new_redrive(*pair_of(ref), delay=delay, if_token=None, clock=self.clock) for ref in refs]
        )

    async def change_many(self, changes: Sequence[Change]) -> list[Answer]:
        """Make changes (from `new_cancel` and the like, all of one verb) in one store call; answers in order."""
        answers = await self._session.change_many(changes)
        self._count_kept(changes, answers)
        return answers

    # --- groups

    async def shift(self, group: str, by: Length, *, topic: str | None = None, deadlines: bool = False) -> list[Answer]:
        """Move every waiting task of `group` (in `topic` only, if given) by a length, which may be negative.

        With `deadlines` their deadlines move too; else a move past a deadline is `refused`. Returns an answer for each
        live task. Atomic per task, bounded per store call; O(tasks of the group). Raises PartlyFailed with the answers
        so far if the store fails midway.
        """
        delta = duration(by, field="by", negative=True)
        return await self._over_group(
            group, topic, lambda one: new_shift(one, delta, deadlines=deadlines, if_token=one.token)
        )

    async def cancel_group(self, group: str, *, topic: str | None = None) -> list[Answer]:
        """Cancel every live task of `group` (in `topic` only, if given); otherwise like `shift`."""
        return await self._over_group(group, topic, lambda one: self._cancel(one.topic, one.key, one.token))

    # --- pauses

    async def pause(self, topic: str, *, who: str | None = None) -> bool:
        """Hold the tasks of `topic` back until it is resumed: True, or False if it was already paused.

        New tasks are still accepted, and running deliveries go on. Workers, consumers and webhooks get no more of its
        tasks: in this process at once, elsewhere within two seconds. A pause survives every restart. It is stored with
        `who` made it, by default this client's actor. Raises BadInput, StoreError.
        """
        paused = await self._pauses.pause(topic, who=self._actor_or(who))
        await self._reread_pauses()
        return paused

    async def resume(self, topic: str, *, who: str | None = None) -> bool:
        """Deliver the tasks of `topic` again, overdue ones at once: True, or False if it was not paused."""
        resumed = await self._pauses.resume(topic, who=self._actor_or(who))
        await self._reread_pauses()
        return resumed

    async def paused(self) -> dict[Topic, Pause]:
        """The paused topics, each with its start (milliseconds since the epoch) and who paused it. One call."""
        return dict(sorted((await self._pauses.all()).items()))

    @property
    def known_pauses(self) -> Mapping[Topic, Pause]:
        """The pauses as this process's workers know them: at most two seconds old; empty without a worker. No I/O."""
        return self.pause_gates[0].topics if self.pause_gates else {}

    @property
    def pause_gates(self) -> list[PauseGate]:
        """One gate for each worker of this process. This client refreshes them all when it changes a pause."""
        return self._session.pause_gates

    @property
    def _pauses(self) -> Pauses:
        session = self._session
        return Pauses(session.store, self.clock, session.joined())

    def _actor_or(self, who: str | None) -> str | None:
        if who is not None:
            return check_name("who", who)
        caller = current_caller()
        return self.actor if caller is None else caller.who

    async def _reread_pauses(self) -> None:
        if self._session.joined() is None:  # otherwise the change is not committed yet
            for gate in list(self.pause_gates):
                await gate.again()

    # --- read

    async def get(self, topic: str, key: str) -> Task[Any] | None:
        """The task as it is now; None if it never existed, or ended and was deleted. Raises BadInput, StoreError."""
        record = await self._session.get(Ref(check_topic(topic), check_name("key", key)))
        return None if record is None or gone(record, self.clock.now()) else Task(record)

    async def get_many(self, refs: Iterable[Ref | tuple[str, str]]) -> list[Task[Any] | None]:
        """The tasks of many pairs of topic and key, in order, each as `get` returns it. One store call."""
        records = await self._session.verbs.get([ref_of(ref) for ref in refs])
        now = self.clock.now()
        return [None if record is None or gone(record, now) else Task(record) for record in records]

    async def find(
        self,
        *,
        topic: str | None = None,
        state: str | None = None,
        group: str | None = None,
        wake_from: When | None = None,
        wake_before: When | None = None,
        page: int = 500,
    ) -> AsyncIterator[Task[Any]]:
        """Iterate over every task that matches all arguments; a task that does not change is returned exactly once.

        `state` is one word, such as "dead". With `wake_from` (inclusive) or `wake_before` (exclusive), two instants,
        only live tasks match. Reads pages of at most `page` tasks from an index: few first, then as many as have about
        1 MiB of payloads. Raises BadInput, StoreError.
        """
        pages = Pages(filter_of(topic, state, group, wake_from, wake_before, now=self.clock.now), page)
        while not pages.over:
            for record in await pages.read(self):
                yield Task(record)

    async def find_page(self, where: Filter, page: Page) -> Found:
        """One page of the tasks that match `where`. Raises StoreError, and BadInput for a foreign cursor.

        Tasks whose retention has just passed are left out, so any page may be short. The last page has no cursor.
        """
        if where.topic is not None:
            check_topic(where.topic)
        found = await self._session.verbs.find(where, page)
        now = self.clock.now()
        left = [record for record in found.tasks if not gone(record, now)]
        return found if len(left) == len(found.tasks) else Found(left, found.cursor)

    async def tally(
        self,
        edges: Sequence[When | Length] | None = None,
        *,
        upto: int = COUNTED,
        topics: Collection[Topic] | None = None,
    ) -> Tally:
        """Count tasks by (topic, state); with `edges` (lengths from now, or instants), also the tasks due between them.

        If counting has a cost, each such interval is counted up to `upto` tasks (see `Store.tally`). With `topics` only
        these are counted. Inside a transaction of the caller's it still counts what is committed, without the changes
        of that transaction. Raises BadInput, StoreError.
        """
        now = self.clock.now()
        wanted = None if edges is None else [due_of(edge, "edges", now=self.clock.now).resolve(now) for edge in edges]
        if wanted is not None and wanted != sorted(wanted):
            raise BadInput("edges", edges, "instants or lengths in ascending order")
        whole_number("upto", upto, 0, _LARGEST)
        only = None if topics is None else check_topics(topics)
        found = await self._session.store.tally(wanted, upto=upto, topics=only)
        counts = {of: count for of, count in found.counts.items() if of[0] not in RESERVED_TOPICS}
        forecast = {topic: count for topic, count in found.forecast.items() if topic not in RESERVED_TOPICS}
        return Tally(counts, forecast)

    async def events(self, topic: str | None = None, key: str | None = None, *, limit: int = 100) -> list[Event]:
        """The unusual events, newest first, at most `limit`: of one task, or of all without a topic and key.

        Empty for a store that keeps no events. Raises BadInput, StoreError.
        """
        ref = None if topic is None and key is None else Ref(check_topic(topic), check_name("key", key))
        whole_number("limit", limit, 0, _LARGEST)
        log = self._session.store.features.events
        if self._session.joined() is None:  # otherwise it may wait for the locks of the caller's own transaction
            await self._session.recorder.flush()
        return [] if log is None else await log.events(ref, limit=limit)

    async def _over_group(self, group: str, topic: str | None, make: Callable[[Record], Change]) -> list[Answer]:
        """Change every live task of the group by `make(record)`; one answer each. O(live tasks in the group).

        Raises PartlyFailed, with the answers so far and the underlying error, if there were answers before an error.
        """
        group = check_name("group", group)
        topic = None if topic is None else check_topic(topic)
        verbs = self._session.verbs
        answers: list[Answer] = []
        cursor: str | None = None
        try:
            while True:
                where = Filter(group=group, topic=topic, wake_from=0)  # so only live tasks are read
                found = await verbs.find(where, Page(limit=_PAGE, cursor=cursor))
                live = found.tasks
                for again in reversed(range(_TRIES)):
                    if not live:
                        break
                    stale: list[Ref] = []
                    for answer in await self.change_many([make(record) for record in live]):
                        if answer.result is Result.STALE_TOKEN and answer.record is not None and again:
                            stale.append(answer.record.ref)
                        else:
                            answers.append(answer)
                    seen = await verbs.get(stale) if stale else []
                    live = [one for one in seen if one is not None and one.state.live and one.group == group]
                cursor = found.cursor
                if cursor is None:
                    return answers
        except (StoreError, NotOpen) as error:
            if not answers:
                raise
            if isinstance(error, NotOpen):  # the app closed meanwhile
                error = StoreUnavailable(str(error))
            raise PartlyFailed([*answers, *(error.answers if isinstance(error, PartlyFailed) else [error])]) from error

    def _count_kept(self, changes: Sequence[Change], answers: Sequence[Answer]) -> None:
        """Of the tasks to be cancelled, which the retention has counted, count only those that are."""
        for asked, answer in zip(changes, answers, strict=True):
            if type(asked) is Cancel and asked.keep_until and answer.result not in _CANCELLED:
                self.config.retentions.of(asked.topic).not_kept(State.CANCELLED)

    def _cancel(self, topic: str, key: str, if_token: Token | None) -> Cancel:
        return new_cancel(topic, key, if_token=if_token, config=self.config, clock=self.clock)


# --- arguments, checked and converted: all raise BadInput, naming the field


class TaskOptions(TypedDict, total=False):
    """The options of a task; `ClientVerbs.schedule` explains each."""

    key: str | None
    group: str | None
    delay: Length | None
    at: When | None
    on_conflict: str
    retry: RetryPolicy | str | None
    deadline: When | Length | None
    headers: Mapping[str, str] | None
    if_token: Token | None
    zone: str | None


CONFLICTS = {choice.value: choice for choice in OnConflict}
STATES = {state.value: state for state in State}


def refuse_unknown(options: Iterable[str], known: Sequence[str], of: str) -> None:
    """Raise BadInput for the first unknown option, with the closest known one; `of`: "an option of app.handler"."""
    from difflib import get_close_matches  # imported here, since only an error needs it

    for name in options:
        closest = get_close_matches(name, known, n=1, cutoff=0.0)
        raise BadInput(of.rpartition(" ")[2], name, f"{of}; the closest name is {closest[0]}")


def whole_number(field: str, value: object, least: int, most: int) -> int:
    """Return `value` if it is a whole number within these bounds. Raises BadInput."""
    if type(value) is not int or not least <= value <= most:
        raise BadInput(field, value, f"a whole number from {least:,} to {most:,}")
    return value


def check_token(if_token: object) -> Token | None:
    """Return `if_token` if it can be a condition: a task's token, or None for no condition. Raises BadInput."""
    return None if if_token is None else whole_number("if_token", if_token, 0, _LAST_TOKEN)


def one_of(choices: Mapping[str, Chosen], choice: object, field: str) -> Chosen:
    """The choice that a word names. Raises BadInput."""
    found = choices.get(choice) if isinstance(choice, str) else None
    if found is None:
        raise BadInput(field, choice, f"one of {', '.join(choices)}")
    return found


def pair_of(pair: Any, field: str = "refs", accepted: str = "pairs of (topic, key)") -> tuple[Any, Any]:
    """A pair, such as (topic, key), its parts not checked yet. Raises BadInput."""
    try:
        first, second = [pair] if isinstance(pair, str) else pair
    except (TypeError, ValueError):
        raise BadInput(field, pair, accepted) from None
    return first, second


def _checked_new(task: NewTask) -> NewTask:
    if type(task) is not NewTask:
        raise BadInput("tasks", task, "tasks made by app.new(...) or handler.new(...)")
    if task.topic in RESERVED_TOPICS:
        check_topic(task.topic)
    return task


def ref_of(ref: Ref | tuple[str, str]) -> Ref:
    """A (topic, key) pair."""
    topic, key = pair_of(ref)
    return Ref(check_topic(topic), check_name("key", key))


def check_past(due: Due, most: Millis, clock: Clock) -> Due:
    """Return `due`. Raises BadInput for an instant further in the past than `most`."""
    if most != LONGEST and type(due) is At and due.millis < clock.now() - most:
        raise BadInput("at", instant_text(due.millis), f"a time that is at most {duration_text(most)} ago (max_past)")
    return due


def deadline_of(deadline: When | Length | None, due: Due, clock: Clock, zone: str | None = None) -> Millis | None:
    """The instant of a deadline. Raises BadInput if it is before the task is due."""
    if deadline is None:
        return None
    now = clock.now()
    not_after = due_of(deadline, "deadline", grain=clock.grain, now=lambda: now, zone=zone).resolve(now)
    check_instant(not_after, field="deadline", value=deadline)
    if not_after < due.resolve(now):
        raise BadInput("deadline", deadline, "an instant that is not before the task is due")
    return not_after


def filter_of(
    topic: str | None, state: str | None, group: str | None, wake_from: When | None, wake_before: When | None,
    *, now: Callable[[], Millis] | None = None,
) -> Filter:  # fmt: skip
    return Filter(
        topic=None if topic is None else check_topic(topic),
        state=None if state is None else one_of(STATES, state, "state"),
        group=None if group is None else check_name("group", group),
        wake_from=None if wake_from is None else instant(wake_from, field="wake_from", now=now),
        wake_before=None if wake_before is None else instant(wake_before, field="wake_before", now=now),
    )


def new_move(
    topic: str, key: str, *, delay: Length | None, at: When | None, deadline: When | Length | None,
    if_token: Token | None, zone: str | None = None, clock: Clock,
) -> Move:  # fmt: skip
    due = one_due(at, delay, grain=clock.grain, now=clock.now, zone=zone)
    not_after = deadline_of(deadline, due, clock, zone)
    return Move(check_topic(topic), check_name("key", key), due, check_token(if_token), not_after)


def new_fire(topic: str, key: str, *, if_token: Token | None) -> Move:
    return Move(check_topic(topic), check_name("key", key), In(0), check_token(if_token), verb="fire_now")


def new_cancel(topic: str, key: str, *, if_token: Token | None, config: EngineConfig, clock: Clock) -> Cancel:
    """Cancel a live task, and keep it as long as the retention of its topic says."""
    # all checks before the retention, which may count the task
    topic, key, if_token = check_topic(topic), check_name("key", key), check_token(if_token)
    keep_until = config.retentions.of(topic).keep_until(State.CANCELLED, clock.now())
    return Cancel(topic, key, keep_until, if_token)


def new_shift(record: Record, by: Millis, *, deadlines: bool, if_token: Token) -> Move:
    """Move a waiting task by a length from its due time; with `deadlines` its deadline moves too."""
    deadline = shifted(record.deadline, by) if deadlines and record.deadline is not None else None
    return Move(record.topic, record.key, At(shifted(record.due_at, by)), if_token, deadline, "shift")


def shifted(at: Millis, by: Millis) -> Millis:
    """Move an instant by a length, within the bounds of instants."""
    return min(max(0, at + by), LAST_INSTANT)


def new_redrive(topic: str, key: str, *, delay: Length, if_token: Token | None, clock: Clock) -> Redrive:
    due = with_grain(In(duration(delay, field="delay")), clock.grain)
    return Redrive(check_topic(topic), check_name("key", key), new_id(), due, check_token(if_token))
