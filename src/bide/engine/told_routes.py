"""What workers tell of their routes, so that whoever looks at a topic sees who handles it, and how it is tried again.

A worker tells once when it starts, in one store call, and every hour from then on; it is remembered for a day. What
many workers tell alike is told once: a row is named by its topic and by what handles it, and the newest word stays.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple, Protocol, runtime_checkable

import msgspec
from msgspec import Struct

from bide.core.errors import StoreError
from bide.core.instants import Millis
from bide.core.names import SHOWN_TOPIC, new_id
from bide.core.records import At, Filter, NewTask, Page, State, Topic
from bide.core.retry import FOREVER, Growing, RetryPolicy, Rungs
from bide.engine.terms import Terms
from bide.ports import Clock, Route, Served, Sink, Store, Verbs

_log = logging.getLogger("bide.routes")
EVERY = 3_600.0
_AGAIN = 60.0
"""Seconds after which it is tried again, where the store was away."""
LASTS: Millis = 25 * 3_600_000
MOST_PAUSES = 20
_GROUP = "\x1eroutes"
"""What they are found by among all that is shown. With its control character no caller can name it."""
_PAGE = 500


@runtime_checkable
class Describes(Protocol):
    """A sink that can say what it is."""

    def described(self) -> tuple[str, str]:
        """The kind, and which: ("handler", "shop.close"), ("webhook", "shop.example:443")."""
        ...


class ToldRoute(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one topic is worked on. All lengths are in milliseconds."""

    topic: Topic
    kind: str
    """ "handler", "webhook", "consumer" (whoever leases over HTTP), or "sink" for any other."""
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


class Told(NamedTuple):
    """A route, and when it was told last."""

    route: ToldRoute
    at: Millis


_encode = msgspec.json.encode
_decode = msgspec.json.Decoder(ToldRoute).decode


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


def told_of(route: Route, terms: Terms) -> ToldRoute:
    """What is told of a worker's route."""
    kind, what = _described(route.sink)
    return told_of_policy(
        route.topic, kind, what, route.retry, route.losses, terms, concurrency=route.concurrency, timeout=route.timeout
    )


def told_of_policy(
    topic: Topic,
    kind: str,
    what: str,
    retry: RetryPolicy,
    losses: int,
    terms: Terms,
    *,
    concurrency: int | None = None,
    timeout: Millis | None = None,
) -> ToldRoute:
    """The same of a topic that nobody here works on."""
    pauses, tries = ladder_of(retry)
    keep = terms.retention_of(topic)
    return ToldRoute(
        topic=topic, kind=kind, what=what, concurrency=concurrency, timeout=timeout, pauses=pauses, tries=tries,
        jitter=retry.jitter if isinstance(retry, Growing) else 0.0, losses=losses, keep_done=keep.done,
        keep_cancelled=keep.cancelled, keep_dead=keep.dead,
    )  # fmt: skip


class Telling:
    """Tells `routes` now and every hour, until it is ended. Begins in the running loop."""

    def __init__(self, store: Store, clock: Clock, terms: Terms, routes: Iterable[ToldRoute]) -> None:
        self._store = store
        self._clock = clock
        self._routes = list(routes)
        self._task: asyncio.Task[None] | None = None
        if self._routes and terms.history and not isinstance(store, Served):
            self._task = asyncio.get_running_loop().create_task(self._tell_for_ever(), name="bide routes")

    async def _tell_for_ever(self) -> None:
        while True:
            try:
                await tell(self._store, self._clock, self._routes)
            except StoreError as error:
                _log.warning("the routes could not be told, trying again in %.0f s: %s", _AGAIN, error)
                await asyncio.sleep(_AGAIN)
                continue
            await asyncio.sleep(EVERY)

    async def end(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])


async def tell(store: Verbs, clock: Clock, routes: Sequence[ToldRoute]) -> None:
    """Write them down, in one store call. Raises StoreError."""
    now = clock.now()
    rows = [NewTask(SHOWN_TOPIC, _name(one), new_id(), At(now + LASTS), _encode(one), _GROUP) for one in routes]
    await store.add(rows, now=now)


async def told_routes(store: Verbs, clock: Clock) -> list[Told]:
    """What was told within a day, by topic. O(routes). Raises StoreError."""
    found: list[Told] = []
    cursor: str | None = None
    now = clock.now()
    while True:
        page = await store.find(Filter(topic=SHOWN_TOPIC, group=_GROUP), Page(limit=_PAGE, cursor=cursor))
        for record in page.tasks:
            if record.state is not State.WAITING or record.wake_at <= now:
                continue
            try:
                found.append(Told(_decode(record.payload), record.created_at))
            except (msgspec.MsgspecError, UnicodeDecodeError):
                _log.error("what was told of a route, %s, cannot be read and is passed over", record.key)
        cursor = page.cursor
        if cursor is None:
            return sorted(found, key=lambda told: (told.route.topic, told.route.kind, told.route.what))


def _described(sink: Sink) -> tuple[str, str]:
    if isinstance(sink, Describes):
        return sink.described()
    made = type(sink)
    return "sink", f"{made.__module__}.{made.__qualname__}"


def _name(route: ToldRoute) -> str:
    """The same for all who tell of the same; a topic may be as long as a name, so it cannot be part of one."""
    named = "\0".join((route.topic, route.kind, route.what))
    return f"route:{blake2b(named.encode(), digest_size=16).hexdigest()}"
