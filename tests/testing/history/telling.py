"""Histories told by hand: each step is asked, and answered a millisecond later; rightly, unless told otherwise."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from bide.core.instants import At, Due, In, Millis
from bide.core.records import OnConflict, OutcomeKind, Result, State
from bide.testing.history import events as ev
from bide.testing.history.events import Asks, Seen

START: Millis = 1_800_000_000_000
TOPIC, KEY = "t", "k"
W, L = State.WAITING, State.LEASED
__all__ = ["KEY", "START", "TOPIC", "At", "In", "Story"]


class Story:
    """A history in the making. `now` is the store's clock, and `at` follows it from 0.

    What a step answers is a `Seen`, which the next step is given. `**said` replaces fields of what is answered.
    """

    def __init__(self, **header: Any) -> None:
        self.now = START
        self.lag = 0
        """By how much the store's clock has been set back."""
        self.events: list[ev.Event] = [ev.Header(**header)]
        self._calls = 0
        self.topic = TOPIC

    @property
    def at(self) -> int:
        return (self.now - START) * 1_000_000

    @property
    def clock(self) -> Millis:
        return self.now - self.lag

    def pass_(self, millis: Millis) -> None:
        self.now += millis

    def say(self, event: ev.Event) -> None:
        self.events.append(event)

    def send(self, question: type[Any], who: str, *rest: Any, **details: Any) -> int:
        """The number of the call."""
        self._calls += 1
        self.say(question(self._calls, who, self.at, self.clock, *rest, **details))
        self.now += 1
        return self._calls

    # --- clients

    def ask(self, asks: Asks, key: str = KEY, **details: Any) -> int:
        return self.send(ev.Asked, "client", asks, self.topic, key, **details)

    def answer(self, call: int, result: Result | None, task: Seen | None = None, was: Millis | None = None) -> None:
        self.say(ev.Answered(call, self.at, self.clock, result, task, was))

    def fail(self, call: int, *, unknown: bool = True) -> None:
        self.say(ev.Failed(call, self.at, unknown, "no answer"))

    def born(self, life: str, due: Due, **said: Any) -> Seen:
        """A new life that begins now."""
        now = self.clock
        due_at = due.resolve(now)
        return replace(Seen(life, W, due_at, max(due_at, now), 0, 0, 0, 0, now * 1000, now), **said)

    def schedule(
        self, life: str = "a", due: Due | None = None, *, over: Seen | None = None, key: str = KEY,
        on_conflict: OnConflict = OnConflict.REPLACE, result: Result | None = None, deadline: Millis | None = None,
        grain: Millis = 0, if_token: int | None = None, **said: Any,
    ) -> Seen:  # fmt: skip
        """Creates a task, or replaces `over`."""
        due = In(100) if due is None else due
        call = self.ask(
            Asks.SCHEDULE, key, id=life, due=due, on_conflict=on_conflict, deadline=deadline, grain=grain,
            if_token=if_token,
        )  # fmt: skip
        task = self.born(life, due, **{"deadline": deadline, **said})
        if result is None:
            result = Result.CREATED if over is None else Result.REPLACED
        self.answer(call, result, task, over.wake_at if over is not None and over.state.live else None)
        return task

    def kept(
        self, task: Seen, life: str = "b", due: Due | None = None, *, on_conflict: OnConflict,
        if_token: int | None = None, result: Result | None = None,
    ) -> Seen:  # fmt: skip
        """A schedule that changes nothing."""
        due = In(100) if due is None else due
        call = self.ask(Asks.SCHEDULE, id=life, due=due, on_conflict=on_conflict, if_token=if_token)
        self.answer(call, result or (Result.REFUSED if on_conflict is OnConflict.REFUSE else Result.KEPT), task)
        return task

    def move(
        self, task: Seen, due: Due, *, result: Result = Result.MOVED, if_token: int | None = None, **said: Any
    ) -> Seen:
        call = self.ask(Asks.MOVE, due=due, if_token=if_token)
        if result is not Result.MOVED:
            self.answer(call, result, task)
            return task
        due_at = due.resolve(self.clock)
        moved = replace(
            task, due_at=due_at, wake_at=max(due_at, self.clock), token=max(task.token + 1, self.clock * 1000)
        )
        moved = replace(moved, **said)
        self.answer(call, Result.MOVED, moved, task.wake_at)
        return moved

    def cancel(
        self, task: Seen, *, keep: Millis = 0, keeps: bool | None = None, result: Result | None = None, **said: Any
    ) -> Seen:
        call = self.ask(Asks.CANCEL, keeps=keep > 0 if keeps is None else keeps)
        if result in (Result.FINISHED, Result.STALE_TOKEN):
            self.answer(call, result, task)
            return task
        held = task.state is L
        ended = replace(
            task, state=State.CANCELLED, wake_at=task.token // 1000 if held else task.wake_at, finished_at=self.clock,
            keep_until=self.clock + keep if keep else 0, token=max(task.token + 1, self.clock * 1000),
        )  # fmt: skip
        ended = replace(ended, **said)
        if result is None:
            result = Result.CANCELLED_WHILE_LEASED if held else Result.CANCELLED
        self.answer(call, result, ended)
        return ended

    def redrive(self, task: Seen, life: str = "z", due: Due | None = None, **said: Any) -> Seen:
        due = In(0) if due is None else due
        call = self.ask(Asks.REDRIVE, id=life, due=due)
        born = self.born(life, due, **said)
        self.answer(call, Result.REDRIVEN, born)
        return born

    def get(self, task: Seen | None, **said: Any) -> None:
        call = self.ask(Asks.GET)
        self.answer(call, None, None if task is None else replace(task, **said))

    def not_found(self, asks: Asks = Asks.CANCEL) -> None:
        self.answer(self.ask(asks, due=In(0)), Result.NOT_FOUND)

    # --- workers

    def lease(
        self, task: Seen, *, until: Millis = 1_000, who: str = "worker", key: str = KEY, wants: int = 1,
        clock: Millis | None = None, lost: bool = False, **said: Any,
    ) -> Seen:  # fmt: skip
        """Leases a task, which is due, or (`lost`) whose lease is over."""
        held = self.leased([(key, task)], until=until, who=who, wants=wants, clock=clock, lost=lost, **said)
        return held[0]

    def leased(
        self, tasks: list[tuple[str, Seen]], *, until: Millis = 1_000, who: str = "worker", wants: int = 1,
        clock: Millis | None = None, lost: bool = False, **said: Any,
    ) -> list[Seen]:  # fmt: skip
        end = self.clock + until
        call = self.send(ev.Leasing, who, {self.topic: wants}, end)
        held = []
        for number, (_, task) in enumerate(tasks):
            token = max(task.token + 1, (self.clock if clock is None else clock) * 1000 + number)
            one = replace(
                task, state=L, wake_at=end, planned_at=task.planned_at if lost else task.wake_at,
                attempt=task.attempt + 1, losses=task.losses + lost, token=token,
            )  # fmt: skip
            held.append(replace(one, **said))
        given = [ev.Held(self.topic, key, one) for (key, _), one in zip(tasks, held, strict=True)]
        self.say(ev.Leased(call, self.at, self.clock if clock is None else clock, given, None))
        return held

    def lease_lost(self, *, until: Millis = 1_000, who: str = "worker") -> int:
        """A lease whose answer never came; when it would end."""
        end = self.clock + until
        self.fail(self.send(ev.Leasing, who, {self.topic: 1}, end))
        return end

    def begin(self, held: Seen, *, who: str = "worker", key: str = KEY, **said: Any) -> None:
        life = (held.id, held.token, held.attempt, held.planned_at)
        self.say(replace(ev.Began(who, self.at, self.clock, self.topic, key, *life), **said))

    def end(self, held: Seen, *, who: str = "worker", key: str = KEY) -> None:
        self.say(ev.Ended(who, self.at, self.topic, key, held.token, "returned"))

    def settling(self, held: Seen, verdict: OutcomeKind = OutcomeKind.DONE, *, key: str = KEY, **details: Any) -> int:
        return self.send(ev.Settling, "worker", self.topic, key, held.token, verdict, **details)

    def told(self, call: int, *, ok: bool = True) -> None:
        self.say(ev.Told(call, self.at, self.clock, ok))

    def settle(
        self, held: Seen, verdict: OutcomeKind = OutcomeKind.DONE, *, ok: bool = True, key: str = KEY, **details: Any
    ) -> Seen:
        """What the task is after it; of what waits again, by a store that answered in the last instant."""
        call = self.settling(held, verdict, key=key, **details)
        self.told(call, ok=ok)
        now, wake = self.clock, details.get("wake")
        token = max(held.token + 1, now * 1000)
        if wake is None:
            state = State.DONE if verdict is OutcomeKind.DONE else State.DEAD
            return replace(
                held, state=state, wake_at=min(held.token // 1000, now), finished_at=now, token=token,
                keep_until=details.get("keep_until", 0), error=details.get("error"),
            )  # fmt: skip
        at = max(wake.resolve(now), now)
        if verdict is OutcomeKind.DONE:
            return Seen(details["next_id"], W, wake.resolve(now), at, 0, 0, 0, 0, token, now)
        deferred = verdict is OutcomeKind.DEFER
        return replace(
            held, state=W, wake_at=at, planned_at=0, attempt=held.attempt - deferred, losses=0, token=token,
            failures=held.failures + (not deferred), error=held.error if deferred else details.get("error"),
        )  # fmt: skip

    def extend(self, held: Seen, by: Millis = 1_000, *, ok: bool = True, skew: Millis = 0) -> Seen:
        """`skew`: by how much the holder's clock is ahead of the store's."""
        until, now = self.clock + by, self.clock + skew
        self.told(self.send(ev.Extending, "worker", self.topic, KEY, held.token, until + skew, now), ok=ok)
        return replace(held, wake_at=until) if ok else held

    def run(self, task: Seen, **said: Any) -> Seen:
        """Waits until it is due, leases, begins and ends it; what was held."""
        self.now = max(self.now, task.wake_at + self.lag)
        held = self.lease(task, **said)
        self.begin(held)
        self.pass_(5)
        self.end(held)
        return held

    def settle_run(self, held: Seen, *, who: str = "worker") -> None:
        """Begins and ends what was leased, and settles it as done."""
        self.begin(held, who=who)
        self.pass_(5)
        self.end(held, who=who)
        self.settle(held)

    def done(self, task: Seen) -> None:
        """Runs it, and settles it as done."""
        self.settle(self.run(task))

    # --- the end

    def left(self, task: Seen, key: str = KEY) -> None:
        self.say(ev.Left(self.at, self.clock, self.topic, key, task))

    def over(self, *, drained: bool = True) -> list[ev.Event]:
        self.say(ev.End(self.at, self.clock, drained))
        return self.events
