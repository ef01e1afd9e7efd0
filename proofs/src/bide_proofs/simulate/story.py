"""Makes a short story of what went wrong: who was there, what was done to them, and what the one task went through.

A plan is first cut down to the few steps without which nothing goes wrong, by delta debugging (Zeller and Hildebrandt,
"Simplifying and Isolating Failure-Inducing Input", 2002): parts of the steps are left out, larger ones first, and what
still breaks the same promise is kept. Each try plays the plan.

Events are told as the checker tells them (`bide.testing.history.report`), with short names for what is long: lives are
A, B, ... and tokens #1, #2, ... in the order in which they appear, and instants are seconds since the beginning.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

import msgspec
from msgspec.structs import replace

from bide.testing.clock import FIRST_INSTANT
from bide.testing.history import events as ev
from bide.testing.history.events import Event
from bide.testing.history.report import Violation, words
from bide_proofs.simulate.judge import judged
from bide_proofs.simulate.plan import Ask, Plan, Setup, Step
from bide_proofs.simulate.world import play

_MOST_TRIES = 400
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_LONG = re.compile(r"\b([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\b|\b([0-9]{16})\b|\b([0-9]{13})\b")
"""A life, a token (microseconds), or an instant (milliseconds)."""


def shrunk(plan: Plan, wrong: Violation) -> tuple[Plan, Violation]:
    """A smaller plan, and what is wrong with that. Some hundred plays: a minute or two."""
    tries = 0

    def fails(steps: Sequence[Step]) -> bool:
        """True if these alone break the same promise; then they are the plan."""
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
    """Tell what `plan` does, and what of its history touches the task of `wrong`; it is played once more."""
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
    """Those events that concern one task, or all if there is no topic."""
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
