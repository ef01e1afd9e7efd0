"""One worker of the model: subscribe, lease, sleep, deliver, settle, and everything that can happen in between.

The loop is that of `engine.worker`: *subscribe first, then lease; what the lease returns says how long to sleep; what
is heard since the lease was sent counts; it only ever shortens the sleep; every sleep is capped.* It has one slot, so
it asks for nothing while it runs a handler.
"""

from __future__ import annotations

from collections.abc import Iterator

from bide_proofs.model.records import NOTHING, SPENT, Bounds, Effect, Loose, Move, Ref, Rules, Shared, Worker
from bide_proofs.model.store import Answer, Store

_TWICE = "P5: a request that was sent twice was carried out twice"
_TWO_ANSWERS = "P5: a request that was sent twice had two answers"
_OLD = "P5: a request was carried out after a newer one of the same caller"
_ENDS = {"done": "it is done", "dead": "it is dead", "retry": "it failed, and shall be tried again", "defer": "not now"}


def fresh_worker(rules: Rules, bounds: Bounds, loose: Loose | None = None) -> Worker:
    """One that has just started: it has subscribed, and its first request for a lease is under way."""
    return Worker("sent", bounds.lease, rest=_rest(rules, bounds), deaf=not rules.subscribes_first, loose=loose)


def _rest(rules: Rules, bounds: Bounds) -> int:
    return bounds.cap if rules.caps_from_sending else 0


def seen_by(effect: Effect, worker: Worker, rules: Rules) -> Worker:
    """`worker`, after a step of somebody else, or an instant later."""
    ref = None if worker.ref is None else _ref_after(effect, worker.ref)
    if ref is not None and worker.phase not in ("told", "has"):
        ref = _plain(ref)
    loose = _loose_after(effect, worker.loose, rules)
    at, rest, wake_up = worker.at, worker.rest, worker.wake_up
    if effect.tick:
        rest = max(0, rest - 1)
        at = None if at is None else max(0, at - 1)
        wake_up = None if wake_up is None else max(0, wake_up - 1)
    if effect.wake_up is not None and worker.phase in ("sent", "told", "asleep") and not worker.deaf:
        wake_up = effect.wake_up if wake_up is None else min(wake_up, effect.wake_up)
    return worker._replace(ref=ref, loose=loose, at=at, rest=rest, wake_up=wake_up)


def _ref_after(effect: Effect, ref: Ref) -> Ref:
    token, fresh, newest, called_off, early, left = ref
    if effect.touched:
        fresh = False
        called_off |= effect.called_off and newest
        newest &= not effect.born
    if effect.raised:
        token = 0
    if effect.tick:
        early, left = max(0, early - 1), max(0, left - 1)
    return Ref(token, fresh, newest, called_off, early, left)


def _loose_after(effect: Effect, loose: Loose | None, rules: Rules) -> Loose | None:
    """What is astray, after a step. One whose token is over is refused whenever it arrives: it is `SPENT`."""
    if loose is None or loose.ref is None:
        return loose
    ref = _plain(_ref_after(effect, loose.ref))
    checked = rules.checks_token if loose.what == "settle" else rules.extend_checks_token
    if checked and rules.tokens_outlive and not ref.token:
        return SPENT
    return loose._replace(ref=ref)


def wrong_with(bounds: Bounds, shared: Shared, worker: Worker) -> str:
    """The invariant that does not hold between the store and this worker; empty: all do."""
    ref = worker.ref
    if ref is not None and shared.body is not None and not ref.fresh and shared.live and ref.token == shared.body.token:
        return "P12: a task has the token of a lease that is over"
    if ref is not None and ref.fresh and not shared.live:
        return "P3: a lease is live, and its task is not"
    if worker.phase == "asleep" and shared.live and not worker.lost and worker.wake_up is None:
        assert shared.entry is not None
        if worker.at is None or shared.entry < worker.at:
            return "P8: a worker sleeps past the next wake, no wake-up is on its way, and none was lost"
    return ""


class Working:
    """The steps of a worker."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.rules = store.rules
        self.bounds = store.bounds

    def moves(self, shared: Shared, worker: Worker) -> Iterator[Move]:
        """Everything that may come next of this worker, or of what it has sent."""
        if worker.loose is not None:
            yield from self._astray(shared, worker, worker.loose)
        if worker.wake_up is not None:
            yield Move("a wake-up for {me} is lost", shared, worker._replace(wake_up=None, lost=True))
        if worker.phase == "sent":
            yield from self._sent(shared, worker)
        elif worker.phase == "told":
            yield from self._told(shared, worker)
        elif worker.phase == "asleep":
            yield from self._asleep(shared, worker)
        elif worker.phase == "has":
            yield from self._has(shared, worker)
        elif worker.phase == "runs":
            yield from self._runs(shared, worker)
        elif worker.phase == "ends":
            yield from self._ends(shared, worker)
        else:
            yield from self._unsure(shared, worker)
        if self.bounds.crashes:
            yield from self._crash(shared, worker)

    def _again(self, worker: Worker, effect: Effect = NOTHING) -> Worker:
        """The next request for a lease is sent; what was heard until here is forgotten. `effect`: of its last step."""
        loose = _loose_after(effect, worker.loose, self.rules)
        return Worker("sent", self.bounds.lease, rest=_rest(self.rules, self.bounds), loose=loose)

    def _may_stray(self, shared: Shared, worker: Worker) -> bool:
        return worker.loose is None and shared.loose < self.bounds.loose

    def _overtaken(self, worker: Worker, what: str) -> Loose | None:
        """What is astray of this worker, now that a newer call of the same kind was carried out."""
        loose = worker.loose
        if loose is None or loose.what != what or not loose.mine or loose.done:
            return loose
        return SPENT if self.rules.numbers_rise else loose._replace(old=True)

    # --- lease

    def _sent(self, shared: Shared, worker: Worker) -> Iterator[Move]:
        answer, told = self._lease(shared, worker)
        yield Move(
            f"the store carries out {{me}}'s lease: {_said(answer)}", answer.shared, told, answer.effect, True,
            broken=answer.broken,
        )  # fmt: skip
        if self._may_stray(shared, worker) and not worker.deaf:
            given_up = self._again(worker)._replace(loose=Loose("lease"))
            yield Move("{me}'s lease is delayed; it gives up, and sends another", _astray(shared, 1), given_up)

    def _lease(self, shared: Shared, worker: Worker) -> tuple[Answer, Worker]:
        assert worker.at is not None
        answer = self.store.lease(shared, worker.at)
        loose = _loose_after(answer.effect, self._overtaken(worker, "lease"), self.rules)
        told = worker._replace(phase="told", at=answer.next_wake, ref=answer.ref, loose=loose)
        if answer.ref is not None:
            told = told._replace(at=None, rest=0, wake_up=None, lost=False)
        return answer, told

    def _told(self, shared: Shared, worker: Worker) -> Iterator[Move]:
        if not self.rules.journal:  # with it, a copy changes nothing, and another answer is the same answer later
            second = self.store.lease(shared, self.bounds.lease)
            loose = _loose_after(second.effect, worker.loose, self.rules)
            twice = worker._replace(at=second.next_wake, ref=second.ref, loose=loose)
            broken = _TWICE if second.effect.touched else _TWO_ANSWERS if worker.ref is not None else ""
            yield Move(f"the answer to {{me}} is lost; the lease is sent again, and done again: {_said(second)}",
                       second.shared, twice, second.effect, broken=broken)  # fmt: skip
        if worker.ref is not None:
            ref = worker.ref
            if not self.rules.counts_from_sending:
                ref = ref._replace(left=self.bounds.lease)
            has = Worker("has", ref=ref, loose=worker.loose)
            yield Move("{me} hears that it has the lease", shared, has, helps=True)
            return
        cap = worker.rest if self.rules.caps_from_sending else self.bounds.cap
        alarm = min(worker.at, cap) if worker.at is not None else cap if self.rules.capped else None
        asleep = worker._replace(phase="asleep", at=alarm, rest=0, deaf=False)
        told = f"{{me}} hears that nothing is due, and sleeps{_for(alarm)}"
        if worker.wake_up is None:
            yield Move(told, shared, asleep, helps=True)
            return
        yield Move(f"{told}; a wake-up is still on its way", shared, asleep, helps=True)
        if self.rules.forgets_before:
            alarm = worker.wake_up if alarm is None else min(alarm, worker.wake_up)
            told = f"{{me}} hears that nothing is due, has heard of a wake meanwhile, and sleeps{_for(alarm)}"
        yield Move(told, shared, asleep._replace(at=alarm, wake_up=None))

    def _asleep(self, shared: Shared, worker: Worker) -> Iterator[Move]:
        if worker.at == 0:
            yield Move("{me}'s alarm rings; it asks for a lease", shared, self._again(worker), helps=True)
        else:
            yield Move("{me}'s alarm rings early; it asks for a lease", shared, self._again(worker))
        if worker.wake_up is not None:
            alarm = worker.wake_up if worker.at is None else min(worker.at, worker.wake_up)
            yield Move(f"a wake-up reaches {{me}}: it sleeps{_for(alarm)}", shared,
                       worker._replace(at=alarm, wake_up=None))  # fmt: skip

    # --- deliver

    def _has(self, shared: Shared, worker: Worker) -> Iterator[Move]:
        ref = worker.ref
        assert ref is not None
        if ref.left <= 0 and self.rules.looks_before_it_begins:
            yield Move("{me}'s lease has ended before its handler began: it is let go", shared, self._again(worker),
                       helps=True)  # fmt: skip
            return
        broken = ""
        if ref.early > 0:
            broken = "P1: a delivery began before the wake that it was leased for"
        elif ref.called_off:
            broken = "P4: a delivery began after `cancelled` was answered"
        running = worker._replace(phase="runs", ref=_plain(ref))
        yield Move("{me}'s handler begins", shared, running, helps=True, goal=ref.fresh, broken=broken)
        kept = self.store.extend(shared, ref)
        if kept.word == "accepted":
            longer = worker._replace(ref=ref._replace(left=self.bounds.lease), loose=self._overtaken(worker, "extend"))
            yield Move("{me} extends its lease before its handler began", kept.shared, longer, broken=kept.broken)
        else:
            yield Move("{me} is refused to extend: its handler does not begin", shared, self._again(worker),
                       broken=kept.broken)  # fmt: skip
        back = worker._replace(phase="ends", ref=_plain(ref), verdict="defer")
        yield Move("{me} stops, and gives the task back unstarted", shared, back)
        if self.rules.settles_before_it_begins:
            early = worker._replace(phase="ends", ref=_plain(ref), verdict="done")
            yield Move("{me} sends that it is done, and only then begins", shared, early)

    def _runs(self, shared: Shared, worker: Worker) -> Iterator[Move]:
        ref = worker.ref
        assert ref is not None
        for verdict in self.bounds.verdicts:
            ended = worker._replace(phase="ends", verdict=verdict, begun=True)
            yield Move(f"{{me}}'s handler ends: {_ENDS[verdict]}", shared, ended, helps=verdict == "done")
        answer = self.store.extend(shared, ref)
        if answer.word == "accepted":
            kept = worker._replace(loose=self._overtaken(worker, "extend"))
            yield Move("{me} extends its lease", answer.shared, kept, broken=answer.broken)
        else:
            yield Move("{me} is refused to extend: its handler is cancelled", shared, self._again(worker),
                       broken=answer.broken)  # fmt: skip
        if self._may_stray(shared, worker):
            sent = worker._replace(loose=Loose("extend", ref=ref))
            yield Move("{me} asks to extend its lease; that is delayed", _astray(shared, 1), sent)

    # --- settle

    def _ends(self, shared: Shared, worker: Worker) -> Iterator[Move]:
        ref = worker.ref
        assert ref is not None
        answer = self.store.settle(shared, ref, worker.verdict, worker.begun)
        told = f"the store carries out {{me}}'s outcome ({worker.verdict}): {answer.word}"
        effect, goal = answer.effect, answer.word == "accepted"
        yield Move(told, answer.shared, self._again(worker, effect), effect, True, goal, answer.broken)
        if self._may_stray(shared, worker):
            unsure = Worker("unsure", loose=_loose_after(effect, worker.loose, self.rules))
            if not self.rules.journal:
                unsure = unsure._replace(
                    ref=_ref_after(effect, ref), verdict=worker.verdict, accepted=answer.word == "accepted"
                )
            yield Move(f"{told}, and the answer is lost", answer.shared, unsure, effect, broken=answer.broken)

    def _unsure(self, shared: Shared, worker: Worker) -> Iterator[Move]:
        if worker.ref is None:
            yield Move("{me} sends its outcome again, and is answered as before", shared, self._again(worker),
                       helps=True)  # fmt: skip
            return
        answer = self.store.settle(shared, worker.ref, worker.verdict, True)
        broken = _TWICE if answer.effect.touched else ""
        if not broken and (answer.word == "accepted") is not worker.accepted:
            broken = _TWO_ANSWERS
        yield Move(f"{{me}} sends its outcome again: {answer.word}", answer.shared,
                   self._again(worker, answer.effect), answer.effect, True, broken=broken)  # fmt: skip

    # --- what goes wrong

    def _crash(self, shared: Shared, worker: Worker) -> Iterator[Move]:
        left = worker.loose
        if left is not None and left is not SPENT and not left.done and not left.old:
            left = left._replace(mine=False)
        born = fresh_worker(self.rules, self.bounds, left)
        if born != worker:
            yield Move("{me} is killed, and started again", shared, born)
        if self._may_stray(shared, worker):
            request = None
            if worker.phase == "sent":
                request = Loose("lease", mine=False)
            elif worker.phase == "ends" and worker.verdict:
                request = Loose("settle", ref=worker.ref, mine=False, verdict=worker.verdict)
            if request is not None:
                yield Move("{me} is killed, and started again; what it had sent is still on its way",
                           _astray(shared, 1), born._replace(loose=request))  # fmt: skip

    def _astray(self, shared: Shared, worker: Worker, loose: Loose) -> Iterator[Move]:
        bare = worker._replace(loose=None)
        calm = _astray(shared, -1)
        yield Move(f"a delayed {loose.what} of {{me}} never arrives", calm, bare)
        if loose == SPENT:
            return
        if loose.what == "lease":
            answer = self.store.lease(calm, 0)
        elif loose.what == "extend":
            assert loose.ref is not None
            answer = self.store.extend(calm, loose.ref)
        else:
            assert loose.ref is not None
            answer = self.store.settle(calm, loose.ref, loose.verdict, True)
        broken = answer.broken
        if not broken and answer.effect.touched and (loose.done or loose.old):
            broken = _TWICE if loose.done else _OLD
        yield Move(f"a delayed {loose.what} of {{me}} arrives: {_said(answer)}", answer.shared,
                   seen_by(answer.effect, bare, self.rules), answer.effect, broken=broken)  # fmt: skip


def _astray(shared: Shared, more: int) -> Shared:
    return shared._replace(loose=shared.loose + more)


def _plain(ref: Ref) -> Ref:
    """What counts of it from where the handler begins."""
    return ref._replace(newest_life=True, called_off=False, early=0, left=0)


def _for(alarm: int | None) -> str:
    return ", with no alarm" if alarm is None else f" for {alarm}"


def _said(answer: Answer) -> str:
    if answer.ref is not None:
        return "the task is leased"
    if answer.word == "nothing":
        return "nothing waits" if answer.next_wake is None else f"nothing is due before +{answer.next_wake}"
    return answer.word
