"""The numbers that the engine goes by, and how long and how many ended tasks of a topic are remembered.

Of each topic a limited number of done tasks is remembered, and as many cancelled ones; a task beyond the limit is
deleted as it ends. Each process counts the tasks that it ended itself, so several processes together remember a
multiple of the limit. A retention that a handler sets, such as `keep_done="1d"`, has no limit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from types import MappingProxyType

import msgspec
from msgspec import Struct

from bide.core.instants import LAST_INSTANT, LONGEST, Millis
from bide.core.payloads import PAYLOAD_LIMIT
from bide.core.records import State, Topic

FOURTEEN_DAYS: Millis = 14 * 86_400_000
MOST = 10_000
"""Done, and as many cancelled, tasks of one topic."""
_TOPICS = 10_000
"""Topics whose ended tasks are counted. With one more, all counts begin anew."""


class Retention(Struct, frozen=True, kw_only=True):
    """How long an ended task is remembered, in milliseconds; 0 forgets it as it ends."""

    done: Millis = 0
    cancelled: Millis = 0
    dead: Millis = FOURTEEN_DAYS

    def keep_until(self, state: State, now: Millis) -> Millis:
        """The `keep_until` of a task that enters `state` now."""
        length = self.done if state is State.DONE else self.cancelled if state is State.CANCELLED else self.dead
        return min(now + length, LAST_INSTANT) if length else 0


_DEFAULT = Retention()


class CappedRetention(Retention, frozen=True, kw_only=True):
    """A retention that also limits how many tasks are remembered, except for dead ones. `keep_until` counts."""

    kept: dict[State, deque[Millis]] = msgspec.field(
        default_factory=lambda: {State.DONE: deque(), State.CANCELLED: deque()}
    )
    """Of the states that are limited, until when each task is remembered."""
    most: int = MOST

    def keep_until(self, state: State, now: Millis) -> Millis:
        kept = self.kept.get(state)
        if kept is None:
            return super().keep_until(state, now)
        try:
            while kept[0] <= now:
                kept.popleft()
        except IndexError:  # there is none left; another thread of the app may have taken the last
            pass
        if len(kept) >= self.most:
            return 0
        until = super().keep_until(state, now)
        if until:
            kept.append(until)
        return until


class Retentions:
    """The retention of each topic: its own where it sets one, else the general one, limited to `most` if given."""

    def __init__(
        self,
        general: Retention = _DEFAULT,
        own: Mapping[Topic, Retention] = MappingProxyType({}),
        *,
        most: int | None = None,
    ) -> None:
        self._general = general
        self._own = own
        self._most = most
        self._capped = dict[Topic, Retention]()

    def of(self, topic: Topic) -> Retention:
        found = self._own.get(topic) or self._capped.get(topic)
        if found is None:
            if self._most is None:
                return self._general
            if len(self._capped) >= _TOPICS:
                self._capped.clear()
            found = self._capped[topic] = _capped(self._general, self._most)
        return found

    def at_most(self, most: int) -> Retentions:
        """The same, with at most `most` ended tasks of each topic and state, also where topics set their own."""
        return Retentions(self._general, {topic: _capped(one, most) for topic, one in self._own.items()}, most=most)

    def with_topic(
        self, topic: Topic, *, done: Millis | None, cancelled: Millis | None, dead: Millis | None
    ) -> Retentions:
        """The same, with the lengths that `topic` sets itself, which have no limit. None: as of any topic."""
        general = self._general
        one = CappedRetention(
            done=general.done if done is None else done,
            cancelled=general.cancelled if cancelled is None else cancelled,
            dead=general.dead if dead is None else dead,
            kept={state: deque() for state, own in ((State.DONE, done), (State.CANCELLED, cancelled)) if own is None},
        )
        return Retentions(general, {**self._own, topic: one}, most=self._most)


def _capped(one: Retention, most: int) -> CappedRetention:
    return CappedRetention(done=one.done, cancelled=one.cancelled, dead=one.dead, most=most)


class EngineConfig(Struct, frozen=True, kw_only=True):
    """The settings of an engine. All durations are in milliseconds."""

    lease: Millis = 10_000
    """How long a task is held; kept alive while its handler runs. What a dead worker held comes back after this."""
    cap: Millis = 1_000
    """The longest sleep: what a lost wake-up can cost in lateness, at most."""
    concurrency: int = 1_000
    """Deliveries at once in one worker, over all topics."""
    grace: Millis = 30_000
    """How long running handlers may go on when a worker stops."""
    max_past: Millis = LONGEST
    """How far in the past a time may lie that is asked for."""
    payload_limit: int = PAYLOAD_LIMIT
    """The largest payload, in bytes."""
    history: bool = True
    """Write down, minute by minute, what happened; see `engine.history`."""
    traces: bool = True
    """Keep the trace of the last failure with its task."""
    retentions: Retentions = Retentions()
