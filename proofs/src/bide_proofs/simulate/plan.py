"""The plan of a simulation, drawn from its seed before it begins: all calls and all faults, with their times.

A plan is data: it can be saved, reduced to the few steps that matter, and played again.
"""

from __future__ import annotations

from random import Random
from typing import TypeAlias

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from bide.core.instants import Millis
from bide_proofs.misuse import WAYS

TOPICS = ("work", "flaky", "slow", "beat")
"""Topics with a handler in every worker; `slow` has room for one delivery at a time."""
ALONE = "slow"
UNHANDLED = "orphan"
"""A topic that no worker handles until the end."""
MINUTE: Millis = 60_000
_CALM = 0.75
"""The fraction of the time after which nothing breaks any more."""
_DEAF = 0.25
"""The fraction of plans in whose calm no notification arrives: this may only cost the longest sleep."""
_LAST_ASK = 0.88
"""The fraction of the time after which no client makes a call."""


class Setup(Struct, frozen=True):
    """The parts of the simulated world."""

    by_caller: bool
    """True: the store uses its callers' clocks, like one in a file; False: its own."""
    parted: bool
    shards: int
    clients: int
    workers: int
    lease: Millis
    cap: Millis
    skews: list[float]
    """Seconds by which the processes' clocks are wrong, in turn."""
    drift: float
    """The fraction by which the server's clock is too fast."""
    length: Millis
    calm: Millis
    """The time at which the last fault is repaired."""


class Ask(Struct, frozen=True, tag="ask", omit_defaults=True):
    """A client makes a call. `keys` has several for the plural verbs."""

    at: Millis
    client: int
    verb: str
    topic: str
    keys: list[str]
    delay: Millis = 0
    conflict: str = "replace"
    group: str | None = None
    does: list[str] = msgspec.field(default_factory=list)
    """The handler's act in each delivery; the last one repeats."""
    deadline: Millis | None = None
    known: bool = False
    """True if the call names the token that this client saw last."""
    patience: Millis | None = None
    """The time after which the waiting caller is cancelled."""


class Kill(Struct, frozen=True, tag="kill", omit_defaults=True):
    """A process dies and is restarted after a while. With `operation`, it dies at its next message of that kind."""

    at: Millis
    who: str
    back: Millis
    operation: str = ""
    moment: str = ""


class Stop(Struct, frozen=True, tag="stop"):
    """A process stands still for a while."""

    at: Millis
    who: str
    lasts: Millis


class Drain(Struct, frozen=True, tag="drain"):
    """A worker is asked to end in order, and is restarted."""

    at: Millis
    who: str
    back: Millis


class Storm(Struct, frozen=True, tag="storm", omit_defaults=True):
    """Messages of a process (of all, if it is "") are late, lost or duplicated for a while.

    `delay` is in seconds; `loss` and `twice` are fractions of one.
    """

    at: Millis
    lasts: Millis
    who: str = ""
    delay: float = 0.0
    loss: float = 0.0
    twice: float = 0.0
    deaf: bool = False


class Down(Struct, frozen=True, tag="down"):
    """A shard's server is away for a while."""

    at: Millis
    lasts: Millis
    shard: int


class Full(Struct, frozen=True, tag="full"):
    """The store has no room for new work for a while."""

    at: Millis
    lasts: Millis


class Jump(Struct, frozen=True, tag="jump"):
    """The store's clock jumps by `by` seconds."""

    at: Millis
    by: float


Step: TypeAlias = Ask | Kill | Stop | Drain | Storm | Down | Full | Jump


class Plan(Struct, frozen=True):
    """A whole plan. The seed still decides the fate of messages and the order of processes."""

    seed: int
    setup: Setup
    steps: list[Step]

    def text(self) -> str:
        return msgspec.json.encode(self).decode()


def room_of(topic: str) -> int:
    """The number of deliveries of a topic that a worker has room for at once."""
    return 1 if topic == ALONE else 20


def plan_from(text: str | bytes) -> Plan:
    """Decode `Plan.text`. Raises msgspec.ValidationError, msgspec.DecodeError."""
    return msgspec.json.decode(text, type=Plan)


def plan_of(seed: int, minutes: float = 6) -> Plan:
    """Draw the plan of this seed."""
    chance = Random(f"plan {seed}")
    length = int(minutes * MINUTE)
    by_caller = chance.random() < 0.2
    setup = Setup(
        by_caller=by_caller,
        parted=chance.random() < 0.3,
        shards=1 if by_caller else chance.choice((1, 2, 2, 3)),
        clients=chance.choice((1, 2, 3)),
        workers=chance.choice((1, 2, 2, 3)),
        lease=chance.choice((1_000, 2_000, 4_000)),
        cap=chance.choice((500, 2_000, 5_000)),
        skews=[0.0] * 5 if by_caller else [chance.choice((0, 0.3, -0.3, 5, -5, 3600, -3600)) for _ in range(5)],
        drift=0.0 if by_caller else chance.uniform(-1e-4, 1e-4),
        length=length,
        calm=int(length * _CALM),
    )
    asks = [_ask(chance, setup, int(length * _LAST_ASK)) for _ in range(int(chance.uniform(20, 50) * minutes))]
    faults = [_fault(chance, setup) for _ in range(int(chance.uniform(0, 7) * minutes))]
    steps: list[Step] = [*(step for some in asks for step in some), *faults, *_misuse(seed, setup, minutes)]
    if chance.random() < _DEAF:
        steps.append(Storm(setup.calm + 1_000, length - setup.calm, deaf=True))
    steps.extend(  # a server is slow before it goes down, so that many messages are in transit then
        Storm(fault.at - 700, 750, delay=chance.choice((0.1, 0.3)))
        for fault in faults
        if isinstance(fault, Down) and chance.random() < 0.5
    )
    return Plan(seed, setup, sorted(steps, key=lambda step: step.at))


_DOES = (
    ["ok"], ["ok"], ["ok"], ["ok:40"], ["ok:900"], ["fail", "ok"], ["fail", "fail", "ok:20"], ["retry:700", "ok"],
    ["defer:1500", "ok"], ["dead"], ["fail", "dead"], ["hang", "ok"], ["long", "ok"], ["again:2500", "ok"],
    ["kill", "ok"],
    ["stubborn", "ok"], ["self:1200", "ok"], ["cancel"], ["next:300", "ok"], ["fail"], ["long"],
)  # fmt: skip
_VERBS = (
    ("schedule", 10), ("many", 2), ("move", 6), ("fire", 4), ("cancel", 4), ("redrive", 2), ("get", 2), ("shift", 1),
    ("cancel_group", 0.5),
)  # fmt: skip
_CONFLICTS = ("replace", "replace", "replace", "keep", "keep", "earliest", "latest", "refuse")


_MISUSED = 0.5
"""The fraction of plans in which callers are cancelled and handlers raise or return anything."""


def _misuse(seed: int, setup: Setup, minutes: float) -> list[Step]:
    """Draw misuse by users, from a separate random generator so that the rest of the plan stays the same."""
    chance = Random(f"misuse {seed}")
    if chance.random() >= _MISUSED:
        return []
    last = int(setup.length * _LAST_ASK)
    steps: list[Step] = []
    for _ in range(int(6 * minutes)):
        at, key = chance.randrange(1_000, last), f"k{chance.randrange(6)}"
        ask = _about(chance, setup, at, chance.choice(TOPICS), key)
        kind = chance.choice(("odd", "odd", "cancelled", "regrouped", "blocking"))
        if kind == "odd":
            does = [f"odd:{chance.randrange(WAYS)}", chance.choice(("ok", f"odd:{chance.randrange(WAYS)}"))]
            steps.append(replace(ask, verb="schedule", keys=[f"{key}o"], does=does, deadline=None))
        elif kind == "blocking":
            steps.append(replace(ask, verb="schedule", keys=[f"{key}b"], does=["block"], deadline=None))
        elif kind == "cancelled":
            steps.append(replace(ask, patience=chance.choice((0, 1, 2, 5, 50, 500))))
        else:
            steps += _regrouped(chance, setup, ask)
    return steps


def _regrouped(chance: Random, setup: Setup, ask: Ask) -> list[Step]:
    """Draw calls that schedule a task of one group into another at about the time of a change of its old group."""
    mine, other = chance.sample(range(3), 2)
    new = replace(ask, verb="schedule", keys=[f"{ask.keys[0]}g"], delay=20_000, conflict="replace", deadline=None)
    verb, by = chance.choice((("shift", 4_000), ("cancel_group", 0)))
    return [
        replace(new, group=f"g{mine}"),
        replace(new, at=ask.at + 500, verb=verb, group=f"g{mine}", delay=by, known=False),
        replace(new, at=ask.at + 500 + chance.randrange(4), client=chance.randrange(setup.clients), group=f"g{other}"),
    ]


def _ask(chance: Random, setup: Setup, last: Millis) -> list[Step]:
    """Draw one call, or sometimes several about one task within moments of each other."""
    at = chance.randrange(1_000, last)
    topic = UNHANDLED if chance.random() < 0.04 else chance.choice(TOPICS)
    key = f"k{chance.randrange(6)}"
    asks: list[Step] = [_about(chance, setup, at, topic, key)]
    while chance.random() < 0.35:
        at += chance.choice((0, 1, 3, 20, 200, 1_500))
        asks.append(_about(chance, setup, min(at, last), topic, key))
    return asks


def _about(chance: Random, setup: Setup, at: Millis, topic: str, key: str) -> Ask:
    [verb] = chance.choices([name for name, _ in _VERBS], [weight for _, weight in _VERBS])
    keys = [key] if verb != "many" else [f"k{number}" for number in chance.sample(range(8), chance.randrange(2, 6))]
    delay = chance.choice((0, 5, 50, 300, 1_000, 3_000, 10_000, 30_000))
    delay = int(delay * chance.uniform(0.5, 1.5))
    if verb == "shift":
        delay = chance.choice((-5_000, -500, 500, 4_000))
    return Ask(
        at, chance.randrange(setup.clients), verb, topic, keys, delay,
        conflict=chance.choice(_CONFLICTS) if topic != "beat" else chance.choice(("replace", "latest")),
        group=f"g{chance.randrange(3)}" if chance.random() < 0.4 or verb in ("shift", "cancel_group") else None,
        does=list(chance.choice(_DOES)),
        deadline=delay + chance.choice((0, 200, 5_000)) if chance.random() < 0.06 else None,
        known=chance.random() < 0.15,
    )  # fmt: skip


def _fault(chance: Random, setup: Setup) -> Step:
    """Draw one fault, which is repaired before the calm."""
    lasts = int(chance.choice((200, 1_000, 4_000, 12_000)) * chance.uniform(0.5, 1.5))
    at = chance.randrange(2_000, max(setup.calm - lasts - 2_000, 3_000))
    worker = f"worker-{chance.randrange(setup.workers)}"
    anybody = worker if chance.random() < 0.7 else f"client-{chance.randrange(setup.clients)}"
    back = chance.choice((10, 500, 3_000, 10_000))
    kinds = ["kill", "kill", "kill at", "kill at", "kill at", "stop", "stop", "drain", "full", "deaf"]
    kinds += ["storm"] if setup.by_caller else ["storm", "storm", "storm", "down", "down", "jump"]
    kind = chance.choice(kinds)
    if kind == "kill":
        return Kill(at, anybody, back)
    if kind == "kill at":
        operation = chance.choice(("lease", "lease", "settle", "settle", "extend"))
        if anybody != worker:
            operation = chance.choice(("add", "change"))
        return Kill(at, anybody, back, operation, chance.choice(("sent", "applied", "answered")))
    if kind == "stop":
        return Stop(at, anybody, lasts)
    if kind == "drain":
        return Drain(at, worker, back)
    if kind == "full":
        return Full(at, lasts)
    if kind == "deaf":
        return Storm(at, 3 * lasts if at + 3 * lasts < setup.calm else lasts, worker, deaf=True)
    if kind == "down":
        return Down(at, lasts, chance.randrange(setup.shards))
    if kind == "jump":
        return Jump(at, chance.choice((-8.0, -1.5, -0.05, 0.05, 1.5, 8.0)))
    lossy = not setup.by_caller
    return Storm(
        at, lasts, chance.choice(("", worker, anybody)), delay=chance.choice((0.002, 0.05, 0.4)),
        loss=chance.choice((0.02, 0.2, 0.5)) if lossy else 0.0, twice=chance.choice((0, 0.1, 0.3)) if lossy else 0.0,
    )  # fmt: skip
