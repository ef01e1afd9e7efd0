"""The verbs of recurring tasks. A recurring task is an ordinary task whose options hold a rule and its policies.

So each verb here is a few calls of the ordinary ones. A change of a rule replaces the waiting task only if its token is
still the one that was read. The token rises when an occurrence is leased, so no change ends a running occurrence, runs
one twice, or loses one: while an occurrence runs, the change waits a moment, and then answers `under_way`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, TypeAlias, TypedDict, Unpack

from msgspec.structs import replace

from bide.core.answers import Answer
from bide.core.errors import BadInput, PartlyFailed, StoreError
from bide.core.instants import LAST_INSTANT, At, Due, Length, Millis, When, as_datetime, duration, instant
from bide.core.lifecycle import gone
from bide.core.names import check_name, check_topic, new_id
from bide.core.options import encode_options, recurrence_of, with_recurrence
from bide.core.payloads import encode_payload
from bide.core.records import Move, NewTask, Record, Ref, Result, State, Token
from bide.core.recurrence.plan import MOST, CatchUp, Overlap, Recurrence
from bide.core.recurrence.rules import Bounds, Rule
from bide.core.retry import RetryPolicy, policy
from bide.core.tasks import Task
from bide.engine.delivery.occurrences import NO_TOKEN, own_task
from bide.engine.verbs import ClientVerbs, one_of, refuse_unknown, whole_number

_log = logging.getLogger("bide.recurring")
LONGEST_KEY = 175
"""The most bytes of a recurring task's key: the key of a separate occurrence has `@` and its instant appended."""
MOST_BACKFILLED = 10_000
_PAUSES = (0.0, 0.05, 0.1, 0.2, 0.4, 0.8)
"""Seconds before each attempt to change a task whose occurrence is running."""
_CHANGING = (Result.UNDER_WAY, Result.STALE_TOKEN)
_CATCH_UPS = {choice.value: choice for choice in CatchUp}
_OVERLAPS = {choice.value: choice for choice in Overlap}

Maker: TypeAlias = Callable[[], NewTask]
"""Makes a recurring task that a program declares. Raises RuleEnded."""


class RuleEnded(BadInput):
    """A rule has no future instant."""


class RecurrenceOptions(TypedDict, total=False):
    """The options of a recurring task; `Recurring.add` explains each."""

    key: str | None
    group: str | None
    catch_up: str
    window: Length | None
    most: int
    overlap: str
    deadline: Length | None
    end_when_dead: bool
    retry: RetryPolicy | str | None
    headers: Mapping[str, str] | None


def check_options(options: Iterable[str], of: str) -> None:
    """Raise BadInput for the first that is no option of a recurring task; `of`: "an option of app.recurs"."""
    for name in options:
        if name in ("zone", *Bounds.__annotations__):  # which people give to the task
            accepted = f"it to the rule, as in @app.recurs(Cron(..., {name}=...))"
            raise BadInput(of.rpartition(" ")[2], name, accepted)
    known = RecurrenceOptions.__annotations__
    refuse_unknown([name for name in options if name not in known], sorted(known), of)


class Recurring:
    """The verbs of recurring tasks, as `app.recurring`. They raise the errors of `app.schedule`."""

    def __init__(self, client: ClientVerbs) -> None:
        self._client = client

    def new(
        self, topic: str, rule: Rule, payload: object = None, *, declared: bool = False,
        **options: Unpack[RecurrenceOptions],
    ) -> NewTask:  # fmt: skip
        """Make the task that `add` would add, for `add_many`. The arguments are those of `add`. No I/O."""
        check_options(options, "an option of app.recurring.add")
        client = self._client
        topic, key = _ref(topic, options.get("key"))
        most = whole_number("most", options.get("most", MOST), 1, MOST_BACKFILLED)
        end_when_dead, retry = options.get("end_when_dead", False), options.get("retry")
        if not isinstance(rule, Rule):
            raise BadInput("rule", rule, "a rule: Cron(...), Every(...), RRule(...) or At(...)")
        if type(end_when_dead) is not bool:
            raise BadInput("end_when_dead", end_when_dead, "True or False")
        recurrence = Recurrence(
            rule=rule, catch_up=one_of(_CATCH_UPS, options.get("catch_up", "latest"), "catch_up"),
            overlap=one_of(_OVERLAPS, options.get("overlap", "skip"), "overlap"), most=most,
            window=None if (given := options.get("window")) is None else duration(given, field="window"),
            deadline=None if (given := options.get("deadline")) is None else duration(given, field="deadline"),
            end_when_dead=end_when_dead, declared=declared,
        )  # fmt: skip
        first = recurrence.first(client.clock.now(), key)
        if first is None:
            raise RuleEnded("rule", rule.words, "a rule with a future instant")
        if not isinstance(payload, bytes):
            client._check_payload(topic, payload)
        own = encode_options(None if retry is None else policy(retry), options.get("headers"))
        return NewTask(
            topic, key, new_id(), At(first), encode_payload(payload, client.config.payload_limit),
            None if (given := options.get("group")) is None else check_name("group", given),
            with_recurrence(own, recurrence), if_token=NO_TOKEN,
        )  # fmt: skip

    async def add(
        self, /, topic: str, rule: Rule, payload: object = None, *, declared: bool = False,
        **options: Unpack[RecurrenceOptions],
    ) -> Answer:  # fmt: skip
        """Make a task of `topic` recur by `rule`: `created`, `kept` if nothing changed, `replaced` otherwise.

        A change moves the next occurrence. One that is already due still runs, and one that has begun goes on: then
        the answer is `under_way`, and nothing has changed: repeat the call. `finished` or `not_found`: the task was
        removed or died while the call waited for the end of an occurrence, and stays so.

        - `key`: its name within the topic; by default the topic's name.
        - `payload`, `group`, `retry`, `headers`: as in `app.schedule`, for each occurrence.
        - `catch_up`: what happens to occurrences that could not start in time, as after an outage. "latest" runs the
          latest one, "all" each of them, at most the last `most`, and "none" none.
        - `window`: a length; an occurrence that is later than this does not run.
        - `overlap`: what happens to an occurrence that comes while the one before it runs. "skip" drops it,
          "queue" runs it afterwards, "allow" runs it as a separate task (with the key `key@instant`), and
          "cancel_running" cancels the running one.
        - `deadline`: a length after which an occurrence must no longer be delivered.
        - `end_when_dead`: end the rule with the first occurrence that dies; by default it goes on.
        """
        return (await self.add_many([self.new(topic, rule, payload, declared=declared, **options)]))[0]

    async def add_many(self, tasks: Iterable[NewTask], *, known: bool = False) -> list[Answer]:
        """Add many recurring tasks, made by `new`; answers in order. One store call if all are new.

        Raises PartlyFailed, with the answers to the others, if some failed.

        `known`: an earlier call found all of them, so those that have gone since are not added again.
        """
        session, clock = self._client._session, self._client.clock
        wanted = list(tasks)
        for task in wanted:
            if type(task) is not NewTask or recurrence_of(task.options) is None:
                raise BadInput("tasks", task, "tasks made by app.recurring.new(...)")

        def decide(place: int, old: Record, again: bool) -> Answer | NewTask:
            if again and old.state in (State.CANCELLED, State.DEAD):  # by a newer word
                return Answer(Result.FINISHED, old)
            return changed_task(wanted[place], old, clock.now())

        answers = None
        if not known:
            added = session.verbs.add(wanted, now=clock.now())
            answers = await _each(session.plural("recur", added, bulk=len(wanted) > 1))
        return await self._replace("recur", [Ref(one.topic, one.key) for one in wanted], answers, decide)

    async def _replace(
        self, verb: str, refs: Sequence[Ref], first: list[Any] | None,
        decide: Callable[[int, Record, bool], Answer | NewTask],
    ) -> list[Answer]:  # fmt: skip
        """Replace the tasks as `decide` says, which takes the place, the task, and whether it was read here.

        `first`: the answers of a call that has created the new ones. Those that are under way, or change meanwhile,
        are read again after a pause. Raises PartlyFailed once the others are done.
        """
        session, answers = self._client._session, first or list[Any]([Answer(Result.KEPT)]) * len(refs)
        open_ones = [
            place for place, one in enumerate(answers) if isinstance(one, Answer) and one.result is not Result.CREATED
        ]
        for pause in _PAUSES:
            if not open_ones or (pause and session.joined() is not None):
                break  # others wait for the locks of the caller's transaction, as the running occurrence
            if pause:
                await asyncio.sleep(pause)
            if pause or first is None:
                found = await session.verbs.get([refs[place] for place in open_ones])
                for place, record in zip(open_ones, found, strict=True):
                    answers[place] = Answer(Result.NOT_FOUND if record is None else Result.KEPT, record)
            changes = dict[int, NewTask]()
            for place in open_ones:
                old = answers[place].record
                decided = answers[place] if old is None else decide(place, old, pause > 0 or first is None)
                if isinstance(decided, Answer):
                    answers[place] = decided
                else:
                    changes[place] = decided
            if changes:
                added = session.verbs.add(list(changes.values()), now=self._client.clock.now())
                for place, answer in zip(changes, await _each(session.plural(verb, added)), strict=True):
                    answers[place] = answer
            open_ones = [
                place for place in open_ones if isinstance(one := answers[place], Answer) and one.result in _CHANGING
            ]
        for place in open_ones:
            answers[place] = Answer(Result.UNDER_WAY, answers[place].record)
        if not all(isinstance(one, Answer) for one in answers):
            raise PartlyFailed(answers)
        return answers

    async def declare(self, makers: Mapping[Maker, bool]) -> tuple[dict[Maker, bool], list[Exception]]:
        """Add the tasks that a program declares, except those whose rules have ended.

        Return those that were `under_way` or failed, as the argument of the next call, and the errors. The value of
        each says whether a call has found the task: one that was removed since stays removed.
        """
        left, errors = dict[Maker, bool](), list[Exception]()
        for known in sorted({*makers.values()}):
            wanted = dict[Maker, NewTask]()
            for make in [one for one, its in makers.items() if its is known]:
                try:
                    wanted[make] = make()
                except RuleEnded as ended:
                    _log.info("not declared: %s", ended)
            try:
                answers: Sequence[Any] = await _each(self.add_many(wanted.values(), known=known))
            except StoreError as error:
                answers = [error] * len(wanted)
            for make, answer in zip(wanted, answers, strict=True):
                if isinstance(answer, Exception):
                    left[make] = known
                    errors.append(answer)
                elif answer.result is Result.UNDER_WAY:
                    left[make] = True
        return left, errors

    async def pause(self, topic: str, key: str | None = None) -> Answer:
        """Hold the occurrences of a recurring task back until `resume`; what would have run meanwhile does not run.

        `replaced`, or `kept` if it was paused already. `under_way`: an occurrence runs or waits for its retry; repeat
        the call.
        """
        return await self._set_paused(topic, key, paused=True)

    async def resume(self, topic: str, key: str | None = None) -> Answer:
        """Let a paused task recur again, from its next instant on: `replaced`, or `kept` if it was not paused.

        `finished`: its rule ended during the pause, and so does the task.
        """
        return await self._set_paused(topic, key, paused=False)

    async def skip_next(self, topic: str, key: str | None = None, *, if_token: Token | None = None) -> Answer:
        """Skip the next occurrence: `moved`. `under_way`: one is running now or waits for its retry.

        `refused`: it is paused. If it is the last occurrence, the rule ends: `cancelled`. `if_token`: only while the
        task has this token; else `stale_token`.
        """
        found = await self._found(topic, key)
        if found is None:
            return Answer(Result.NOT_FOUND)
        record, recurrence = found
        if record.state.live and (recurrence.paused or under_way(record)):
            return Answer(Result.REFUSED if recurrence.paused else Result.UNDER_WAY, record)
        if if_token not in (None, record.token):
            return Answer(Result.STALE_TOKEN, record)
        due_at = due_next(record, recurrence, self._client.clock.now())
        following = None if due_at is None else recurrence.first(due_at, record.key)
        if following is None:
            return await self._client.cancel(record.topic, record.key, if_token=record.token)
        move = Move(record.topic, record.key, At(following), record.token)
        return await self._client._session.change(move)

    async def run_now(self, topic: str, key: str | None = None, *, once_at: When | None = None) -> Answer:
        """Run it once now, as a separate task in addition to the plan: `created`; also while it is paused.

        `finished`: it has ended. `once_at`: the instant that names the occurrence, so that a repeated call runs
        nothing: `kept`.
        """
        now = self._client.clock.now
        at = now() if once_at is None else instant(once_at, field="once_at", now=now)
        found = await self._found(topic, key)
        if found is None or not found[0].state.live:
            return Answer(Result.NOT_FOUND) if found is None else Answer(Result.FINISHED, found[0])
        while (answer := (await self._own_tasks(found[0], [at]))[0]).result is Result.KEPT and once_at is None:
            at += 1  # it runs once for each call, also for several within one millisecond
        return answer

    async def backfill(self, topic: str, key: str | None = None, *, since: When, until: When) -> list[Answer]:
        """Run the occurrences of the rule from `since` to `until`, both inclusive, as separate tasks.

        `kept`: that occurrence exists, or has ended and is remembered. Raises BadInput for more than 10,000.
        """
        now = self._client.clock.now
        first, last = instant(since, field="since", now=now), instant(until, field="until", now=now)
        if last < first:
            raise BadInput("until", until, "an instant that is not before since")
        found = await self._found(topic, key)
        if found is None:
            return [Answer(Result.NOT_FOUND)]
        instants = found[1].rule.upto(first, last, MOST_BACKFILLED + 1)
        if len(instants) > MOST_BACKFILLED:
            raise BadInput("until", until, f"a time by which the rule has at most {MOST_BACKFILLED:,} instants")
        return await self._own_tasks(found[0], instants)

    async def next(self, topic: str, key: str | None = None, n: int = 5) -> list[datetime]:
        """The next `n` instants of the rule, without jitter (aware, UTC), beginning with the planned occurrence."""
        most, found = whole_number("n", n, 0, MOST_BACKFILLED), await self._found(topic, key)
        return [] if found is None else [as_datetime(one) for one in planned(found[0], self._client.clock.now(), most)]

    async def remove(self, topic: str, key: str | None = None) -> Answer:
        """End it: no occurrence follows. The answers are those of `app.cancel`."""
        found = await self._found(topic, key)
        return Answer(Result.NOT_FOUND) if found is None else await self._client.cancel(*found[0].ref)

    async def find(self, topic: str | None = None, *, group: str | None = None) -> AsyncIterator[Task[Any]]:
        """Iterate over the recurring tasks of a topic, a group, or all. O(the tasks there)."""
        async for task in self._client.find(topic=topic, group=group):
            if is_recurring(task):
                yield task

    async def replan(self, topic: str, key: str | None = None) -> Answer:
        """Compute the next occurrence again, as after a change of the zone database: `moved`, or `kept`."""
        found, now = await self._found(topic, key), self._client.clock.now()
        if found is None:
            return Answer(Result.NOT_FOUND)
        record, recurrence = found
        due_at = recurrence.first(time_of(record, now), record.key)
        begun = recurrence.rule.nominal(record.due_at, record.key) <= now  # it waits for its jitter, or is due
        if recurrence.paused or begun or due_at in (None, record.due_at):
            return Answer(Result.KEPT if record.state.live else Result.FINISHED, record)
        return await self._client._session.change(Move(record.topic, record.key, At(due_at), record.token))

    async def _set_paused(self, topic: str, key: str | None, *, paused: bool) -> Answer:
        ref, now = _ref(topic, key), self._client.clock.now

        def decide(_: int, old: Record, again: bool) -> Answer | NewTask:
            recurrence = None if gone(old, now()) else recurrence_of(old.options)
            if recurrence is None:
                return Answer(Result.NOT_FOUND)
            if not old.state.live or recurrence.paused is paused:
                return Answer(Result.KEPT if old.state.live else Result.FINISHED, old)
            due_at = LAST_INSTANT if paused else recurrence.first(time_of(old, now()), old.key)
            if due_at is None:  # the rule ended during the pause
                return Answer(Result.UNDER_WAY if under_way(old) else Result.FINISHED, old)
            options = with_recurrence(old.options, replace(recurrence, paused=paused))
            return _replacing(old, options, At(due_at), payload=old.payload, group=old.group)

        [answer] = await self._replace("pause" if paused else "resume", [ref], None, decide)
        old = answer.record
        if answer.result is not Result.FINISHED or old is None or not old.state.live:
            return answer
        ended = await self._client.cancel(*ref, if_token=old.token)
        return replace(ended, result=Result.FINISHED if ended.ok else Result.UNDER_WAY)

    async def _own_tasks(self, record: Record, instants: Sequence[Millis]) -> list[Answer]:
        now = self._client.clock.now()
        news = [own_task(record, one, min(one, now), since=now) for one in instants]
        if not news:
            return []
        session = self._client._session  # whose event log tells of a single one only
        answers = [await session.add(news[0])] if len(news) == 1 else await session.add_many(news)
        return [replace(one, result=Result.KEPT) if one.result is Result.STALE_TOKEN else one for one in answers]

    async def _found(self, topic: str, key: str | None) -> tuple[Record, Recurrence] | None:
        """The recurring task; None: there is no such task, or it does not recur."""
        [record] = await self._client._session.verbs.get([_ref(topic, key)])
        if record is None or gone(record, self._client.clock.now()):
            return None
        recurrence = recurrence_of(record.options)
        return None if recurrence is None else (record, recurrence)


async def _each(asked: Awaitable[list[Answer]]) -> list[Any]:
    """The answers to a batch, with an error in place of each that failed, unless all did."""
    try:
        return await asked
    except PartlyFailed as partly:
        return list(partly.answers)


def _ref(topic: str, key: str | None) -> Ref:
    """The names of a recurring task, checked. Raises BadInput."""
    topic = check_topic(topic)
    key = check_name("key", default_key(topic) if key is None else key)
    if len(key.encode()) > LONGEST_KEY:
        raise BadInput("key", key, f"at most {LONGEST_KEY} bytes, since an occurrence may append its instant")
    return Ref(topic, key)


def default_key(topic: str) -> str:
    """The key of a topic's only recurring task."""
    return topic.encode()[:LONGEST_KEY].decode(errors="ignore")


def is_recurring(task: Task[Any]) -> bool:
    """True if occurrences of `task` are to come."""
    return bool(task.record.options) and task.state.live and task.recurrence is not None


def under_way(record: Record) -> bool:
    """True if an occurrence runs, or waits for its retry: nothing replaces it."""
    return record.state.live and record.attempt > 0


def changed_task(wanted: NewTask, old: Record, now: Millis) -> Answer | NewTask:
    """The task that replaces `old`, or the answer: it is under way, as wanted, or has ended and stays so.

    An occurrence that is due, or that waits for its jitter only, keeps its time; one that was deferred is due when its
    deferral ends. A pause stays. A declaration leaves a task that died with it alone.
    """
    recurrence, before = recurrence_of(wanted.options), recurrence_of(old.options) if old.state.live else None
    assert recurrence is not None
    options, now, paused = wanted.options, time_of(old, now), before is not None and before.paused
    if paused:
        options = with_recurrence(options, replace(recurrence, paused=True))
    same = (options, wanted.payload, wanted.group) == (old.options, old.payload, old.group)
    kept = Answer(Result.KEPT if old.state.live else Result.FINISHED, old)
    if same and (old.state.live or (recurrence.declared and old.state is State.DEAD)):
        return kept
    due_at = LAST_INSTANT if paused else recurrence.first(now, old.key)
    if before is not None and not paused:
        with suppress(BadInput):  # the zone of the old rule may be unknown here
            planned_at = due_next(old, before, now)
            if planned_at is not None and before.rule.nominal(planned_at, old.key) <= now:
                due_at = old.wake_at if old.wake_at > now else planned_at
    return kept if due_at is None else _replacing(old, options, At(due_at), payload=wanted.payload, group=wanted.group)


def due_next(record: Record, recurrence: Recurrence, now: Millis) -> Millis | None:
    """When the next occurrence that runs is due, without those too old to run; None: the rule ends with them.

    The task is not under way. A few steps of the rule, but with `all` and `queue` O(most).
    """
    step = recurrence.on_lease(record.due_at, record.key, record.created_at, now, counted=1)
    return record.due_at if step is None else step.due_at


def time_of(old: Record, now: Millis) -> Millis:
    """`now`, but not before the last transition of `old`, whose token follows the store's clock.

    A caller's clock may be behind it. An instant before that transition may have run already.
    """
    return max(now, old.token // 1000)


def planned(record: Record, now: Millis, most: int) -> list[Millis]:
    """The next `most` nominal instants of a recurring task, beginning with the occurrence that waits.

    None if it is paused, or its zone is not known here. O(most) steps of the rule, and those of `due_next`.
    """
    recurrence, begun = recurrence_of(record.options), under_way(record)
    if recurrence is None or recurrence.paused or not record.state.live or most < 1:
        return []
    with suppress(BadInput):
        due_at = max(record.due_at, now) if begun else due_next(record, recurrence, now)
        if due_at is not None:
            found = [] if begun else [recurrence.rule.nominal(due_at, record.key)]
            return found + recurrence.rule.upto(due_at + 1, LAST_INSTANT, most - len(found))
    return []


def _replacing(old: Record, options: bytes, due: Due, *, payload: bytes, group: str | None) -> Answer | NewTask:
    """The task that replaces `old`, unless it is under way."""
    if under_way(old):
        return Answer(Result.UNDER_WAY, old)
    return NewTask(old.topic, old.key, new_id(), due, payload, group, options, if_token=old.token)
