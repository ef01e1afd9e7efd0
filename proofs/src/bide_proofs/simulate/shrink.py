"""Cuts a plan down to the few steps without which nothing goes wrong.

By delta debugging (Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", 2002): parts of the
steps are left out, larger ones first, and what still breaks the same promise is kept. Each try plays the plan.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from bide.testing.history.report import Violation
from bide_proofs.simulate.judge import judged
from bide_proofs.simulate.plan import Ask, Plan, Step
from bide_proofs.simulate.world import play

_MOST_TRIES = 400


class Shrunk:
    """The smaller plan, what is wrong with it, and how many plays it took."""

    def __init__(self, plan: Plan, wrong: Violation) -> None:
        self.plan = plan
        self.wrong = wrong
        self.tries = 0

    def accept(self, steps: Sequence[Step]) -> bool:
        """Whether these alone break the same promise; if so, they are the plan now."""
        if self.tries >= _MOST_TRIES:
            return False
        self.tries += 1
        plan = replace(self.plan, steps=list(steps))
        for wrong in judged(plan, play(plan)).wrong:
            if wrong.promise == self.wrong.promise:
                self.plan, self.wrong = plan, wrong
                return True
        return False


def shrunk(plan: Plan, wrong: Violation) -> Shrunk:
    """Some hundred plays: a minute or two."""
    small = Shrunk(plan, wrong)
    about = [step for step in plan.steps if not isinstance(step, Ask) or _touches(step, wrong)]
    if wrong.topic:
        small.accept(about)
    small.accept([step for step in small.plan.steps if isinstance(step, Ask)])
    _ddmin(small)
    return small


def _touches(ask: Ask, wrong: Violation) -> bool:
    return ask.topic == wrong.topic and (wrong.key.rstrip("n") in ask.keys or ask.verb in ("shift", "cancel_group"))


def _ddmin(small: Shrunk) -> None:
    size = max(len(small.plan.steps) // 2, 1)
    while True:
        place = 0
        smaller = False
        while place < len(small.plan.steps):
            steps = small.plan.steps
            if small.accept(steps[:place] + steps[place + size :]):
                smaller = True
            else:
                place += size
        if size == 1 and not smaller:
            return
        size = max(size // 2, 1)
