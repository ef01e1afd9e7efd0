"""The parts of a model state, the model's parameters, and its store: one table, and the effect of each request.

The table is written from the promises and not from `core.lifecycle`; a test compares the two. The parameters are bounds
and deliberate defects.

Times are instants from now and stay at 0 once they have passed, so the number of states is finite although time goes on
without end. A token is 1 (the newest) or 0 (any older one); a new one is 2 until all are renumbered. Likewise a life is
the key's newest or an older one. Docstrings that begin with "Truly" describe the model's own knowledge, which neither
store nor worker can see; the invariants are checked against it.
"""

from __future__ import annotations

from typing import NamedTuple

WAITING, LEASED, DONE, CANCELLED, DEAD = "waiting", "leased", "done", "cancelled", "dead"
ABSENT = "absent"
LIVE = (WAITING, LEASED)


class Body(NamedTuple):
    """A task as the store has it."""

    state: str
    wake: int
    """The wake time; for an ended task, the end of its retention."""
    token: int


class Shared(NamedTuple):
    """The store, and the model's own knowledge about the task."""

    body: Body | None = None
    entry: int | None = None
    """The task's entry in the index by time, which a lease reads."""
    token: int = 0
    """The last token that was given."""
    owed: bool = False
    """Truly: a life was acknowledged, and has neither ended by a settle nor been cancelled."""
    loose: int = 0
    """The number of stray messages: see `Loose`."""

    @property
    def state(self) -> str:
        return ABSENT if self.body is None else self.body.state

    @property
    def live(self) -> bool:
        return self.body is not None and self.body.state in LIVE


class Ref(NamedTuple):
    """A lease, as its holder knows it."""

    token: int
    fresh: bool
    """Truly: the task has not changed since the lease was given."""
    newest_life: bool
    """Truly: the lease is of the key's current life."""
    called_off: bool = False
    """Truly: this life was cancelled, and the answer was `cancelled`."""
    early: int = 0
    """Truly: the time left until the wake time for which it was leased."""
    left: int = 0
    """The remaining time of the lease, as the holder believes."""


class Loose(NamedTuple):
    """A stray request: delayed, or a copy of one that was sent twice. It arrives at any time, or never."""

    what: str
    """`lease`, `settle`, `extend`, or a client's verb."""
    delay: int = 0
    ref: Ref | None = None
    done: bool = False
    """Another copy of it was carried out."""
    old: bool = False
    """A newer call of the same caller was carried out."""
    mine: bool = True
    """Its caller is still alive, so the caller's next call is newer."""
    verdict: str = ""
    """The outcome, for a settle."""
    awaited: bool = False
    """Its caller has no answer yet, waits for it, and will send it again."""


SPENT = Loose("request")
"""A request that has no effect whenever it arrives: its caller sent a newer one, or its token is no longer valid."""
AWAITED = Loose("verb", done=True, awaited=True)
"""A request that was carried out. Sent again, it is answered from the journal and has no effect."""


class Worker(NamedTuple):
    """One worker. Its phases: `sent` (the request for a lease is in transit), `told` (the answer is in transit),
    `asleep`, `has` (it has a lease, and the handler has not begun), `runs`, `ends` (the outcome is in transit),
    `unsure` (the outcome was carried out, and the answer was lost)."""

    phase: str = "sent"
    at: int | None = None
    """sent: the length of the lease; told: the next wake; asleep: the alarm. None: never."""
    rest: int = 0
    """sent, told: the longest that it may sleep after the answer."""
    ref: Ref | None = None
    verdict: str = ""
    begun: bool = False
    accepted: bool = False
    wake_up: int | None = None
    """The earliest wake time among its notifications, received or in transit."""
    lost: bool = False
    """Truly: a notification for it was lost since it last discarded its notifications."""
    deaf: bool = False
    """It has not subscribed yet."""
    loose: Loose | None = None


class Client(NamedTuple):
    """One client."""

    left: int
    """The number of verbs that it may still send."""
    loose: Loose | None = None
    adding: int | None = None
    """It has removed the task and will add it again with this delay (a defect: see `Rules.move_in_two_steps`)."""


class Effect(NamedTuple):
    """The effect of a step on the actors that did not take it."""

    touched: bool = False
    """The task made a transition: no earlier lease is fresh any more."""
    raised: bool = False
    """The task has a new token."""
    born: bool = False
    """A new life began."""
    called_off: bool = False
    """`cancelled` was answered."""
    wake_up: int | None = None
    """The published wake time."""
    tick: bool = False
    """An instant has passed."""


NOTHING = Effect()
TICK = Effect(tick=True)


class Verb(NamedTuple):
    """A verb of a client."""

    name: str
    delay: int = 0

    def __str__(self) -> str:
        if self.name == "cancel":
            return "cancel"
        if self.name == "move" and self.delay == 0:
            return "fire now"
        return f"{self.name} to +{self.delay}"


VERBS = (Verb("schedule replace", 1), Verb("move", 2), Verb("move", 0), Verb("cancel"))
MORE_VERBS = (
    Verb("schedule keep", 1), Verb("schedule earliest", 1), Verb("schedule latest", 2), Verb("schedule refuse", 1),
    Verb("redrive", 1), *VERBS,
)  # fmt: skip


class Bounds(NamedTuple):
    """The size of the model. Lengths are in instants."""

    verbs: tuple[int, ...] = (3, 3)
    """The number of verbs that each client may send."""
    may: tuple[Verb, ...] = VERBS
    lease: int = 2
    cap: int = 2
    retry: int = 1
    verdicts: tuple[str, ...] = ("done", "retry")
    loose: int = 1
    """The most stray requests at once."""
    keep: int = 0
    """The retention of an ended task."""
    crashes: bool = True

    @property
    def latest(self) -> int:
        """The most that a delivery may be late when every notification is lost: the longest sleep; or one lease, if the
        request for it was in transit for so long that its holder must not begin."""
        return max(self.cap, self.lease)


class Rules(NamedTuple):
    """The mechanisms that bide relies on. The model is also run without each, to show what breaks without it.

    Fields that are false by default are defects.
    """

    checks_token: bool = True
    """Settle is refused without the token of the live lease."""
    extend_checks_token: bool = True
    lease_raises_token: bool = True
    """A lease gives a new token even if the last lease expired."""
    replace_raises_token: bool = True
    tokens_outlive: bool = True
    """The counter stays when the task is gone: a new life of the key gets a higher one."""
    new_life_new_id: bool = True
    leases_what_was_lost: bool = True
    """A task whose lease has expired is due like any other."""
    cancel_knows_leased: bool = True
    move_spares_leased: bool = True
    journal: bool = True
    """A request that is sent twice is carried out once, and gets the same answer again."""
    numbers_rise: bool = True
    """A request that is older than its caller's last one is refused."""
    subscribes_first: bool = True
    forgets_before: bool = True
    """A worker discards its notifications before it sends the lease request, and not when the answer arrives."""
    capped: bool = True
    caps_from_sending: bool = True
    """The longest sleep counts from when the lease request was sent: later wake times are not published."""
    tells_of_retry: bool = True
    next_wake_of_leased: bool = True
    looks_before_it_begins: bool = True
    """Before a handler begins, its worker checks that the lease has not expired."""
    counts_from_sending: bool = True
    """A holder counts its lease from its request, not from the answer."""
    leases_early: bool = False
    settles_before_it_begins: bool = False
    move_in_two_steps: bool = False
    index_left_behind: bool = False
    purges_what_waits: bool = False


_STATES = (ABSENT, WAITING, LEASED, DONE, CANCELLED, DEAD)


def _row(*cells: str) -> dict[str, tuple[str, str]]:
    """One row of the table. Each cell, in the order of `_STATES`, is the answer, with the new state after a colon."""
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
"""The answer to every verb of a client in every state."""
SETTLED = {"done": DONE, "dead": DEAD, "retry": WAITING, "defer": WAITING}
"""The state after an accepted outcome."""
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
    """A step that an actor or the store can take."""

    told: str
    """The step in words. `{me}` stands for the actor."""
    after: Answer
    """The store afterwards."""
    part: Worker | Client | None
    """The actor afterwards; None: the store itself."""
    helps: bool = False
    """True if it is possible without a further failure: see `explore`."""
    goal: bool = False
    """A delivery by the live lease begins, or the task ends."""
    broken: str = ""
    """The invariant that it breaks, unless the answer names it."""


class Store:
    """The store under these rules."""

    def __init__(self, rules: Rules, bounds: Bounds) -> None:
        self.rules = rules
        self.bounds = bounds

    def ask(self, shared: Shared, verb: Verb) -> Answer:
        """Carry out a client's verb, in one step."""
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
        """Carry out a request for a lease; its sender will believe that `left` instants of the lease remain."""
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
        """Extend the lease `ref` to its full length from now."""
        body = self._held(shared, ref, self.rules.extend_checks_token)
        broken = _stale("extend", body is not None, ref, shared)
        if body is None:
            return Answer("refused", shared, broken=broken)
        lease = self.bounds.lease
        return Answer("accepted", shared._replace(body=body._replace(wake=lease), entry=lease), broken=broken)

    def settle(self, shared: Shared, ref: Ref, verdict: str, begun: bool) -> Answer:
        """Settle the lease `ref`."""
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
        """Forget an ended task whose retention is over; None: there is none."""
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
        """Bring the task into a state, with a new time. `owed`: the value of `Shared.owed` from now on."""
        rules, last = self.rules, shared.token
        token = last + 1 if raises else last
        if anew and not rules.tokens_outlive:
            token = 1
        broken = ""
        if token < last or (raises and token == last):
            broken = "P12: the token did not rise from one life of the key to the next"
        raised = token > 1
        if raised:
            token = 1  # all other tokens are renumbered
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
        """The published wake time; None at or past the cap, since no worker sleeps longer."""
        return wake if wake < self.bounds.cap else None


def _stale(verb: str, accepted: bool, ref: Ref, shared: Shared) -> str:
    if accepted and not ref.fresh:
        return f"P3: {verb} was accepted from a lease that was over"
    if not accepted and ref.fresh and shared.live:
        return f"P3: {verb} was refused to the holder of the live lease"
    return ""
