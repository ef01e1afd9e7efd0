"""The workers and clients of the model: each step that they, or their stray requests, can take next.

A worker's loop is that of `engine.worker`: *subscribe first, then lease; the answer to the lease request determines the
sleep; notifications received since the request was sent count, and only ever shorten the sleep; every sleep is capped.*
A worker has one slot, so it asks for no task while it runs a handler. A client makes one call at a time; a call that it
gave up may still arrive.
"""

from __future__ import annotations

from collections.abc import Iterator

from bide_proofs.model.store import (
    AWAITED,
    NOTHING,
    SPENT,
    Answer,
    Bounds,
    Client,
    Effect,
    Loose,
    Ref,
    Rules,
    Shared,
    Step,
    Store,
    Verb,
    Worker,
)

_TWICE = "P5: a request that was sent twice was carried out twice"
_TWO_ANSWERS = "P5: a request that was sent twice had two answers"
_OLD = "P5: a request was carried out after a newer one of the same caller"
_ENDS = {"done": "it is done", "dead": "it is dead", "retry": "it failed, and shall be tried again", "defer": "not now"}


class _Actor:
    """The common part of workers and clients: a store, and stray requests."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.rules = store.rules
        self.bounds = store.bounds

    def _may_stray(self, shared: Shared, part: Worker | Client) -> bool:
        return part.loose is None and shared.loose < self.bounds.loose

    def _overtaken(self, loose: Loose | None, kind: str) -> Loose | None:
        """The stray request after a newer call of this kind was carried out: an older one must not follow it."""
        if loose is None or loose.done or not loose.mine or _kind(loose.what) != _kind(kind):
            return loose
        return SPENT if self.rules.numbers_rise else loose._replace(old=True)


def _kind(what: str) -> str:
    """The kind of a request. Each kind has its own caller; schedules and changes are two kinds, as on Redis."""
    if what in ("lease", "settle", "extend"):
        return what
    return "schedule" if what.startswith("schedule") else "change"


def _stray(shared: Shared, more: int = 1) -> Answer:
    """Count `more` stray requests; the store does nothing yet."""
    return Answer("", shared._replace(loose=shared.loose + more))


# --- clients


class Asking(_Actor):
    """The steps of a client."""

    def steps(self, shared: Shared, client: Client) -> Iterator[Step]:
        """All possible next steps of this client and its stray request."""
        if client.adding is not None:
            put = self.store.ask(shared, Verb("schedule replace", client.adding))
            yield Step("{me}'s move, second half: the task is put back", put, client._replace(adding=None), helps=True)
            return
        if client.loose is not None:
            yield from self._astray(shared, client, client.loose)
            if client.loose.awaited:
                return  # it waits for this answer
        if client.left:
            for verb in self.bounds.may:
                yield from self._asks(shared, client, verb)

    def _asks(self, shared: Shared, client: Client, verb: Verb) -> Iterator[Step]:
        less = client._replace(left=client.left - 1)
        if verb.name == "move" and self.rules.move_in_two_steps and shared.state == "waiting":
            taken = Answer("", shared._replace(body=None, entry=None))
            yield Step("{me}'s move, first half: the task is taken out", taken, less._replace(adding=verb.delay))
            return
        answer = self.store.ask(shared, verb)
        if answer.word in ("not_found", "finished") and shared.owed:
            broken = f"P4: {answer.word} was answered of a task that was acknowledged and has not ended"
            answer = answer._replace(broken=broken)
        told, goal = f"{{me}} asks: {verb}; answer: {answer.word}", answer.word.startswith("cancelled")
        yield Step(told, answer, less._replace(loose=self._overtaken(client.loose, verb.name)), goal=goal)
        if self._may_stray(shared, client):
            unsent = Loose(verb.name, verb.delay)
            gone = answer._replace(shared=answer.shared._replace(loose=shared.loose + 1))
            lost = AWAITED if self.rules.journal else unsent._replace(done=True, awaited=True)
            yield Step(f"{told}, which is lost", gone, less._replace(loose=lost))
            yield Step(f"{{me}} asks: {verb}; it is delayed, and given up", _stray(shared), less._replace(loose=unsent))
            if not self.rules.journal:  # with a journal, a copy changes nothing
                copy = unsent._replace(done=True)
                yield Step(f"{told}; a copy is still on its way", gone, less._replace(loose=copy))

    def _astray(self, shared: Shared, client: Client, loose: Loose) -> Iterator[Step]:
        bare, calm = client._replace(loose=None), _stray(shared, -1)
        if loose == AWAITED:
            yield Step("{me} sends its verb again, and is answered as before", calm, bare)
            return
        verb = Verb(loose.what, loose.delay)
        if not loose.awaited:
            yield Step(f"a delayed {verb} of {{me}} never arrives", calm, bare)
        if loose != SPENT:
            answer = self.store.ask(calm.shared, verb)
            wrong = _TWICE if loose.done else _OLD if loose.old else ""
            told = f"a delayed {verb} of {{me}} arrives: {answer.word}"
            if loose.awaited:
                told = f"{{me}} sends its {verb} again; answer: {answer.word}"
            yield Step(told, answer, bare, broken=wrong if answer.effect.touched else "")


# --- workers


def fresh_worker(rules: Rules, bounds: Bounds, loose: Loose | None = None) -> Worker:
    """A worker that has just started: it has subscribed, and its first request for a lease is in transit."""
    return Worker("sent", bounds.lease, rest=_rest(rules, bounds), deaf=not rules.subscribes_first, loose=loose)


def _rest(rules: Rules, bounds: Bounds) -> int:
    return bounds.cap if rules.caps_from_sending else 0


def seen_by(effect: Effect, worker: Worker, rules: Rules) -> Worker:
    """`worker`, after a step of another actor, or an instant later."""
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
        wake_up = _earlier(effect.wake_up, wake_up)
    return worker._replace(ref=ref, loose=loose, at=at, rest=rest, wake_up=wake_up)


def _earlier(one: int, other: int | None) -> int:
    return one if other is None else min(one, other)


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


def _plain(ref: Ref) -> Ref:
    """The part of a lease that matters once the handler begins."""
    return ref._replace(newest_life=True, called_off=False, early=0, left=0)


def _loose_after(effect: Effect, loose: Loose | None, rules: Rules) -> Loose | None:
    """The stray request after a step. One whose token is no longer valid is `SPENT`: it will be refused."""
    if loose is None or loose.ref is None:
        return loose
    ref = _plain(_ref_after(effect, loose.ref))
    checked = rules.checks_token if loose.what == "settle" else rules.extend_checks_token
    if checked and rules.tokens_outlive and not ref.token:
        return SPENT
    return loose._replace(ref=ref)


def wrong_with(shared: Shared, worker: Worker) -> str:
    """The invariant that is broken between the store and this worker; empty if none is."""
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


class Working(_Actor):
    """The steps of a worker."""

    def steps(self, shared: Shared, worker: Worker) -> Iterator[Step]:
        """All possible next steps of this worker and its stray request."""
        if worker.loose is not None:
            yield from self._astray(shared, worker, worker.loose)
        if worker.wake_up is not None:
            forgot = worker._replace(wake_up=None, lost=True)
            yield Step("a wake-up for {me} is lost", Answer("", shared), forgot)
        in_phase = {
            "sent": self._sent, "told": self._told, "asleep": self._asleep, "has": self._has, "runs": self._runs,
            "ends": self._ends, "unsure": self._unsure,
        }  # fmt: skip
        yield from in_phase[worker.phase](shared, worker)
        if self.bounds.crashes:
            yield from self._crash(shared, worker)

    def _again(self, worker: Worker, effect: Effect = NOTHING) -> Worker:
        """Send the next request for a lease and discard notifications. `effect` is that of the worker's last step."""
        loose = _loose_after(effect, worker.loose, self.rules)
        return Worker("sent", self.bounds.lease, rest=_rest(self.rules, self.bounds), loose=loose)

    def _sent(self, shared: Shared, worker: Worker) -> Iterator[Step]:
        assert worker.at is not None
        answer = self.store.lease(shared, worker.at)
        loose = _loose_after(answer.effect, self._overtaken(worker.loose, "lease"), self.rules)
        told = worker._replace(phase="told", at=answer.next_wake, ref=answer.ref, loose=loose)
        if answer.ref is not None:
            told = told._replace(at=None, rest=0, wake_up=None, lost=False)
        yield Step(f"the store carries out {{me}}'s lease: {_said(answer)}", answer, told, helps=True)
        if self._may_stray(shared, worker) and not worker.deaf:
            given_up = self._again(worker)._replace(loose=Loose("lease"))
            yield Step("{me}'s lease is delayed; it gives up, and sends another", _stray(shared), given_up)

    def _told(self, shared: Shared, worker: Worker) -> Iterator[Step]:
        rules, same = self.rules, Answer("", shared)
        if not rules.journal:  # with a journal, a copy changes nothing, and the second answer equals the first
            second = self.store.lease(shared, self.bounds.lease)
            loose = _loose_after(second.effect, worker.loose, rules)
            twice = worker._replace(at=second.next_wake, ref=second.ref, loose=loose)
            broken = _TWICE if second.effect.touched else _TWO_ANSWERS if worker.ref is not None else ""
            told = f"the answer to {{me}} is lost; the lease is sent again, and done again: {_said(second)}"
            yield Step(told, second, twice, broken=broken)
        if worker.ref is not None:
            left = worker.ref.left if rules.counts_from_sending else self.bounds.lease
            has = Worker("has", ref=worker.ref._replace(left=left), loose=worker.loose)
            yield Step("{me} hears that it has the lease", same, has, helps=True)
            return
        cap = worker.rest if rules.caps_from_sending else self.bounds.cap
        alarm = _earlier(cap, worker.at) if rules.capped or worker.at is not None else None
        asleep = worker._replace(phase="asleep", at=alarm, rest=0, deaf=False)
        told = f"{{me}} hears that nothing is due, and sleeps{_for(alarm)}"
        if worker.wake_up is None:
            yield Step(told, same, asleep, helps=True)
            return
        yield Step(f"{told}; a wake-up is still on its way", same, asleep, helps=True)
        if rules.forgets_before:
            alarm = _earlier(worker.wake_up, alarm)
            told = f"{{me}} hears that nothing is due, has heard of a wake meanwhile, and sleeps{_for(alarm)}"
        yield Step(told, same, asleep._replace(at=alarm, wake_up=None))

    def _asleep(self, shared: Shared, worker: Worker) -> Iterator[Step]:
        early, same = "" if worker.at == 0 else " early", Answer("", shared)
        told = f"{{me}}'s alarm rings{early}; it asks for a lease"
        yield Step(told, same, self._again(worker), helps=not early)
        if worker.wake_up is not None:
            alarm = _earlier(worker.wake_up, worker.at)
            told = f"a wake-up reaches {{me}}: it sleeps{_for(alarm)}"
            yield Step(told, same, worker._replace(at=alarm, wake_up=None))

    def _has(self, shared: Shared, worker: Worker) -> Iterator[Step]:
        ref, same = worker.ref, Answer("", shared)
        assert ref is not None
        if ref.left <= 0 and self.rules.looks_before_it_begins:
            told = "{me}'s lease has ended before its handler began: it is let go"
            yield Step(told, same, self._again(worker), helps=True)
            return
        broken = ""
        if ref.early > 0:
            broken = "P1: a delivery began before the wake that it was leased for"
        elif ref.called_off:
            broken = "P4: a delivery began after `cancelled` was answered"
        running = worker._replace(phase="runs", ref=_plain(ref))
        yield Step("{me}'s handler begins", same, running, helps=True, goal=ref.fresh, broken=broken)
        kept = self.store.extend(shared, ref)
        told, then = "{me} is refused to extend: its handler does not begin", self._again(worker)
        if kept.word == "accepted":
            told = "{me} extends its lease before its handler began"
            loose = self._overtaken(worker.loose, "extend")
            then = worker._replace(ref=ref._replace(left=self.bounds.lease), loose=loose)
        yield Step(told, kept, then)
        back = running._replace(phase="ends", verdict="defer")
        yield Step("{me} stops, and gives the task back unstarted", same, back)
        if self.rules.settles_before_it_begins:
            yield Step("{me} sends that it is done, and only then begins", same, back._replace(verdict="done"))

    def _runs(self, shared: Shared, worker: Worker) -> Iterator[Step]:
        ref = worker.ref
        assert ref is not None
        for verdict in self.bounds.verdicts:
            ended = worker._replace(phase="ends", verdict=verdict, begun=True)
            yield Step(f"{{me}}'s handler ends: {_ENDS[verdict]}", Answer("", shared), ended, helps=verdict == "done")
        answer = self.store.extend(shared, ref)
        told, then = "{me} is refused to extend: its handler is cancelled", self._again(worker)
        if answer.word == "accepted":
            told, then = "{me} extends its lease", worker._replace(loose=self._overtaken(worker.loose, "extend"))
        yield Step(told, answer, then)
        if self._may_stray(shared, worker):
            sent = worker._replace(loose=Loose("extend", ref=ref))
            yield Step("{me} asks to extend its lease; that is delayed", _stray(shared), sent)

    def _ends(self, shared: Shared, worker: Worker) -> Iterator[Step]:
        ref = worker.ref
        assert ref is not None
        answer = self.store.settle(shared, ref, worker.verdict, worker.begun)
        told = f"the store carries out {{me}}'s outcome ({worker.verdict}): {answer.word}"
        effect, accepted = answer.effect, answer.word == "accepted"
        yield Step(told, answer, self._again(worker, effect), helps=True, goal=accepted)
        if self._may_stray(shared, worker):
            unsure = Worker("unsure", loose=_loose_after(effect, worker.loose, self.rules))
            if not self.rules.journal:
                unsure = unsure._replace(ref=_ref_after(effect, ref), verdict=worker.verdict, accepted=accepted)
            yield Step(f"{told}, and the answer is lost", answer, unsure)

    def _unsure(self, shared: Shared, worker: Worker) -> Iterator[Step]:
        if worker.ref is None:
            told = "{me} sends its outcome again, and is answered as before"
            yield Step(told, Answer("", shared), self._again(worker), helps=True)
            return
        answer = self.store.settle(shared, worker.ref, worker.verdict, True)
        broken = _TWICE if answer.effect.touched else ""
        if not broken and (answer.word == "accepted") is not worker.accepted:
            broken = _TWO_ANSWERS
        then = self._again(worker, answer.effect)
        yield Step(f"{{me}} sends its outcome again: {answer.word}", answer, then, helps=True, broken=broken)

    # --- faults

    def _crash(self, shared: Shared, worker: Worker) -> Iterator[Step]:
        left = worker.loose
        if left is not None and left is not SPENT and not left.done and not left.old:
            left = left._replace(mine=False)
        born = fresh_worker(self.rules, self.bounds, left)
        if born != worker:
            yield Step("{me} is killed, and started again", Answer("", shared), born)
        request = None
        if worker.phase == "sent":
            request = Loose("lease", mine=False)
        elif worker.phase == "ends" and worker.verdict:
            request = Loose("settle", ref=worker.ref, mine=False, verdict=worker.verdict)
        if request is not None and self._may_stray(shared, worker):
            told = "{me} is killed, and started again; what it had sent is still on its way"
            yield Step(told, _stray(shared), born._replace(loose=request))

    def _astray(self, shared: Shared, worker: Worker, loose: Loose) -> Iterator[Step]:
        bare, calm = worker._replace(loose=None), _stray(shared, -1)
        yield Step(f"a delayed {loose.what} of {{me}} never arrives", calm, bare)
        if loose == SPENT:
            return
        if loose.ref is None:
            answer = self.store.lease(calm.shared, 0)
        elif loose.what == "extend":
            answer = self.store.extend(calm.shared, loose.ref)
        else:
            answer = self.store.settle(calm.shared, loose.ref, loose.verdict, True)
        broken = answer.broken
        if not broken and answer.effect.touched and (loose.done or loose.old):
            broken = _TWICE if loose.done else _OLD
        then = seen_by(answer.effect, bare, self.rules)
        yield Step(f"a delayed {loose.what} of {{me}} arrives: {_said(answer)}", answer, then, broken=broken)


def _for(alarm: int | None) -> str:
    return ", with no alarm" if alarm is None else f" for {alarm}"


def _said(answer: Answer) -> str:
    if answer.ref is not None:
        return "the task is leased"
    if answer.word == "nothing":
        return "nothing waits" if answer.next_wake is None else f"nothing is due before +{answer.next_wake}"
    return answer.word
