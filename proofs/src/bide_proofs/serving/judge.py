"""Compares what callers were answered with what the receiver saw, and says what is wrong."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise

from bide_proofs.serving.instances import LEASE
from bide_proofs.serving.lines import Answered, Arrived, Killed, Line, Wrong

_SCHEDULED = ("created", "kept", "replaced")
_CANCELLED = ("cancelled", "cancelled_while_leased", "finished (cancelled)")


class _Key:
    """What was noted of one key, in the order of time."""

    __slots__ = ("answers", "arrivals")

    def __init__(self) -> None:
        self.answers: list[Answered] = []
        self.arrivals: list[Arrived] = []

    @property
    def lives(self) -> dict[str, int]:
        """The ids that answers named, each with the token of its first answer."""
        found: dict[str, int] = {}
        for one in self.answers:
            if one.id:
                found.setdefault(one.id, one.token)
        return found

    @property
    def undecided(self) -> bool:
        """Whether there may be a life that no answer named."""
        return any(
            (one.unanswered and one.verb in ("schedule", "replace")) or one.result == "failed" for one in self.answers
        )

    def planned(self, arrived: Arrived) -> list[int]:
        """When it was to arrive, in milliseconds since the epoch: more than one time where that was not decided.

        The time that was acknowledged last, and those that were asked for after it by a move that was also sent
        without an answer: it may have been done then, and its answer be of what came later. None of an unknown life.
        """
        found: list[int] = []
        for one in self.answers:
            if one.id == arrived.id and one.waiting and one.token < arrived.token:
                found = [one.wake_at]
            elif found and one.verb == "move" and one.unanswered and one.asked_at < arrived.at:
                found.append(one.asked_for)
        return found


class Judgement:
    """What the lines show; their order does not matter."""

    KINDS = (
        "lost", "early", "fired_after_cancel", "fired_after_move", "fired_after_replace", "applied_twice",
        "stale_applied", "strange_life", "redelivered_unkilled", "not_rising", "bad_delivery", "left", "failed_call",
        "instance_ended", "logged",
    )  # fmt: skip

    def __init__(self, lines: Iterable[Line]) -> None:
        self.wrong: dict[str, list[str]] = {kind: [] for kind in self.KINDS}
        self.answers: dict[str, Counter[str]] = defaultdict(Counter)
        self.lost_alive = 0
        """Acknowledged, and delivered again a lease later, though the instance had not been killed: it, or this
        process, stood still for so long."""
        self.effects: Counter[str] = Counter()
        """Deliveries by what became of them; see `Arrived.effect`."""
        self.lateness: list[float] = []
        """Milliseconds, of the first arrival of each life, in order of length."""
        self.untouched: list[float] = []
        """The same without those that an instance had leased and died before it posted them."""
        self.recovered: list[float] = []
        """Seconds from a kill to the delivery of what the dead instance had held, in order of length."""
        self.calls: list[float] = []
        """Milliseconds from the first sending of a call to its answer, in order of length."""
        self._killed: dict[int, int] = {}
        keys: dict[str, _Key] = defaultdict(_Key)
        for line in sorted(lines, key=lambda line: getattr(line, "at", 0)):
            if isinstance(line, Answered):
                keys[line.key].answers.append(line)
                self.answers[line.verb][line.result] += 1
                self.calls.append((line.at - line.asked_at) / 1e6)
                if line.result == "failed":
                    self._blame("failed_call", line)
            elif isinstance(line, Arrived):
                keys[line.key].arrivals.append(line)
                self.effects[line.effect] += 1
            elif isinstance(line, Killed):
                self._killed[line.instance] = line.at
            else:
                assert isinstance(line, Wrong)
                self._blame(line.kind, line.what)
        for key in keys.values():
            self._judge_end(key)
            self._judge_arrivals(key)
            self._judge_effects(key.arrivals)
            self._judge_lives(key)
        for found in (self.lateness, self.untouched, self.recovered, self.calls):
            found.sort()

    @property
    def counts(self) -> dict[str, int]:
        return {kind: len(found) for kind, found in self.wrong.items()}

    def _judge_end(self, key: _Key) -> None:
        """Whether what was promised last has happened."""
        last = next((one for one in reversed(key.answers) if one.result in _SCHEDULED), None)
        if last is None:
            return
        for one in key.answers:
            if one.verb != "cancel" or one.at < last.at:
                continue
            if one.result in (*_CANCELLED, "failed") or (one.result == "not_found" and one.unanswered):
                return  # cancelled, or maybe
        applied = {one.id for one in key.arrivals if one.effect == "applied"}
        if last.id in applied or (key.undecided and applied - key.lives.keys()):
            return
        self._blame("lost", *key.answers, *key.arrivals)

    def _judge_arrivals(self, key: _Key) -> None:
        """Each delivery against each answer about its life; and whether it was to be expected at all."""
        lives, undecided = key.lives, key.undecided
        for arrived in key.arrivals:
            if arrived.id not in lives and not undecided:
                self._blame("strange_life", *key.answers, arrived)
            for said in key.answers:
                if said.id == arrived.id:
                    if _after_cancel(said, arrived):
                        self._blame("fired_after_cancel", said, arrived)
                    if said.result == "moved" and arrived.token < said.token and arrived.at > said.at:
                        self._blame("fired_after_move", said, arrived)
                elif said.result == "replaced" and lives.get(arrived.id, said.token) < said.token < arrived.token:
                    self._blame("fired_after_replace", said, arrived)
            if arrived.wall < min(key.planned(arrived), default=0) * 1_000_000:
                self._blame("early", *key.answers, arrived)

    def _judge_effects(self, arrivals: Sequence[Arrived]) -> None:
        """The receiver, by its own words."""
        applied: set[str] = set()
        highest = 0
        for one in arrivals:
            if one.effect == "applied":
                if one.id in applied:
                    self._blame("applied_twice", *arrivals)
                if one.token < highest:
                    self._blame("stale_applied", *arrivals)
                applied.add(one.id)
            highest = max(highest, one.token)

    def _judge_lives(self, key: _Key) -> None:
        lives: dict[str, list[Arrived]] = defaultdict(list)
        for one in key.arrivals:
            lives[one.id].append(one)
        for arrivals in lives.values():
            again: set[int] = set()
            for before, after in pairwise(arrivals):
                # also before it arrived: what an instance had sent when it died is read after its death
                killed = self._killed.get(before.instance, after.at) < after.at
                once_more = (  # at once, since the connection had broken
                    not before.acknowledged
                    and after.token not in again
                    and (after.instance, after.token, after.attempt) == (before.instance, before.token, before.attempt)
                )
                if once_more:
                    again.add(after.token)
                elif after.token <= before.token or after.attempt <= before.attempt:
                    self._blame("not_rising", before, after)
                if before.acknowledged and killed:
                    self.recovered.append((after.at - self._killed[before.instance]) / 1e9)
                elif before.acknowledged and after.token - before.token < LEASE * 1e6:
                    self._blame("redelivered_unkilled", before, after)
                elif before.acknowledged:
                    self.lost_alive += 1
            first = arrivals[0]
            plans = key.planned(first)
            if len(plans) == 1:
                late = first.wall / 1e6 - plans[0]
                self.lateness.append(late)
                if first.attempt == 1:
                    self.untouched.append(late)

    def _blame(self, kind: str, *evidence: object) -> None:
        self.wrong[kind].append("; ".join(str(one) for one in evidence))


def _after_cancel(said: Answered, arrived: Arrived) -> bool:
    if said.result not in _CANCELLED:
        return False
    return arrived.token > said.token or (said.result == "cancelled" and arrived.at > said.at)
