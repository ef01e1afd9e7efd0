"""Outcomes and extensions from consumers that are not of this process, by the same policy as a worker's own.

A plain Done needs no look at the task; what the policy decides (when to try again, whether it is too late) does, so the
tasks of such outcomes are read first, all in one call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bide.core.events import EventKind
from bide.core.instants import Millis
from bide.core.outcomes import Done, Outcome
from bide.core.records import Lease, Record, Ref, Settlement, State, Topic, Verdict
from bide.engine.history import History
from bide.engine.recorder import Recorder
from bide.engine.terms import Terms
from bide.engine.verdicts import Policy, settlement
from bide.ports import Clock, Store


class Settling:
    """Tells the store how deliveries elsewhere ended. `settled` is called for each outcome that it accepted.

    `may_note`: whether this caller may write one more line into the log of events, which all share.
    """

    def __init__(
        self,
        store: Store,
        *,
        clock: Clock,
        terms: Terms,
        recorder: Recorder,
        policy_of: Callable[[Topic], Policy],
        settled: Callable[[Topic, Verdict], None] | None = None,
        history: History | None = None,
        may_note: Callable[[str], object] = lambda who: True,
    ) -> None:
        self._store = store
        self._clock = clock
        self._terms = terms
        self._recorder = recorder
        self._policy_of = policy_of
        self._settled = settled
        self._history = history
        self._may_note = may_note

    async def settle(self, ended: Sequence[tuple[Lease, Outcome]], *, who: str) -> list[bool]:
        """Record how these leases ended; false where the lease was gone, and nothing changed. Raises StoreError."""
        looked_up = [place for place, (_, outcome) in enumerate(ended) if not _plain(outcome)]
        refs = [Ref(ended[place][0].topic, ended[place][0].key) for place in looked_up]
        found = dict(zip(looked_up, await self._store.get(refs), strict=True)) if refs else {}
        sent: list[tuple[int, Settlement, Record | None]] = []
        for place, (lease, outcome) in enumerate(ended):
            record = found.get(place)
            if _plain(outcome):
                keep = self._terms.retention_of(lease.topic).keep_until(State.DONE, self._clock.now())
                sent.append((place, Settlement(*lease, Verdict.DONE, None, keep), None))
            elif record is not None and record.token == lease.token and record.state is State.LEASED:
                told = settlement(
                    record, outcome, self._policy_of(lease.topic), self._terms.retention_of(lease.topic), self._clock
                )
                sent.append((place, told, record))
        settled = [False] * len(ended)
        if not sent:
            return settled
        accepted = await self._store.settle([told for _, told, _ in sent], now=self._clock.now())
        for (place, told, record), ok in zip(sent, accepted, strict=True):
            settled[place] = ok
            if ok and self._settled is not None:
                self._settled(told.topic, told.verdict)
            if ok and self._history is not None:
                self._history.ended(told.topic, told.verdict)
            if ok and record is not None and told.verdict in (Verdict.RETRY, Verdict.DEAD):
                self._note(record, told, who)
        return settled

    async def extend(self, leases: Sequence[Lease], length: Millis) -> list[bool]:
        """Keep these for a length from now; false where the lease was gone. Raises StoreError."""
        now = self._clock.now()
        return await self._store.extend(leases, now=now, until=now + self._clock.span(length))

    def _note(self, record: Record, told: Settlement, who: str) -> None:
        if not self._may_note(who):
            self._recorder.dropped += 1
            return
        kind = EventKind.RETRY if told.verdict is Verdict.RETRY else EventKind.DEAD
        self._recorder.delivered(record, kind, told.why, at=self._clock.now(), who=who, wake=told.wake)


def _plain(outcome: Outcome) -> bool:
    return isinstance(outcome, Done) and outcome.again is None
