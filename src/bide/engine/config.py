"""The settings of the engine, and the retention of ended tasks: for how long and how many of each topic.

Each topic keeps a limited number of done tasks, and as many cancelled ones; a task beyond the limit is deleted when it
ends. Each process counts only the tasks that it ended itself, so several processes together keep a multiple of the
limit. A retention that a handler sets, such as `keep_done="1d"`, has no limit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import suppress

from msgspec import Struct
from msgspec.structs import replace

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
    kept: dict[State, deque[Millis]] = {}
    """For each state with a limit, the instants until which its tasks are kept."""
    most: int = MOST

    def keep_until(self, state: State, now: Millis) -> Millis:
        """The `keep_until` of a task that enters `state` now. With a limit, each call counts one task."""
        length = self.done if state is State.DONE else self.cancelled if state is State.CANCELLED else self.dead
        until = min(now + length, LAST_INSTANT) if length else 0
        if (kept := self.kept.get(state)) is not None:
            try:
                while kept[0] <= now:
                    kept.popleft()
            except IndexError:  # the deque is empty; another thread of the app may have taken the last instant
                pass
            if len(kept) >= self.most:
                return 0
            if until:
                kept.append(until)
        return until

    def not_kept(self, state: State) -> None:
        """Correct the count: a task with a `keep_until` has not entered `state`."""
        with suppress(LookupError):
            self.kept[state].pop()


class Retentions(Struct, frozen=True, eq=False):
    """The retention of each topic: its own if it sets one, else the general one, limited to `most` if given."""

    general: Retention = Retention()
    own: Mapping[Topic, Retention] = {}
    most: int | None = None
    _limited: dict[Topic, Retention] = {}

    def of(self, topic: Topic) -> Retention:
        found = self.own.get(topic) or self._limited.get(topic)
        if found is None:
            if self.most is None:
                return self.general
            if len(self._limited) >= _TOPICS:
                self._limited.clear()
            found = self._limited[topic] = _limited(self.general, self.most)
        return found

    def at_most(self, most: int) -> Retentions:
        """A copy with at most `most` ended tasks of each topic and state, even for topics that set their own."""
        return Retentions(self.general, {topic: _limited(one, most) for topic, one in self.own.items()}, most)

    def with_topic(
        self, topic: Topic, *, done: Millis | None, cancelled: Millis | None, dead: Millis | None
    ) -> Retentions:
        """A copy with the lengths that `topic` sets itself, which have no limit. None: the general length."""
        given = {"done": done, "cancelled": cancelled, "dead": dead}
        set_here = {name: length for name, length in given.items() if length is not None}
        limits = {state: deque[Millis]() for state in (State.DONE, State.CANCELLED) if state.value not in set_here}
        one = replace(self.general, kept=limits, **set_here)
        return Retentions(self.general, {**self.own, topic: one}, self.most)


def _limited(one: Retention, most: int) -> Retention:
    return replace(one, kept={State.DONE: deque(), State.CANCELLED: deque()}, most=most)


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
