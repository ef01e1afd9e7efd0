"""The verdict on a played plan, and the story of a failure.

The checker of histories judges the history. The other rules need the simulated world, which sees everything. The *calm*
is the last part of a plan, in which nothing is broken any more.

Rules for the plan as a whole:

- P6, P8: in the calm, a task that comes due begins at once (`LATE`), or after the longest sleep if notifications are
  lost even then; a task that came due before the calm has begun long ago.
- P8, P11: in the calm, a process calls its store only as often as its work, its cap and its presence need.
- P9: while the store has no room for new work, no other call is refused for that reason.
- P10: no ended task is left that is older than the longest retention.
- No callback, and no coroutine that is not awaited, raised an error.

Rules for a worker and its deliveries (`owed`); the world knows which processes were alive and what was broken:

- P2: no task is settled as done before its handler ended that way; while the worker lives, it reports an outcome again
  and again until the store has it.
- P3: no delivery begins after its lease has expired; in the calm no lease is lost while its holder lives; a worker
  settles a task that its own handler has ended before it leases that task again.
- P4: no delivery begins after its deadline; every caller is answered, and in the calm at once.
- P6: in the calm, a topic with room for one delivery at a time begins the next as soon as there is room.
- P7: a worker asks for no task that it has no room for.
- P11: no worker polls again and again while nothing happens.

The story lists the processes, the faults, and the events of the one task. The plan is first reduced to the few steps
that are necessary for the failure, by delta debugging (Zeller and Hildebrandt, "Simplifying and Isolating
Failure-Inducing Input", 2002): parts of the steps are removed, larger parts first, and a smaller plan that still breaks
the same promise is kept. Each try plays the plan.

Events are printed as the checker prints them (`bide.testing.history.report`), with short names: lives are A, B, ... and
tokens #1, #2, ... in order of appearance, and instants are seconds since the beginning.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from bide.core.instants import Millis
from bide.core.records import OutcomeKind, Token, Topic
from bide.testing.clock import FIRST_INSTANT
from bide.testing.history import events as ev
from bide.testing.history.check import PURGED_AFTER, Report, check
from bide.testing.history.events import Event
from bide.testing.history.report import Violation, words
from bide_proofs.simulate.plan import ALONE, UNHANDLED, Ask, Plan, Setup, Step, Storm, room_of
from bide_proofs.simulate.world import Played, play

LATE: Millis = 60
"""The allowed lateness of a delivery in the calm: a notification, a lease call, and rounding at both ends."""
_PER_SECOND = 3.0
"""A worker's regular calls to one shard: presence, pauses, purge, and those of the lease extender."""
_PER_DELIVERY = 6.0
_LONGEST_KEPT: Millis = 20_000
"""The retention of dead tasks; all others are kept for a shorter time."""
Delivery = tuple[Topic, str, Token]
_DONE = ("returned", "Done(")
_AGAIN = 25_000_000_000
"""Nanoseconds within which an outcome is reported again, also by a process that stands still for a while."""
_PATIENCE = 1_000_000_000
"""Nanoseconds within which every caller is answered when nothing is broken."""
_PROMPT = 50_000_000
"""Nanoseconds within which a store answers when messages are neither delayed nor lost."""
_PAUSE = 1_000_000_000
"""Nanoseconds that a worker pauses at most after it failed to report outcomes."""
_SPIN = 12
_END = " is asked to end"


class Judgement(Struct, frozen=True):
    wrong: list[Violation]
    report: Report


def judged(plan: Plan, played: Played) -> Judgement:
    """Judge a played plan; the violations that the history shows come first."""
    report = check(played.history)
    wrong = [*report.violations, *_late(plan, played), *_busy(plan, played), *_refused(played), *_kept(played)]
    wrong += owed(played.history, calm=_settled(plan), lease=plan.setup.lease, room=room_of, late=_may_take(plan))
    wrong += [Violation("defect", "", "", what, []) for what in played.defects]
    return Judgement(wrong, report)


def _late(plan: Plan, played: Played) -> list[Violation]:
    """Find deliveries that began late although nothing was broken."""
    setup = plan.setup
    settled = _settled(plan)
    pause, broken = (setup.cap + 2 * setup.lease) * 1_000_000, setup.calm * 1_000_000
    may_take = _may_take(plan)
    lost: set[Token] = set()
    wrong = []
    for event in played.history:
        if isinstance(event, ev.Fault):  # a process that dies in the calm is killed by its handler
            broken = max(broken, event.at)
        elif isinstance(event, ev.Leased):
            lost |= {held.task.token for held in event.tasks if held.task.losses}
        elif isinstance(event, ev.Began) and event.topic not in (ALONE, UNHANDLED) and event.token not in lost:
            late = event.clock - event.planned_at
            if event.at - late * 1_000_000 > broken + pause and late > may_take:
                what = f"began {late} ms late though nothing was broken, and there was room for it"
                wrong.append(Violation("P8", event.topic, event.key, what, [event]))
            elif event.at > settled and late > event.at // 1_000_000 - setup.calm + may_take:
                what = f"was due before all was mended, and began {event.at // 1_000_000 - setup.calm} ms after that"
                wrong.append(Violation("P6", event.topic, event.key, what, [event]))
    return wrong


def _may_take(plan: Plan) -> Millis:
    """The allowed time from a task's wake time to the start of its delivery, in the calm."""
    deaf = any(isinstance(step, Storm) and step.at > plan.setup.calm for step in plan.steps)
    return LATE + plan.setup.cap if deaf else LATE


def _settled(plan: Plan) -> int:
    """The time, in nanoseconds, from which earlier faults have no effect any more."""
    setup = plan.setup
    return (setup.calm + setup.cap + 4 * setup.lease + 5_000) * 1_000_000


def _busy(plan: Plan, played: Played) -> list[Violation]:
    """Find processes that called their store more often than necessary."""
    setup = plan.setup
    seconds = (setup.length - setup.calm) / 1000
    work = sum(
        isinstance(event, (ev.Settling, ev.Asked)) and event.at > setup.calm * 1_000_000 for event in played.history
    )
    allowed = setup.shards * (seconds * (_PER_SECOND + 1000 / setup.cap + 3000 / setup.lease) + _PER_DELIVERY * work)
    plenty = f"within {seconds:.0f} s of calm; {allowed:.0f} is plenty"
    return [
        Violation("P8", "", "", f"{name} called its store {calls} times {plenty}", [])
        for name, calls in played.calls.items()
        if calls > allowed
    ]


def _refused(played: Played) -> list[Violation]:
    schedules = {
        event.call for event in played.history if isinstance(event, ev.Asked) and event.asks is ev.Asks.SCHEDULE
    }
    return [
        Violation("P9", "", "", "a full store refused something else than new work", [event])
        for event in played.history
        if isinstance(event, ev.Failed) and event.call not in schedules and event.error.startswith("StoreFull")
    ]


def _kept(played: Played) -> list[Violation]:
    """Find tasks that should have been forgotten, by the processes' settings and not by the store's `keep_until`."""
    wrong = []
    for event in played.history:
        if isinstance(event, ev.Left) and event.task.finished_at is not None:
            kept = event.clock - event.task.finished_at
            if kept > _LONGEST_KEPT + PURGED_AFTER:
                what = f"it is left as {event.task.state}, {kept} ms after its end; {_LONGEST_KEPT} is the most"
                wrong.append(Violation("P10", event.topic, event.key, what, [event]))
    return wrong


# --- the rules for a worker and its deliveries


def owed(
    history: Sequence[Event], *, calm: int, lease: Millis, room: Callable[[Topic], int], late: Millis
) -> Iterator[Violation]:
    """Check the rules for a worker and its deliveries.

    From `calm`, in nanoseconds, nothing is broken and earlier faults have no effect any more. `room` is the number of
    deliveries of a topic that a worker may have at once. If it is one, the next delivery may begin up to `late`
    milliseconds after the slot is free.
    """
    seen = _Seen(history)
    yield from _undone(seen)
    yield from _given_up(seen)
    yield from _lost(seen, calm)
    yield from _taken_from_itself(seen)
    yield from _begun_too_late(seen, lease)
    yield from _past_deadlines(seen)
    yield from _waited(seen, calm, room, late)
    yield from _too_many(seen, room)
    yield from _spins(seen)
    yield from _unanswered(seen, calm)


class _Seen:
    """A history, indexed for the rules."""

    def __init__(self, history: Sequence[Event]) -> None:
        self.history = history
        self.asks: dict[int, ev.Asked | ev.Leasing | ev.Extending | ev.Settling] = {
            event.call: event
            for event in history
            if isinstance(event, ev.Asked | ev.Leasing | ev.Extending | ev.Settling)
        }
        """The calls, by number."""
        self.ends: dict[str, int] = {}
        """The processes that died or were asked to end, with the time."""
        for event in history:
            if isinstance(event, ev.Died):
                self.ends.setdefault(event.who, event.at)
            elif isinstance(event, ev.Fault) and event.what.endswith(_END):
                self.ends.setdefault(event.what.removesuffix(_END), event.at)

    def leased(self) -> Iterator[tuple[ev.Leased, ev.Held]]:
        """Each leased task, with the answer that contains it."""
        for event in self.history:
            if isinstance(event, ev.Leased):
                for held in event.tasks:
                    yield event, held


def _of(event: ev.Began | ev.Ended | ev.Extending | ev.Settling) -> Delivery:
    return event.topic, event.key, event.token


def _undone(seen: _Seen) -> Iterator[Violation]:
    """Find tasks settled as done although the handler had not ended that way."""
    ended: dict[Delivery, ev.Ended] = {}
    for event in seen.history:
        if isinstance(event, ev.Ended):
            ended[_of(event)] = event
        elif isinstance(event, ev.Settling) and event.verdict is OutcomeKind.DONE:
            end = ended.get(_of(event))
            if end is None:
                what = f"settled as done, by token {event.token}, before its handler had ended"
                yield Violation("P2", event.topic, event.key, what, [event])
            elif not end.how.startswith(_DONE):
                what = f"settled as done, by token {event.token}, though its handler ended with {end.how}"
                yield Violation("P2", event.topic, event.key, what, [end, event])


def _given_up(seen: _Seen) -> Iterator[Violation]:
    """Find outcomes that were never reported again after a failure although the worker lived on."""
    failed: dict[Delivery, tuple[ev.Settling, ev.Failed]] = {}
    for event in seen.history:
        if isinstance(event, ev.Settling):
            failed.pop(_of(event), None)
        elif isinstance(event, ev.Failed) and isinstance(asked := seen.asks.get(event.call), ev.Settling):
            failed[_of(asked)] = asked, event
    for ask, failure in failed.values():
        if seen.ends.get(ask.who, failure.at + 2 * _AGAIN) - failure.at > _AGAIN:
            what = f"the outcome of token {ask.token} was given up when the store could not be reached"
            yield Violation("P2", ask.topic, ask.key, what, [ask, failure])


def _lost(seen: _Seen, calm: int) -> Iterator[Violation]:
    """Find leases that were lost although the holder lived and nothing was broken."""
    holders: dict[tuple[Topic, str], tuple[str, ev.Leased]] = {}
    for event, held in seen.leased():
        before = holders.get((held.topic, held.key))
        if before is not None and held.task.losses and before[1].at > calm and before[0] not in seen.ends:
            what = f"{before[0]} lost its lease, though it lived and nothing was broken"
            yield Violation("P3", held.topic, held.key, what, [before[1], event])
        holders[held.topic, held.key] = seen.asks[event.call].who, event


def _taken_from_itself(seen: _Seen) -> Iterator[Violation]:
    """Find tasks that a worker leased again although its own handler had ended them and it could have settled them.

    It could not have settled them if the store refused outcomes at that time or answered late: after a failure a worker
    pauses before it calls that part of the store again. A worker does not settle a lease that it knows to be lost.
    """
    over: set[Delivery] = set()
    ended: dict[Delivery, ev.Ended] = {}
    unsettled: dict[int, dict[Delivery, ev.Ended]] = {}
    """The ended deliveries at the time of each lease call, by its number."""
    before: dict[tuple[Topic, str], Token] = {}
    refused: dict[str, int] = {}
    for event in seen.history:
        if isinstance(event, ev.Settling):
            over.add(_of(event))
            ended.pop(_of(event), None)
        elif isinstance(event, ev.Told) and not event.ok:
            if isinstance(told := seen.asks[event.call], ev.Extending):
                over.add(_of(told))
        elif isinstance(event, ev.Ended) and _of(event) not in over:
            ended[_of(event)] = event
        elif isinstance(event, ev.Leasing):
            unsettled[event.call] = dict(ended)
        elif isinstance(event, ev.Failed) and isinstance(asked := seen.asks.get(event.call), ev.Settling):
            refused[asked.who] = event.at
        elif isinstance(event, ev.Leased):
            leasing = seen.asks[event.call]
            since = refused.get(leasing.who, -_PAUSE) + _PAUSE
            prompt = event.at - leasing.at < _PROMPT
            for held in event.tasks:
                end = unsettled[event.call].get((held.topic, held.key, before.get((held.topic, held.key), 0)))
                its = end is not None and prompt and end.who == leasing.who and end.at > since
                if end is not None and its and held.task.losses:
                    what = f"{leasing.who} leased it again before it settled what its own handler had ended"
                    yield Violation("P3", held.topic, held.key, what, [end, event])
                before[held.topic, held.key] = held.task.token


def _begun_too_late(seen: _Seen, lease: Millis) -> Iterator[Violation]:
    """Find deliveries that began after their lease, counted from the call, had expired. Skips extended leases."""
    asks: dict[Delivery, Event] = {}
    for event in seen.history:
        if isinstance(event, ev.Leased):
            asks |= {(held.topic, held.key, held.task.token): seen.asks[event.call] for held in event.tasks}
        elif isinstance(event, ev.Extending):
            asks.pop(_of(event), None)
        elif isinstance(event, ev.Began):
            ask = asks.get(_of(event))
            if ask is not None and event.at - ask.at > (lease + 1) * 1_000_000:
                what = f"began {(event.at - ask.at) // 1_000_000} ms after its lease of {lease} ms was asked for"
                yield Violation("P3", event.topic, event.key, what, [ask, event])


def _past_deadlines(seen: _Seen) -> Iterator[Violation]:
    """Find deliveries that began although their deadline had passed at the lease."""
    past = {
        (held.topic, held.key, held.task.token): leased
        for leased, held in seen.leased()
        if held.task.deadline is not None and held.task.deadline < leased.clock
    }
    for event in seen.history:
        if isinstance(event, ev.Began) and _of(event) in past:
            what = "began though its deadline had passed when it was leased"
            yield Violation("P4", event.topic, event.key, what, [past[_of(event)], event])


def _waited(seen: _Seen, calm: int, room: Callable[[Topic], int], late: Millis) -> Iterator[Violation]:
    """Find due tasks that waited although a worker was free, for the topic that has room for one delivery."""
    free: dict[str, int] = {}
    was_free: dict[str, int] = {}
    ends: set[str] = set()
    lost = {held.task.token for _, held in seen.leased() if held.task.losses}
    for event in seen.history:
        if isinstance(event, ev.Leasing):
            if event.who not in was_free:
                was_free[event.who] = event.at
                if event.who not in ends:
                    free[event.who] = event.at
        elif isinstance(event, ev.Leased):
            if any(room(held.topic) == 1 for held in event.tasks):
                who = seen.asks[event.call].who
                was_free[who] = free.pop(who, event.at)
        elif isinstance(event, ev.Ended) and room(event.topic) == 1 and event.who not in ends:
            free[event.who] = event.at
        elif isinstance(event, ev.Died):
            free.pop(event.who, None)
        elif isinstance(event, ev.Fault):
            calm = max(calm, event.at + 1_000_000_000)
            if event.what.endswith(_END):
                ends.add(event.what.removesuffix(_END))
                free.pop(event.what.removesuffix(_END), None)
        elif isinstance(event, ev.Began) and room(event.topic) == 1 and event.token not in lost:
            due = event.at - (event.clock - event.planned_at) * 1_000_000
            since = max(due, calm, min((was_free[event.who], *free.values())))
            if event.at - since > late * 1_000_000:
                what = f"began {(event.at - since) // 1_000_000} ms after it was due and there was room for it"
                yield Violation("P6", event.topic, event.key, what, [event])


def _too_many(seen: _Seen, room: Callable[[Topic], int]) -> Iterator[Violation]:
    """Find lease calls for more tasks than there was room for."""
    running: dict[tuple[str, Topic], set[Token]] = defaultdict(set)
    for event in seen.history:
        if isinstance(event, ev.Began):
            running[event.who, event.topic].add(event.token)
        elif isinstance(event, ev.Ended):
            running[event.who, event.topic].discard(event.token)
        elif isinstance(event, ev.Leasing):
            for topic, want in event.wants.items():
                runs = len(running[event.who, topic])
                if want + runs > room(topic):
                    what = f"{event.who} runs {runs} of {topic}, has room for {room(topic)}, and asks for {want}"
                    yield Violation("P7", topic, "", what, [event])


def _spins(seen: _Seen) -> Iterator[Violation]:
    """Find workers that polled repeatedly within a second and got no task, while nothing else was called or ended."""
    empty: dict[str, list[Event]] = defaultdict(list)
    for event in seen.history:
        if isinstance(event, ev.Leasing):
            asks = empty[event.who]
            asks.append(event)
            if len(asks) > _SPIN and asks[-1].at - asks[-1 - _SPIN].at < 1_000_000_000:
                what = f"{event.who} leased {_SPIN} times within a second, and there was nothing to lease"
                yield Violation("P11", "", "", what, asks[-_SPIN:])
                return
        elif not isinstance(event, ev.Leased):
            empty.clear()
        elif event.tasks:
            empty.pop(seen.asks[event.call].who, None)


def _unanswered(seen: _Seen, calm: int) -> Iterator[Violation]:
    """Find calls with neither answer nor failure although the caller lived on, and late answers in the calm."""
    asked = {call: ask for call, ask in seen.asks.items() if isinstance(ask, ev.Asked)}
    for event in seen.history:
        if isinstance(event, ev.Answered | ev.Failed):
            ask = asked.pop(event.call, None)
            if ask is not None and ask.at > calm and event.at - ask.at > _PATIENCE:
                what = f"{ask.who} asked to {ask.asks} it, and was answered {(event.at - ask.at) // 1_000_000} ms later"
                yield Violation("P4", ask.topic, ask.key, what, [ask, event])
    for ask in asked.values():
        if ask.who not in seen.ends and seen.history[-1].at - ask.at > _AGAIN:
            what = f"{ask.who} asked to {ask.asks} it, and was never answered"
            yield Violation("P4", ask.topic, ask.key, what, [ask])


_MOST_TRIES = 400
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_LONG = re.compile(r"\b([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\b|\b([0-9]{16})\b|\b([0-9]{13})\b")
"""A life, a token (microseconds), or an instant (milliseconds)."""


def shrunk(plan: Plan, wrong: Violation) -> tuple[Plan, Violation]:
    """Reduce the plan; return the smaller plan and its violation. Takes some hundred plays: a minute or two."""
    tries = 0

    def fails(steps: Sequence[Step]) -> bool:
        """True if these steps alone break the same promise; then they become the plan."""
        nonlocal plan, wrong, tries
        tries += 1
        if tries > _MOST_TRIES:
            return False
        smaller = replace(plan, steps=list(steps))
        found = next((one for one in judged(smaller, play(smaller)).wrong if one.promise == wrong.promise), None)
        if found is not None:
            plan, wrong = smaller, found
        return found is not None

    if wrong.topic:
        fails([step for step in plan.steps if not isinstance(step, Ask) or _touches(step, wrong)])
    fails([step for step in plan.steps if isinstance(step, Ask)])
    size, smaller = max(len(plan.steps) // 2, 1), True
    while smaller:
        place, smaller = 0, size > 1
        while place < len(plan.steps):
            if fails(plan.steps[:place] + plan.steps[place + size :]):
                smaller = True
            else:
                place += size
        size = max(size // 2, 1)
    return plan, wrong


def _touches(ask: Ask, wrong: Violation) -> bool:
    return ask.topic == wrong.topic and (wrong.key.rstrip("n") in ask.keys or ask.verb in ("shift", "cancel_group"))


def story(plan: Plan, wrong: Violation) -> str:
    """Play `plan` once more and describe its steps and the events of the task of `wrong`."""
    told = _with_short_names(_about(wrong.topic, wrong.key, play(plan).history))
    lines = [
        f"{wrong.promise} is broken, with seed {plan.seed}: {wrong.what}",
        "",
        _scene(plan.setup),
        "",
        f"The plan, {len(plan.steps)} steps:",
        *(f"  {step.at:+12.3f} ms  {_said(step)}" for step in plan.steps),
        "",
        f"What {wrong.topic}/{wrong.key} went through:" if wrong.topic else "What happened:",
        *(f"  {one}" for one in told),
    ]
    return "\n".join(lines)


def _scene(setup: Setup) -> str:
    clock = "goes by its callers' clocks" if setup.by_caller else "has a clock of its own"
    skews = ", ".join(f"{skew:+g} s" for skew in setup.skews)
    return (
        f"{setup.clients} clients and {setup.workers} workers; a store of {setup.shards} shards that {clock}. Leases "
        f"last {setup.lease} ms, sleeps at most {setup.cap} ms. The processes' clocks are wrong by {skews} in turn."
    )


def _said(step: Step) -> str:
    fields = msgspec.to_builtins(step)
    kind = fields.pop("type")
    del fields["at"]
    return f"{kind}: " + ", ".join(f"{name} {value}" for name, value in fields.items())


def _about(topic: str, key: str, history: Iterable[Event]) -> Iterator[Event]:
    """The events that concern one task, or all events if there is no topic."""
    calls: set[int] = set()
    leasings: dict[int, ev.Leasing] = {}
    for event in history:
        if not topic or isinstance(event, ev.Fault | ev.Died | ev.End):
            yield event
        elif isinstance(event, ev.Asked | ev.Settling | ev.Extending):
            if (event.topic, event.key) == (topic, key):
                calls.add(event.call)
                yield event
        elif isinstance(event, ev.Began | ev.Ended | ev.Left):
            if (event.topic, event.key) == (topic, key):
                yield event
        elif isinstance(event, ev.Leasing):
            leasings[event.call] = event
        elif isinstance(event, ev.Leased):
            if tasks := [held for held in event.tasks if (held.topic, held.key) == (topic, key)]:
                yield leasings[event.call]
                yield replace(event, tasks=tasks)
        elif isinstance(event, ev.Answered | ev.Told | ev.Failed) and event.call in calls:
            yield event


def _with_short_names(events: Iterable[Event]) -> Iterator[str]:
    """Events in words, with short names in the order in which they appear."""
    lives: dict[str, str] = {}
    tokens: dict[str, str] = {}

    def short(found: re.Match[str]) -> str:
        life, token, instant = found.groups()
        if life:
            number = len(lives)
            return lives.setdefault(life, _LETTERS[number % 26] + (str(number // 26) if number >= 26 else ""))
        if token:
            return tokens.setdefault(token, f"#{len(tokens) + 1}")
        return f"{(int(instant) - FIRST_INSTANT) / 1000:.3f}s"

    return (_LONG.sub(short, words(event)) for event in events)
