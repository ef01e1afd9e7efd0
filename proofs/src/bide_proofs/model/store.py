"""The store of the model: one table, and what each request does to the one task.

Written from the promises and not from `core.lifecycle`; a test holds the two tables against each other.
"""

from __future__ import annotations

from typing import NamedTuple

from bide_proofs.model.records import (
    ABSENT,
    CANCELLED,
    DEAD,
    DONE,
    LEASED,
    NOTHING,
    WAITING,
    Body,
    Bounds,
    Client,
    Effect,
    Ref,
    Rules,
    Shared,
    Verb,
    Worker,
)

_STATES = (ABSENT, WAITING, LEASED, DONE, CANCELLED, DEAD)


def _row(*cells: str) -> dict[str, tuple[str, str]]:
    """For each state, in the order above: the answer, and after a colon the state that it leads to, if another."""
    row = {}
    for state, cell in zip(_STATES, cells, strict=True):
        word, _, to = cell.partition(":")
        row[state] = (word, to or state)
    return row


_GONE = ("finished", "finished", "finished")
WORDS = {
    "schedule replace": _row("created:waiting", *["replaced:waiting"] * 5),
    "schedule keep": _row("created:waiting", "kept", "kept", "kept", "replaced:waiting", "replaced:waiting"),
    "schedule earliest": _row("created:waiting", "replaced:waiting", "kept", *["replaced:waiting"] * 3),
    "schedule latest": _row("created:waiting", *["replaced:waiting"] * 5),
    "schedule refuse": _row("created:waiting", "refused", "refused", "refused", "replaced:waiting", "replaced:waiting"),
    "move": _row("not_found", "moved", "under_way", *_GONE),
    "cancel": _row("not_found", "cancelled:cancelled", "cancelled_while_leased:cancelled", *_GONE),
    "redrive": _row("not_found", "under_way", "under_way", "finished", "finished", "redriven:waiting"),
}
"""The answer of every verb of a client in every state."""
SETTLED = {"done": DONE, "dead": DEAD, "retry": WAITING, "defer": WAITING}
"""Where an accepted outcome leads to."""
_BIRTHS = ("created", "replaced", "redriven")


class Answer(NamedTuple):
    """The effect of a request, and its answer."""

    word: str
    shared: Shared
    effect: Effect = NOTHING
    broken: str = ""
    ref: Ref | None = None
    next_wake: int | None = None


class Step(NamedTuple):
    """A step that somebody can take."""

    told: str
    """In words. `{me}` stands for the actor."""
    after: Answer
    """The store afterwards."""
    part: Worker | Client | None
    """The actor afterwards; None: the store itself."""
    helps: bool = False
    """True if it is taken when nothing goes wrong any more: see `explore`."""
    goal: bool = False
    """A delivery by the live lease begins, or the task ends."""
    broken: str = ""
    """The invariant that it breaks, where the answer does not say so."""


class Store:
    """The store under these rules."""

    def __init__(self, rules: Rules, bounds: Bounds) -> None:
        self.rules = rules
        self.bounds = bounds

    def ask(self, shared: Shared, verb: Verb) -> Answer:
        """A client's verb, in one step."""
        rules, state, body = self.rules, shared.state, shared.body
        word, to = WORDS[verb.name][state]
        if state == WAITING and body is not None:
            earliest, latest = verb.name == "schedule earliest", verb.name == "schedule latest"
            if (earliest and verb.delay >= body.wake) or (latest and verb.delay <= body.wake):
                word = "kept"
        if word == "cancelled_while_leased" and not rules.cancel_knows_leased:
            word = "cancelled"
        elif word == "under_way" and verb.name == "move" and not rules.move_spares_leased:
            assert body is not None
            moved = shared._replace(body=Body(WAITING, verb.delay, body.token), entry=verb.delay)
            return Answer("moved", moved, Effect(wake_up=self._published(verb.delay)))
        if word in _BIRTHS:
            anew = word == "created"
            raises = anew or rules.replace_raises_token
            return self._now(shared, word, WAITING, verb.delay, raises=raises, born=True, anew=anew, owed=True)
        if word == "moved":
            return self._now(shared, word, WAITING, verb.delay)
        if word in ("cancelled", "cancelled_while_leased"):
            return self._now(shared, word, to, 0, called_off=word == "cancelled", owed=False)
        return Answer(word, shared)

    def lease(self, shared: Shared, left: int) -> Answer:
        """A request for a lease that its sender will believe to last for another `left`."""
        rules, body, entry = self.rules, shared.body, shared.entry
        due = entry is not None and entry <= (1 if rules.leases_early else 0)
        if body is not None and due and (body.state == WAITING or rules.leases_what_was_lost):
            assert entry is not None
            raises = body.state == WAITING or rules.lease_raises_token
            answer = self._now(shared, "granted", LEASED, self.bounds.lease, raises=raises, quiet=True)
            assert answer.shared.body is not None
            return answer._replace(ref=Ref(answer.shared.body.token, True, True, False, entry, left))
        seen = shared.live and (shared.state == WAITING or rules.next_wake_of_leased)
        return Answer("nothing", shared, next_wake=entry if seen else None)

    def extend(self, shared: Shared, ref: Ref) -> Answer:
        """The lease `ref` shall last longer, by a whole one from now."""
        body = self._held(shared, ref, self.rules.extend_checks_token)
        broken = _stale("extend", body is not None, ref, shared)
        if body is None:
            return Answer("refused", shared, broken=broken)
        lease = self.bounds.lease
        return Answer("accepted", shared._replace(body=body._replace(wake=lease), entry=lease), broken=broken)

    def settle(self, shared: Shared, ref: Ref, verdict: str, begun: bool) -> Answer:
        """The outcome of the lease `ref`."""
        body = self._held(shared, ref, self.rules.checks_token)
        broken = _stale("settle", body is not None, ref, shared)
        if body is None:
            return Answer("refused", shared, broken=broken)
        if not begun and verdict != "defer":
            broken = broken or "P2: a task was settled that no handler had begun"
        to = SETTLED[verdict]
        wake = self.bounds.retry if verdict == "retry" else 0
        owed = None if to == WAITING or not ref.fresh else False
        quiet = not self.rules.tells_of_retry
        return self._now(shared, "accepted", to, wake, owed=owed, quiet=quiet)._replace(broken=broken)

    @staticmethod
    def _held(shared: Shared, ref: Ref, checks: bool) -> Body | None:
        """The task, if this lease may change it."""
        body = shared.body
        return body if body and body.state == LEASED and (body.token == ref.token or not checks) else None

    def purge(self, shared: Shared) -> Shared | None:
        """Forget tasks that ended and were kept for their time; None: there are none."""
        body = shared.body
        if body is None or body.wake > 0:
            return None
        if body.state in (WAITING, LEASED):
            return shared._replace(body=None, entry=None) if self.rules.purges_what_waits else None
        return shared._replace(body=None)

    def _now(
        self, shared: Shared, word: str, to: str, wake: int, *, raises: bool = True, born: bool = False,
        anew: bool = False, called_off: bool = False, owed: bool | None = None, quiet: bool = False,
    ) -> Answer:  # fmt: skip
        """The task goes to another state, or to the same at another time. `owed`: what truly holds from now on."""
        rules, last = self.rules, shared.token
        token = last + 1 if raises else last
        if anew and not rules.tokens_outlive:
            token = 1
        broken = ""
        if token < last or (raises and token == last):
            broken = "P12: the token did not rise from one life of the key to the next"
        raised = token > 1
        if raised:
            token = 1  # and everybody else's is counted down
        body: Body | None = Body(to, wake, token)
        entry: int | None = wake
        lives = to in (WAITING, LEASED)
        if not lives:
            body = Body(to, self.bounds.keep, token) if self.bounds.keep else None
            entry = shared.entry if rules.index_left_behind else None
        new = Shared(body, entry, token, shared.owed if owed is None else owed, shared.loose)
        wake_up = self._published(wake) if lives and not quiet else None
        return Answer(word, new, Effect(True, raised, born and rules.new_life_new_id, called_off, wake_up), broken)

    def _published(self, wake: int) -> int | None:
        """The wake that others are told of: nobody sleeps past the cap."""
        return wake if wake < self.bounds.cap else None


def _stale(verb: str, accepted: bool, ref: Ref, shared: Shared) -> str:
    if accepted and not ref.fresh:
        return f"P3: {verb} was accepted from a lease that was over"
    if not accepted and ref.fresh and shared.live:
        return f"P3: {verb} was refused to the holder of the live lease"
    return ""
