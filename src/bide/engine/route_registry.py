"""The settings with which workers serve their topics, announced in the store so that the page of a topic can show them.

A worker announces its routes when it starts, in one store call, and every hour from then on; they are remembered for a
day. Equal ones of many workers are one row: it is named by its topic and its handler, and the newest word stays.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from hashlib import blake2b
from typing import NamedTuple, Protocol, runtime_checkable

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from bide.core.instants import Millis
from bide.core.names import SHOWN_TOPIC, new_id
from bide.core.records import At, Filter, NewTask, State, Topic
from bide.core.retry import FOREVER, Growing, RetryPolicy, Rungs
from bide.engine.background import repeat
from bide.engine.kept import Kept
from bide.engine.terms import Terms
from bide.ports import Clock, Policy, Route, Served, Store, Verbs

_log = logging.getLogger("bide.routes")
EVERY = 3_600.0
_AGAIN = 60.0
"""Seconds after which it is tried again, where the store was away."""
LASTS: Millis = 25 * 3_600_000
MOST_PAUSES = 20
_GROUP = "\x1eroutes"
"""They are found by it among all that is shown. With its control character no caller can name it."""


@runtime_checkable
class Describes(Protocol):
    """A sink that can say what it is."""

    def described(self) -> tuple[str, str]:
        """The kind, and which: ("handler", "shop.close"), ("webhook", "shop.example:443")."""
        ...


class RouteSettings(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one topic is worked on. All lengths are in milliseconds."""

    topic: Topic
    kind: str
    """ "handler", "webhook", "consumer" (one that leases over HTTP), or "sink" for any other."""
    what: str = ""
    """The function's module and name, the webhook's host."""
    concurrency: int | None = None
    """Deliveries at once in one process; None: as each consumer likes."""
    timeout: Millis | None = None
    pauses: list[Millis] = []
    """Before each new try, at most the first twenty; none for a task that is dead at its first failure."""
    tries: int | None = None
    """Deliveries in all, the first among them; None: it is tried for ever."""
    jitter: float = 0.0
    """By which part a pause may be shorter."""
    losses: int = 0
    keep_done: Millis = 0
    keep_cancelled: Millis = 0
    keep_dead: Millis = 0


class Announced(NamedTuple):
    """A route, and when it was announced last."""

    route: RouteSettings
    at: Millis


_encode = msgspec.json.encode
_decode = msgspec.json.Decoder(RouteSettings).decode


def ladder_of(policy: RetryPolicy) -> tuple[list[Millis], int | None]:
    """The first pauses of a policy, without their jitter; and how many deliveries there are in all."""
    pauses: list[Millis] = []
    for failures in range(1, MOST_PAUSES + 1):
        pause = policy.delay(failures, lambda: 0.0)
        if pause is None:
            break
        pauses.append(pause)
    tries = len(policy.rungs) + 1 if isinstance(policy, Rungs) else policy.tries
    return pauses, None if tries >= FOREVER else tries


def settings_of(route: Route, terms: Terms) -> RouteSettings:
    """Those of a worker's route."""
    made = type(route.sink)
    kind, what = "sink", f"{made.__module__}.{made.__qualname__}"
    if isinstance(route.sink, Describes):
        kind, what = route.sink.described()
    same = settings_of_consumers(route.topic, route, terms)
    return replace(same, kind=kind, what=what, concurrency=route.concurrency, timeout=route.timeout)


def settings_of_consumers(topic: Topic, policy: Policy, terms: Terms) -> RouteSettings:
    """Those of a topic that is left to consumers over HTTP."""
    retry, keep = policy.retry, terms.retention_of(topic)
    pauses, tries = ladder_of(retry)
    return RouteSettings(
        topic=topic, kind="consumer", pauses=pauses, tries=tries,
        jitter=retry.jitter if isinstance(retry, Growing) else 0.0, losses=policy.losses, keep_done=keep.done,
        keep_cancelled=keep.cancelled, keep_dead=keep.dead,
    )  # fmt: skip


async def announce_for_ever(store: Store, clock: Clock, terms: Terms, routes: Sequence[RouteSettings]) -> None:
    """Announce `routes` now and every hour, unless a service does so, or this process is to write down nothing."""
    if routes and terms.history and not isinstance(store, Served):
        once = partial(announce, store, clock, routes)
        await repeat("announcing the routes", once, EVERY, log=_log, after_error=_AGAIN)


async def announce(store: Verbs, clock: Clock, routes: Sequence[RouteSettings]) -> None:
    """Write them down, in one store call. Raises StoreError."""
    now = clock.now()
    rows = [NewTask(SHOWN_TOPIC, _name(one), new_id(), At(now + LASTS), _encode(one), _GROUP) for one in routes]
    await store.add(rows, now=now)


async def announced_routes(store: Verbs, clock: Clock) -> list[Announced]:
    """Those that were announced within a day, by topic. O(routes). Raises StoreError."""
    found: list[Announced] = []
    where = Filter(topic=SHOWN_TOPIC, state=State.WAITING, group=_GROUP, wake_from=clock.now() + 1)
    for record in await Kept(store, clock, SHOWN_TOPIC).records(where):
        try:
            found.append(Announced(_decode(record.payload), record.created_at))
        except (msgspec.MsgspecError, UnicodeDecodeError):
            _log.error("what was told of a route, %s, cannot be read and is passed over", record.key)
    return sorted(found, key=lambda one: (one.route.topic, one.route.kind, one.route.what))


def _name(route: RouteSettings) -> str:
    """The same for all equal ones; a topic may be as long as a name, so it cannot be part of one."""
    named = "\0".join((route.topic, route.kind, route.what))
    return f"route:{blake2b(named.encode(), digest_size=16).hexdigest()}"
