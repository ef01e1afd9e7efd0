"""The settings of the engine, and the retention of ended tasks: for how long and how many of each topic.

Each topic keeps a limited number of done tasks, and as many cancelled ones; a task beyond the limit is deleted when it
ends. Each process counts only the tasks that it ended itself, so several processes together keep a multiple of the
limit. A retention that a handler sets, such as `keep_done="1d"`, has no limit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType

import msgspec
from msgspec import Struct

from bide.core.instants import LAST_INSTANT, LONGEST, Millis
from bide.core.payloads import PAYLOAD_LIMIT
from bide.core.records import State, Topic

FOURTEEN_DAYS: Millis = 14 * 86_400_000
MOST = 10_000
"""The limit for the done tasks of one topic, and for its cancelled tasks."""
_TOPICS = 10_000
"""Topics whose ended tasks are counted. One more topic resets all counts."""


class Retention(Struct, frozen=True, kw_only=True):
    """How long an ended task is kept, in milliseconds; 0 deletes it as it ends."""

    done: Millis = 0
    cancelled: Millis = 0
    dead: Millis = FOURTEEN_DAYS

    def keep_until(self, state: State, now: Millis) -> Millis:
        """The `keep_until` of a task that enters `state` now."""
        length = self.done if state is State.DONE else self.cancelled if state is State.CANCELLED else self.dead
        return min(now + length, LAST_INSTANT) if length else 0

    def not_kept(self, state: State) -> None:
        """Correct the count: a task with a `keep_until` has not entered `state`."""


_DEFAULT = Retention()


class CappedRetention(Retention, frozen=True, kw_only=True):
    """A retention that also limits how many tasks are kept, except dead ones. Each call of `keep_until` counts one."""

    kept: dict[State, deque[Millis]] = msgspec.field(
        default_factory=lambda: {State.DONE: deque(), State.CANCELLED: deque()}
    )
    """For each limited state, the instants until which its tasks are kept."""
    most: int = MOST

    def keep_until(self, state: State, now: Millis) -> Millis:
        kept = self.kept.get(state)
        if kept is None:
            return super().keep_until(state, now)
        try:
            while kept[0] <= now:
                kept.popleft()
        except IndexError:  # the deque is empty; another thread of the app may have taken the last instant
            pass
        if len(kept) >= self.most:
            return 0
        until = super().keep_until(state, now)
        if until:
            kept.append(until)
        return until

    def not_kept(self, state: State) -> None:
        with suppress(LookupError):
            self.kept[state].pop()


class Retentions:
    """The retention of each topic: its own if it sets one, else the general one, limited to `most` if given."""

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
        """A copy with at most `most` ended tasks of each topic and state, even for topics that set their own."""
        return Retentions(self._general, {topic: _capped(one, most) for topic, one in self._own.items()}, most=most)

    def with_topic(
        self, topic: Topic, *, done: Millis | None, cancelled: Millis | None, dead: Millis | None
    ) -> Retentions:
        """A copy with the lengths that `topic` sets itself, which have no limit. None: the general length."""
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
    """The length of a lease. It is extended while the handler runs; the tasks of a dead worker are free after this."""
    cap: Millis = 1_000
    """The longest sleep, and so the most lateness that a lost wake-up can cause."""
    concurrency: int = 1_000
    """Concurrent deliveries in one worker, over all topics."""
    grace: Millis = 30_000
    """How long running handlers may go on when a worker stops."""
    max_past: Millis = LONGEST
    """How far in the past a requested time may lie."""
    payload_limit: int = PAYLOAD_LIMIT
    """The largest payload, in bytes."""
    history: bool = True
    """Record activity minute by minute; see `engine.history`."""
    traces: bool = True
    """Keep the traceback of the last failure with its task."""
    retentions: Retentions = Retentions()
