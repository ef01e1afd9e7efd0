"""What the events of a run add up to: load, lateness, recovery, and a few faults that need no search to be seen.

These counts are no judge of all promises, which `bide.testing.history.check` is; they are simple enough to be believed
without it, and say nothing where something is not known.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from bide.core.instants import Millis
from bide.core.records import Result, State, Token, Verdict
from bide.testing.history import events as ev
from bide.testing.history.events import Asks, Event
from bide_proofs.torture.topics import LEASE
from bide_proofs.torture.undone import Span
from bide_proofs.trial import percentiles

LOST, EARLY, AFTER_CANCEL, STALE, LEFT = SIMPLE = (
    "lost", "early", "delivered after cancelled", "stale token accepted", "left behind",
)  # fmt: skip
_BEGINS = (Result.CREATED, Result.REPLACED, Result.REDRIVEN)
_CANCELS = (Result.CANCELLED, Result.CANCELLED_WHILE_LEASED)
_LENGTH: Millis = round(LEASE * 1000)
_PURGED: Millis = 65_000
"""Within so long after its keeping is over, what has ended is forgotten by a worker: it purges every minute."""


@dataclass(slots=True)
class _Life:
    """What is known of one id."""

    ref: tuple[str, str]
    begun: ev.Answered | None = None
    leased: list[tuple[Token, int]] = field(default_factory=list)
    """Tokens, and when they were answered."""
    began: list[ev.Began] = field(default_factory=list)
    cancelled: tuple[Token, int, bool] | None = None
    """By an answer: token, when, and whether it was waiting."""
    over: bool = False
    """Whether it was settled, or something else is known to have ended it."""


class Figures:
    """Adds up the events of one run, in the order of time."""

    def __init__(self, events: Iterable[Event]) -> None:
        self.wrong: dict[str, list[str]] = {kind: [] for kind in SIMPLE}
        self.verbs: dict[str, Counter[str]] = defaultdict(Counter)
        self.settled: Counter[str] = Counter()
        self.scheduled = self.deliveries = self.again = 0
        """`again`: deliveries after a lease that had ended without an outcome."""
        self.lateness: list[float] = []
        """Milliseconds from the wake to the first line of the handler, by the store's clock, in order of length."""
        self.lateness_again: list[float] = []
        """The same of deliveries that follow a lost lease, from the wake of the first."""
        self.moments: list[int] = []
        """When deliveries began."""
        self.drained = False
        self._slack: Millis = 0
        self._asked: dict[int, ev.Asked] = {}
        self._settling: dict[int, ev.Settling] = {}
        self._lives: dict[str, _Life] = {}
        self._doubtful: set[tuple[str, str]] = set()
        """Keys of which something may have been done that nobody was told of."""
        self._newest: dict[tuple[str, str], tuple[Token, int]] = {}
        """The highest token that a holder was given, and when it was told."""
        self._last: dict[tuple[str, str], tuple[Token, str]] = {}
        """The highest token that was seen, and the life that had it."""
        self._after_loss: set[tuple[tuple[str, str], Token]] = set()
        self._held: dict[tuple[tuple[str, str], Token], _Life] = {}
        for event in events:
            self._take(event)
        for asked in self._asked.values():
            if asked.asks is not Asks.GET:
                self._doubt(asked)
        for id, life in self._lives.items():
            self._judge(id, life)
        self.lateness.sort()
        self.lateness_again.sort()

    def recovery(self, spans: Sequence[Span]) -> dict[str, dict[str, float]]:
        """Of each kind of fault: seconds from its end to the next delivery, and the longest pause between two
        deliveries of which it, or another at the same time, may be the cause."""
        lengths: dict[str, list[float]] = defaultdict(list)
        pauses: dict[str, float] = defaultdict(float)
        for kind, begun, over in spans:
            first, place = bisect_left(self.moments, begun), bisect_left(self.moments, over)
            if place < len(self.moments):
                lengths[kind].append((self.moments[place] - over) / 1e9)
            pauses[kind] = max(pauses[kind], _longest_pause(self.moments[max(0, first - 1) : place + 1]))
        shown = {}
        for kind, those in sorted(lengths.items()):
            parts = percentiles(sorted(those))
            shown[kind] = {"p50": parts["p50"], "most": parts["most"], "longest_pause": pauses[kind]}
        return shown

    def silence(self, spans: Sequence[Span]) -> dict[str, Any]:
        """The longest time between two deliveries, in seconds, and what went on meanwhile."""
        before, after = max(pairwise(self.moments), key=lambda pair: pair[1] - pair[0], default=(0, 0))
        meanwhile = Counter(kind for kind, begun, over in spans if begun < after and over > before)
        return {"seconds": round((after - before) / 1e9, 2), "meanwhile": dict(sorted(meanwhile.items()))}

    def load(self) -> dict[str, Any]:
        """What was asked and done."""
        return {
            "scheduled": self.scheduled,
            "verbs": {verb: dict(sorted(words.items())) for verb, words in sorted(self.verbs.items())},
            "deliveries": self.deliveries,
            "settled": dict(sorted(self.settled.items())),
        }

    # one event

    def _take(self, event: Event) -> None:
        if isinstance(event, ev.Asked):
            self._asked[event.call] = event
        elif isinstance(event, ev.Answered):
            self._answered(event)
        elif isinstance(event, ev.Failed):
            self._failed(event)
        elif isinstance(event, ev.Leased):
            self._leased(event)
        elif isinstance(event, ev.Settling):
            self._settling[event.call] = event
            life = self._held.get(((event.topic, event.key), event.token))
            if life is not None and event.verdict is Verdict.DEAD:
                life.over = True  # past its deadline, say: it may end without having been delivered
        elif isinstance(event, ev.Told):
            self._told(event)
        elif isinstance(event, ev.Began):
            self._began(event)
        elif isinstance(event, ev.Header):
            self._slack = event.slack
        elif isinstance(event, ev.Left):
            self._left(event)
        elif isinstance(event, ev.End):
            self.drained = event.drained

    def _answered(self, event: ev.Answered) -> None:
        asked = self._asked.pop(event.call)
        self.verbs[asked.asks][event.result or ("found" if event.task else "none")] += 1
        ref, task, result = (asked.topic, asked.key), event.task, event.result
        if task is None:
            return
        life = self._life(task.id, ref)
        if result in _BEGINS:
            life.begun = event
            self.scheduled += 1
            self._reign(ref, task.token, task.id)
        elif result in _CANCELS:
            life.cancelled = (task.token, event.at, result is Result.CANCELLED)
            life.over = True
        if task.state in (State.DONE, State.DEAD, State.CANCELLED):
            life.over = True

    def _failed(self, event: ev.Failed) -> None:
        asked = self._asked.pop(event.call, None)
        if asked is not None:
            self.verbs[asked.asks]["unknown" if event.unknown else "failed"] += 1
            if event.unknown:
                self._doubt(asked)

    def _leased(self, event: ev.Leased) -> None:
        for held in event.tasks:
            ref, task = (held.topic, held.key), held.task
            if task.losses:
                self.again += 1
                self._after_loss.add((ref, task.token))
            # The store's clock when it was leased: the token is that clock, and so is the end of the lease less its
            # length, but for a store that takes the end as its holder reckons it, who may not know yet of a jump. What
            # comes with the answer is the earliest of the clocks of several shards.
            leased_at = max(task.wake_at - _LENGTH, task.token // 1000)
            if leased_at < task.planned_at:
                self._blame(EARLY, f"{ref} was leased at {leased_at} for {task.planned_at}: {task}")
            life = self._life(task.id, ref)
            life.leased.append((task.token, event.at))
            self._reign(ref, task.token, task.id)
            self._held[ref, task.token] = life
            if self._newest.get(ref, (0, 0))[0] < task.token:
                self._newest[ref] = (task.token, event.at)

    def _told(self, event: ev.Told) -> None:
        settling = self._settling.pop(event.call, None)
        if settling is None:
            return
        verdict = settling.verdict
        self.settled[verdict if event.ok else f"{verdict} refused"] += 1
        ref = (settling.topic, settling.key)
        token, at = self._newest.get(ref, (0, 0))
        if event.ok and token > settling.token and at < settling.at:
            self._blame(STALE, f"{ref}: {settling} was accepted, and {token} was given out before")

    def _began(self, event: ev.Began) -> None:
        ref = (event.topic, event.key)
        self.deliveries += 1
        self.moments.append(event.at)
        first = (ref, event.token) not in self._after_loss
        (self.lateness if first else self.lateness_again).append(event.clock - event.planned_at)
        if event.clock + self._slack < event.planned_at:
            self._blame(EARLY, f"{ref} began {event.planned_at - event.clock} ms too early: {event}")
        self._life(event.id, ref).began.append(event)

    def _left(self, event: ev.Left) -> None:
        keep = event.task.keep_until
        if event.task.state.live or keep is None or keep + _PURGED < event.clock:
            self._blame(LEFT, f"{event.topic}/{event.key}: {event.task}")
        self._life(event.task.id, (event.topic, event.key)).over = True

    # what it comes to

    def _life(self, id: str, ref: tuple[str, str]) -> _Life:
        life = self._lives.get(id)
        if life is None:
            life = self._lives[id] = _Life(ref)
        return life

    def _doubt(self, asked: ev.Asked) -> None:
        self._doubtful.add((asked.topic, asked.key))

    def _reign(self, ref: tuple[str, str], token: Token, id: str) -> None:
        """This life had the key when it had this token."""
        if self._last.get(ref, (0, ""))[0] < token:
            self._last[ref] = (token, id)

    def _judge(self, id: str, life: _Life) -> None:
        if life.cancelled is not None:
            token, at, waited = life.cancelled
            leased = {given for given, _ in life.leased if given > token}
            began = {one.token for one in life.began if one.token > token or (waited and one.at > at)}
            for given in sorted(leased | began):
                self._blame(AFTER_CANCEL, f"{life.ref}: cancelled as {token} at {at}, and held as {given}: {life}")
        ended = bool(life.began) or life.over or life.begun is None
        if self.drained and not ended and self._last[life.ref][1] == id and life.ref not in self._doubtful:
            self._blame(LOST, f"{life.ref}: {life.begun}")

    def _blame(self, kind: str, what: str) -> None:
        self.wrong[kind].append(what)


def _longest_pause(moments: Sequence[int]) -> float:
    return round(max((after - before for before, after in pairwise(moments)), default=0) / 1e9, 2)


def counts_of(wrong: Mapping[str, Sequence[object]]) -> dict[str, int]:
    return {kind: len(cases) for kind, cases in wrong.items()}
