"""Reads the logs of callers and workers, and says what is wrong with them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise

from bide.core.records import Verdict
from bide_proofs.culling.crew import LEASE
from bide_proofs.culling.lines import Answered, Asked, Delivered, Ended, Killed, Line, Settled


class _Life:
    """What all logs say of one id."""

    __slots__ = ("answers", "deliveries", "settled")

    def __init__(self) -> None:
        self.answers: list[Answered] = []
        self.deliveries: list[Delivered] = []
        self.settled: list[Settled] = []


class Judgement:
    """What the lines show; their order does not matter."""

    KINDS = (
        "lost", "early", "fired_after_cancel", "changed_while_held", "fired_after_settle", "settled_twice",
        "redelivered_unkilled", "not_rising", "strange_id", "not_done", "left", "failed_call", "worker_ended",
    )  # fmt: skip

    def __init__(self, lines: Iterable[Line]) -> None:
        self.wrong: dict[str, list[str]] = {kind: [] for kind in self.KINDS}
        self.answers: dict[str, Counter[str]] = defaultdict(Counter)
        self.deliveries = self.redelivered = self.lost_alive = 0
        """`lost_alive`: begun again a lease later, though nobody had killed who had it: it stood still for so long."""
        self.lateness: list[float] = []
        """Milliseconds, of the first start of each life, in order of length."""
        self.untouched: list[float] = []
        """The same without those that a worker had leased and died before it started them."""
        self._killed: dict[int, int] = {}
        self._lives: dict[str, _Life] = {}
        self._asked: set[str] = set()
        self._undecided: set[str] = set()
        """Keys of which a cancel failed, so that it may have been done."""
        for line in lines:
            self._take(line)
        by_key: dict[str, list[Delivered]] = defaultdict(list)
        for id, life in self._lives.items():
            life.deliveries.sort(key=lambda one: one.at)
            self._judge(id, life)
            for one in life.deliveries:
                by_key[one.key].append(one)
        for deliveries in by_key.values():
            self._judge_order(sorted(deliveries, key=lambda one: one.at))
        self.lateness.sort()
        self.untouched.sort()

    @property
    def counts(self) -> dict[str, int]:
        return {kind: len(found) for kind, found in self.wrong.items()}

    def _take(self, line: Line) -> None:
        if isinstance(line, Delivered):
            self.deliveries += 1
            self._life(line.id).deliveries.append(line)
        elif isinstance(line, Settled):
            self._life(line.id).settled.append(line)
            if line.verdict is not Verdict.DONE:
                self._blame("not_done", (line,))
        elif isinstance(line, Answered):
            self.answers[line.verb][line.result] += 1
            if line.result == "failed":
                self._blame("failed_call", (line,))
                if line.verb == "cancel":
                    self._undecided.add(line.key)
            elif line.id:
                self._life(line.id).answers.append(line)
        elif isinstance(line, Asked):
            self._asked.add(line.id)
        elif isinstance(line, Killed):
            self._killed[line.worker] = line.at
        elif isinstance(line, Ended):
            self._blame("worker_ended", (line,))
        else:
            self._blame("left", (line,))

    def _life(self, id: str) -> _Life:
        life = self._lives.get(id)
        if life is None:
            life = self._lives[id] = _Life()
        return life

    def _judge(self, id: str, life: _Life) -> None:
        scheduled = any(one.result in ("created", "replaced") for one in life.answers)
        cancels = [one for one in life.answers if one.result in ("cancelled", "cancelled_while_leased")]
        changes = [one for one in life.answers if one.result in ("moved", "cancelled")]
        planned = [one for one in life.answers if one.result in ("created", "replaced", "moved")]
        if scheduled and not life.deliveries and not cancels and life.answers[0].key not in self._undecided:
            self._blame("lost", life.answers)
        if id not in self._asked:
            self._blame("strange_id", life.deliveries)
        if len(life.settled) > 1:
            self._blame("settled_twice", life.settled)
        for one in life.deliveries:
            last = max((word for word in planned if word.token < one.token), key=lambda word: word.token, default=None)
            if one.at < one.planned_at * 1_000_000 or (last is not None and one.planned_at < last.wake_at):
                self._blame("early", (one, last))
            for word in cancels:
                if one.token > word.token or (word.result == "cancelled" and one.at > word.at):
                    self._blame("fired_after_cancel", (word, one))
                    break
            for word in changes:
                if one.token < word.token:  # no handler here fails, so what was leased once never waits again
                    self._blame("changed_while_held", (one, word))
                    break
            for end in life.settled:
                if one.token > end.token or one.at > end.at:
                    self._blame("fired_after_settle", (end, one))
                    break
        if life.deliveries:
            first = life.deliveries[0]
            late = first.at / 1e6 - first.planned_at
            self.lateness.append(late)
            if first.attempt == 1:
                self.untouched.append(late)

    def _judge_order(self, deliveries: Sequence[Delivered]) -> None:
        """Of one key, in the order in which they began."""
        for before, after in pairwise(deliveries):
            again = before.id == after.id
            if after.token <= before.token or (again and after.attempt <= before.attempt):
                self._blame("not_rising", (before, after))
            if again:
                self.redelivered += 1
                if self._killed.get(before.worker, after.at) < after.at:
                    continue
                if after.token - before.token < LEASE * 1e6:
                    self._blame("redelivered_unkilled", (before, after))
                else:
                    self.lost_alive += 1

    def _blame(self, kind: str, evidence: Iterable[object]) -> None:
        self.wrong[kind].append("; ".join(str(one) for one in evidence))
