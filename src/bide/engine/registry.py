"""The settings with which workers serve their topics, announced in the store so that the page of a topic can show them.

A worker announces its routes when it starts, in one store call, and every hour from then on; they are remembered for a
day. Equal ones of many workers are one row: it is named by its topic and its handler, and the newest word stays.

The live workers and their topics, the tasks that each holds, and how notifications arrive here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from functools import partial
from hashlib import blake2b
from typing import NamedTuple, Protocol, runtime_checkable

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from bide.core.errors import BadInput, SetupError
from bide.core.instants import Millis
from bide.core.names import SHOWN_TOPIC, new_id
from bide.core.records import At, Filter, NewTask, Page, State, Topic
from bide.core.retry import FOREVER, Growing, RetryPolicy, Rungs
from bide.engine.background import repeat
from bide.engine.client import Client
from bide.engine.config import EngineConfig
from bide.engine.settings_store import SettingsStore
from bide.ports import Clock, Instrument, Policy, Route, Store, Verbs, Wakes, all_answers

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


def settings_of(route: Route, config: EngineConfig) -> RouteSettings:
    """Those of a worker's route."""
    made = type(route.sink)
    kind, what = "sink", f"{made.__module__}.{made.__qualname__}"
    if isinstance(route.sink, Describes):
        kind, what = route.sink.described()
    same = settings_of_consumers(route.topic, route, config)
    return replace(same, kind=kind, what=what, concurrency=route.concurrency, timeout=route.timeout)


def settings_of_consumers(topic: Topic, policy: Policy, config: EngineConfig) -> RouteSettings:
    """Those of a topic that is left to consumers over HTTP."""
    retry, keep = policy.retry, config.retention_of(topic)
    pauses, tries = ladder_of(retry)
    return RouteSettings(
        topic=topic, kind="consumer", pauses=pauses, tries=tries,
        jitter=retry.jitter if isinstance(retry, Growing) else 0.0, losses=policy.losses, keep_done=keep.done,
        keep_cancelled=keep.cancelled, keep_dead=keep.dead,
    )  # fmt: skip


async def announce_for_ever(store: Store, clock: Clock, config: EngineConfig, routes: Sequence[RouteSettings]) -> None:
    """Announce `routes` now and every hour, unless a service does so, or this process is to write down nothing."""
    if routes and config.history and store.features.remote is None:
        once = partial(announce, store, clock, routes)
        await repeat("announcing the routes", once, EVERY, log=_log, after_error=_AGAIN)


async def announce(store: Verbs, clock: Clock, routes: Sequence[RouteSettings]) -> None:
    """Write them down, in one store call. Raises StoreError."""
    now = clock.now()
    rows = [NewTask(SHOWN_TOPIC, _name(one), new_id(), At(now + LASTS), _encode(one), _GROUP) for one in routes]
    await all_answers(await store.add(rows, now=now))


async def announced_routes(store: Verbs, clock: Clock) -> list[Announced]:
    """Those that were announced within a day, by topic. O(routes). Raises StoreError."""
    found: list[Announced] = []
    where = Filter(topic=SHOWN_TOPIC, state=State.WAITING, group=_GROUP, wake_from=clock.now() + 1)
    for record in await SettingsStore(store, clock, SHOWN_TOPIC).records(where):
        try:
            found.append(Announced(_decode(record.payload), record.created_at))
        except (msgspec.MsgspecError, UnicodeDecodeError):
            _log.error("what was told of a route, %s, cannot be read and is passed over", record.key)
    return sorted(found, key=lambda one: (one.route.topic, one.route.kind, one.route.what))


def _name(route: RouteSettings) -> str:
    """The same for all equal ones; a topic may be as long as a name, so it cannot be part of one."""
    named = "\0".join((route.topic, route.kind, route.what))
    return f"route:{blake2b(named.encode(), digest_size=16).hexdigest()}"


MOST_HELD = 1_000
"""Leased tasks that one look goes through."""
_FIRST_PAGE = 20
_PAGE = 200
_PAGE_BYTES = 1 << 20
"""Payloads are read along: pages are as long as these let them be."""
_MOST_BYTES = 4 << 20
_LATELY = 600.0
"""Seconds for which a missed wake-up is worth a warning."""


class HeldCount(NamedTuple):
    """The tasks of one topic that one holder has."""

    number: int
    lost: int
    """Those of them whose lease has run out: the holder has died, or hangs."""


class HeldTasks(Struct, frozen=True):
    """The leased tasks, by holder and topic."""

    by: Mapping[tuple[str, Topic], HeldCount]
    whole: bool
    """True if all leases were read; if not, those that end first were."""


class Channel(Struct, frozen=True):
    """How this process hears of earlier wakes."""

    notifies: bool
    """False: the store cannot tell; who waits asks again and again."""
    loops: int
    """Loops that listen, or did."""
    heard: int
    """Wake-ups so far."""
    heard_ago: float | None
    """Seconds since the last; None: none yet."""
    missed: int
    """Of which it is known that they were lost: each has cost lateness of one sleep at most."""
    missed_lately: bool


class WakeChannel(Instrument):
    """Counts the wake-ups of the loops of one process: attach it to the app before that is opened."""

    def __init__(self) -> None:
        self._wakes: list[Wakes] = []
        self._missed = 0
        self._missed_at: float | None = None

    def working(self, wakes: Wakes) -> None:
        self._wakes.append(wakes)

    def look(self, *, notifies: bool) -> Channel:
        """How it is now. `notifies`: whether the store is one that can tell."""
        now = time.monotonic()
        missed = sum(one.missed for one in self._wakes)
        if missed > self._missed:
            self._missed, self._missed_at = missed, now
        heard_at = max((one.heard_at for one in self._wakes if one.heard_at is not None), default=None)
        return Channel(
            notifies, len(self._wakes), sum(one.tidings for one in self._wakes),
            None if heard_at is None else now - heard_at, missed,
            self._missed_at is not None and now - self._missed_at < _LATELY,
        )  # fmt: skip


class Workers:
    """Asks an open client's store who works. Raises StoreError."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._asker = f"looks on: {new_id()[-8:]}"
        """A reader is asked for a name too, though it announces nothing; no worker has one like this."""

    async def workers(self) -> Mapping[str, Sequence[Topic]] | None:
        """Those that said within the last seconds that they live, with their topics; None: that is not to be had."""
        workers, now = self._client.store.features.workers, self._client.clock.now()
        if workers is None:
            return None
        try:
            return await workers.announce(self._asker, [], now, now=now)
        except (BadInput, SetupError):  # a service says so to whoever may not work
            return None

    async def holding(self, topics: Sequence[Topic], *, whole: bool) -> HeldTasks:
        """The leases of these topics, some of each; at most `MOST_HELD` tasks are read, and some MB.

        `whole`: whether nothing is leased of other topics.
        """
        by: dict[tuple[str, Topic], HeldCount] = {}
        read, number = 0, 0
        share = max(_FIRST_PAGE, MOST_HELD // max(len(topics), 1))
        for place, topic in enumerate(topics):
            if place * share >= MOST_HELD or read > _MOST_BYTES:
                return HeldTasks(by, False)
            where = Filter(topic=topic, state=State.LEASED)
            looked, limit, cursor = 0, min(_FIRST_PAGE, share), None
            while True:
                found = await self._client.find_page(where, Page(limit=limit, cursor=cursor))
                now = self._client.clock.now()
                for record in found.tasks:
                    before = by.get((record.holder or "", topic), HeldCount(0, 0))
                    by[record.holder or "", topic] = HeldCount(before.number + 1, before.lost + (record.wake_at <= now))
                    read += len(record.payload)
                looked, number, cursor = looked + len(found.tasks), number + len(found.tasks), found.cursor
                if cursor is None:
                    break
                if looked >= share or read > _MOST_BYTES:
                    whole = False
                    break
                size = max(read // max(number, 1), 1)
                limit = max(1, min(_PAGE, share - looked, _PAGE_BYTES // size))
        return HeldTasks(by, whole)
