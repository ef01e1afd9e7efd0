"""Tells what went wrong as a short story: who was there, what was done to them, and what the one task went through.

Lives and tokens have long names, so they are told as A, B, ... and #1, #2, ... in the order in which they appear, and
times as seconds since the beginning.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from bide.core.instants import Millis
from bide.core.records import At, Due
from bide.testing.clock import FIRST_INSTANT
from bide.testing.history.events import (
    Answered,
    Asked,
    Began,
    Died,
    End,
    Ended,
    Event,
    Extending,
    Failed,
    Fault,
    Leased,
    Leasing,
    Left,
    Seen,
    Settling,
    Told,
)
from bide.testing.history.report import Violation
from bide_proofs.simulate.plan import Ask, Plan, Setup, Step
from bide_proofs.simulate.world import play

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def story(plan: Plan, wrong: Violation) -> str:
    """What `plan` does, and what of its history touches the task of `wrong`; it is played once more."""
    history = play(plan).history
    teller = _Teller(wrong.topic, wrong.key)
    lines = [
        f"{wrong.promise} is broken, with seed {plan.seed}: {wrong.what}",
        "",
        _scene(plan.setup),
        "",
        f"The plan, {len(plan.steps)} steps:",
        *(f"  {_seconds(step.at)}  {_said(step)}" for step in plan.steps),
        "",
        f"What {wrong.topic}/{wrong.key} went through:" if wrong.topic else "What happened:",
        *teller.told(history),
    ]
    return "\n".join(lines)


def _scene(setup: Setup) -> str:
    clock = "goes by its callers' clocks" if setup.by_caller else "has a clock of its own"
    skews = ", ".join(f"{skew:+g} s" for skew in setup.skews)
    return (
        f"{setup.clients} clients and {setup.workers} workers; a store of {setup.shards} shards that {clock}. Leases "
        f"last {setup.lease} ms, sleeps at most {setup.cap} ms. The processes' clocks are wrong by {skews} in turn."
    )


def _seconds(millis: float) -> str:
    return f"{millis / 1000:9.3f} s"


def _said(step: Step) -> str:
    if not isinstance(step, Ask):
        fields = msgspec.to_builtins(step)
        what = fields.pop("type")
        del fields["at"]
        return f"{what}: " + ", ".join(f"{name} {value}" for name, value in fields.items())
    words = [f"client-{step.client} asks to {step.verb} {step.topic} {', '.join(step.keys)}"]
    if step.verb in ("schedule", "many"):
        words.append(f"in {step.delay} ms, on conflict {step.conflict}; its handler will {', then '.join(step.does)}")
    elif step.verb in ("move", "redrive", "shift"):
        words.append(f"by {step.delay} ms")
    if step.group is not None:
        words.append(f"group {step.group}")
    if step.deadline is not None:
        words.append(f"deadline {step.deadline} ms")
    if step.patience is not None:
        words.append(f"and is cancelled after {step.patience} ms")
    if step.known:
        words.append("if it is as it was last seen")
    return ", ".join(words)


class _Teller:
    """Keeps the short names; tells only of one task, or of all if there is no topic."""

    def __init__(self, topic: str, key: str) -> None:
        self._topic = topic
        self._key = key
        self._lives: dict[str, str] = {}
        self._tokens: dict[int, str] = {}
        self._calls: dict[int, str] = {}
        """Of those about the task: what was asked."""

    def told(self, history: Iterable[Event]) -> list[str]:
        return [f"  {_seconds(event.at / 1e6)}  {what}" for event in history for what in self._of(event)]

    def _mine(self, topic: str, key: str) -> bool:
        return not self._topic or (topic == self._topic and key == self._key)

    def _of(self, event: Event) -> Iterable[str]:
        if isinstance(event, Fault):
            yield f"({event.what})"
        elif isinstance(event, Died):
            yield f"({event.who} is dead)"
        elif isinstance(event, (Asked, Settling, Extending)):
            if self._mine(event.topic, event.key):
                self._calls[event.call] = asked = f"{event.who} {self._question(event)}"
                yield asked
        elif isinstance(event, Leasing):
            if not self._topic or self._topic in event.wants:
                self._calls[event.call] = f"{event.who} leases"
        elif isinstance(event, Leased):
            who = self._calls.get(event.call, "somebody leases")
            for held in event.tasks:
                if self._mine(held.topic, held.key):
                    yield f"{who} {held.topic}/{held.key}: {self._shown(held.task)}"
        elif isinstance(event, (Answered, Told, Failed)):
            if event.call in self._calls:
                yield from self._answer(event, self._calls[event.call])
        elif isinstance(event, Began):
            if self._mine(event.topic, event.key):
                late = event.clock - event.planned_at
                yield (
                    f"{event.who} BEGINS to deliver life {self._life(event.id)}, attempt {event.attempt}, by token "
                    f"{self._token(event.token)}, {late} ms after it was planned"
                )
        elif isinstance(event, Ended):
            if self._mine(event.topic, event.key):
                yield f"{event.who}'s handler ends (token {self._token(event.token)}): {event.how}"
        elif isinstance(event, Left):
            if self._mine(event.topic, event.key):
                yield f"at the end it is there: {self._shown(event.task)}"
        elif isinstance(event, End):
            yield "the end"

    def _question(self, event: Asked | Settling | Extending) -> str:
        if isinstance(event, Extending):
            return f"asks to keep the lease of token {self._token(event.token)} until {_clock(event.until)}"
        if isinstance(event, Settling):
            wake = "" if event.wake is None else f", to wake {_due(event.wake)}"
            error = "" if event.error is None else f" ({event.error})"
            return f"says of token {self._token(event.token)}: {event.verdict.value}{wake}{error}"
        words = [f"asks to {event.asks.value}"]
        if event.id:
            words.append(f"life {self._life(event.id)}")
        if event.due is not None:
            words.append(_due(event.due))
        if event.asks == "schedule":
            words.append(f"on conflict {event.on_conflict.value}")
        if event.if_token is not None:
            words.append(f"if its token is {self._token(event.if_token)}")
        return " ".join(words)

    def _answer(self, event: Answered | Told | Failed, asked: str) -> Iterable[str]:
        who = asked.split(" ", 1)[0]
        if isinstance(event, Failed):
            yield f"{who} learns that it {'may or may not be' if event.unknown else 'was not'} done: {event.error}"
        elif isinstance(event, Told):
            yield f"{who} is told {'yes' if event.ok else 'NO: refused'}"
        else:
            word = event.result.value if event.result is not None else "as it is"
            yield f"{who} is answered {word}: {'no such task' if event.task is None else self._shown(event.task)}"

    def _shown(self, task: Seen) -> str:
        return (
            f"{task.state.value}, life {self._life(task.id)}, token {self._token(task.token)}, wakes at "
            f"{_clock(task.wake_at)}, attempt {task.attempt}, failures {task.failures}, losses {task.losses}"
        )

    def _life(self, id: str) -> str:
        number = len(self._lives)
        letter = _LETTERS[number % 26] + (str(number // 26) if number >= 26 else "")
        return self._lives.setdefault(id, letter)

    def _token(self, token: int) -> str:
        return self._tokens.setdefault(token, f"#{len(self._tokens) + 1}")


def _clock(at: Millis) -> str:
    """By the store's clock, in seconds since it began."""
    return f"{(at - FIRST_INSTANT) / 1000:.3f} s"


def _due(due: Due) -> str:
    return f"at {_clock(due.millis)}" if isinstance(due, At) else f"in {due.millis} ms"
