"""The announcements of workers in the store, for operators: the settings of their topics, and that they are alive.

**Routes.** A worker announces its routes when it starts, in one store call, and every hour from then on. A route is
kept for a day. Equal routes of many workers share one row: its key is made of topic and handler, and the newest wins.

**Workers.** The live workers, the tasks each holds, and how notifications arrive in this process.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from functools import partial
from hashlib import blake2b
from typing import NamedTuple

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from bide.core.errors import BadInput, SetupError
from bide.core.instants import At, Millis
from bide.core.names import SHOWN_TOPIC, new_id
from bide.core.records import Filter, NewTask, State, Topic
from bide.core.retry import FOREVER, ExponentialPolicy, LadderPolicy, RetryPolicy
from bide.engine.background import repeat
from bide.engine.client import Client
from bide.engine.config import EngineConfig
from bide.engine.settings_store import SettingsStore
from bide.engine.verbs import Pages
from bide.ports import Clock, Instrument, Policy, Route, Store, Verbs, Wakes, all_answers

_log = logging.getLogger("bide.routes")
EVERY = 3_600.0
"""Seconds between two announcements of a route."""
_AGAIN = 60.0
"""Seconds until an announcement is retried after the store was unavailable."""
LASTS: Millis = 25 * 3_600_000
MOST_PAUSES = 20
_GROUP = "\x1eroutes"
"""The group of all announced routes. The control character distinguishes it from every caller's group."""

MOST_HELD = 1_000
"""The most leased tasks that `Workers.holding` reads."""
_LEAST_SHARE = 20
_PAGE = 200
_MOST_BYTES = 4 << 20
_LATELY = 600.0
"""Seconds for which a missed notification deserves a warning."""


class RouteSettings(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The delivery settings of one topic. All lengths are in milliseconds."""

    topic: Topic
    kind: str
    """ "handler", "webhook", "consumer" (one that leases over HTTP), or "sink" for any other."""
    what: str = ""
    """The function's module and name, the webhook's host."""
    concurrency: int | None = None
    """Concurrent deliveries in one process; None: each consumer decides."""
    timeout: Millis | None = None
    pauses: list[Millis] = []
    """The delays before each retry, at most the first twenty; empty if the first failure makes a task dead."""
    tries: int | None = None
    """Deliveries in total, including the first; None: unlimited."""
    jitter: float = 0.0
    """The fraction by which a delay may be shortened at random."""
    losses: int = 0
    keep_done: Millis = 0
    keep_cancelled: Millis = 0
    keep_dead: Millis = 0


class Announced(NamedTuple):
    """A route, and the time of its last announcement."""

    route: RouteSettings
    at: Millis


_encode = msgspec.json.encode
_decode = msgspec.json.Decoder(RouteSettings).decode


def ladder_of(policy: RetryPolicy) -> tuple[list[Millis], int | None]:
    """The first delays of a policy, without jitter, and the total number of deliveries."""
    pauses: list[Millis] = []
    for failures in range(1, MOST_PAUSES + 1):
        pause = policy.delay(failures, lambda: 0.0)
        if pause is None:
            break
        pauses.append(pause)
    tries = len(policy.rungs) + 1 if isinstance(policy, LadderPolicy) else policy.tries
    return pauses, None if tries >= FOREVER else tries


def settings_of(route: Route, config: EngineConfig) -> RouteSettings:
    made, described = type(route.sink), getattr(route.sink, "described", None)
    kind, what = "sink", f"{made.__module__}.{made.__qualname__}"
    if described is not None:  # it has a kind and a name: ("handler", "shop.close"), ("webhook", "shop.example:443")
        kind, what = described()
    same = settings_of_consumers(route.topic, route, config)
    return replace(same, kind=kind, what=what, concurrency=route.concurrency, timeout=route.timeout)


def settings_of_consumers(topic: Topic, policy: Policy, config: EngineConfig) -> RouteSettings:
    """The settings of a topic that HTTP consumers work on."""
    retry, keep = policy.retry, config.retentions.of(topic)
    pauses, tries = ladder_of(retry)
    return RouteSettings(
        topic=topic, kind="consumer", pauses=pauses, tries=tries,
        jitter=retry.jitter if isinstance(retry, ExponentialPolicy) else 0.0, losses=policy.losses, keep_done=keep.done,
        keep_cancelled=keep.cancelled, keep_dead=keep.dead,
    )  # fmt: skip


async def announce_for_ever(store: Store, clock: Clock, config: EngineConfig, routes: Sequence[RouteSettings]) -> None:
    """Announce `routes` now and every hour, unless a service does so or `history` is off."""
    if routes and config.history and store.features.remote is None:
        once = partial(announce, store, clock, routes)
        await repeat("announcing the routes", once, EVERY, log=_log, after_error=_AGAIN)


async def announce(store: Verbs, clock: Clock, routes: Sequence[RouteSettings]) -> None:
    """Announce `routes` in one store call. Raises StoreError."""
    now = clock.now()
    rows = [NewTask(SHOWN_TOPIC, _name(one), new_id(), At(now + LASTS), _encode(one), _GROUP) for one in routes]
    await all_answers(await store.add(rows, now=now))


async def announced_routes(store: Verbs, clock: Clock) -> list[Announced]:
    """The routes announced within the last day, by topic. O(routes). Raises StoreError."""
    found: list[Announced] = []
    where = Filter(topic=SHOWN_TOPIC, state=State.WAITING, group=_GROUP, wake_from=clock.now() + 1)
    for record in await SettingsStore(store, clock, SHOWN_TOPIC).records(where):
        try:
            found.append(Announced(_decode(record.payload), record.created_at))
        except (msgspec.MsgspecError, UnicodeDecodeError):
            _log.error("the announced route %s cannot be read and is skipped", record.key)
    return sorted(found, key=lambda one: (one.route.topic, one.route.kind, one.route.what))


def _name(route: RouteSettings) -> str:
    """The key of an announcement, hashed because a topic alone may be as long as a key."""
    named = "\0".join((route.topic, route.kind, route.what))
    return f"route:{blake2b(named.encode(), digest_size=16).hexdigest()}"


class HeldCount(NamedTuple):
    """The leased tasks of one topic and one holder."""

    number: int
    lost: int
    """The number whose lease has expired: the holder has died or hangs."""


class HeldTasks(Struct, frozen=True):
    """The leased tasks, by holder and topic."""

    by: Mapping[tuple[str, Topic], HeldCount]
    whole: bool
    """True if all leases were read; else only those that end first."""


class Channel(Struct, frozen=True):
    """The state of this process's notifications of earlier wakes."""

    notifies: bool
    """False: the store cannot notify, and loops poll."""
    loops: int
    """Loops that are or were subscribed."""
    heard: int
    """Notifications so far."""
    heard_ago: float | None
    """Seconds since the last; None: none yet."""
    missed: int
    """Notifications known to have been lost. Each made tasks late by one sleep at most."""
    missed_lately: bool


class WakeChannel(Instrument):
    """Counts the notifications of one process's loops. Attach it to the app before the app is opened."""

    def __init__(self) -> None:
        self._wakes: list[Wakes] = []
        self._missed = 0
        self._missed_at: float | None = None

    def working(self, wakes: Wakes) -> None:
        self._wakes.append(wakes)

    def look(self, *, notifies: bool) -> Channel:
        """The current counts. `notifies`: True if the store can notify."""
        now = time.monotonic()
        missed = sum(one.missed for one in self._wakes)
        if missed > self._missed:
            self._missed, self._missed_at = missed, now
        heard_at = max((one.heard_at for one in self._wakes if one.heard_at is not None), default=None)
        return Channel(
            notifies, len(self._wakes), sum(one.notifications for one in self._wakes),
            None if heard_at is None else now - heard_at, missed,
            self._missed_at is not None and now - self._missed_at < _LATELY,
        )  # fmt: skip


class Workers:
    """Reads the live workers and the tasks they hold from an open client's store. Raises StoreError."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._asker = f"looks on: {new_id()[-8:]}"
        """The holder's name that `announce` needs even for a read; no worker has such a name."""

    async def workers(self) -> Mapping[str, Sequence[Topic]] | None:
        """The workers that announced themselves in the last seconds, with their topics; None: unknown."""
        workers, now = self._client.store.features.workers, self._client.clock.now()
        if workers is None:
            return None
        try:
            return await workers.announce(self._asker, [], now, now=now)
        except (BadInput, SetupError):  # a service refuses it to a token that may not lease
            return None

    async def holding(self, topics: Sequence[Topic], *, whole: bool) -> HeldTasks:
        """The leases of these topics, some of each. Reads at most `MOST_HELD` tasks and some MB.

        `whole`: True if no tasks of other topics are leased.
        """
        by: dict[tuple[str, Topic], HeldCount] = {}
        read = 0
        share = max(_LEAST_SHARE, MOST_HELD // max(len(topics), 1))
        for place, topic in enumerate(topics):
            if place * share >= MOST_HELD or read > _MOST_BYTES:
                return HeldTasks(by, False)
            pages, looked = Pages(Filter(topic=topic, state=State.LEASED), _PAGE), 0
            while not pages.over and looked < share and read <= _MOST_BYTES:
                tasks = await pages.read(self._client, share - looked)
                now = self._client.clock.now()
                for record in tasks:
                    before = by.get((record.holder or "", topic), HeldCount(0, 0))
                    by[record.holder or "", topic] = HeldCount(before.number + 1, before.lost + (record.wake_at <= now))
                    read += len(record.payload)
                looked += len(tasks)
            whole = whole and pages.over
        return HeldTasks(by, whole)
