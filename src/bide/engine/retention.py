"""A bound on how many ended tasks of a topic are remembered: so many done ones, and as many cancelled ones.

A task beyond the bound is deleted as it ends. Each process counts the tasks that it ended itself, so several processes
together remember a multiple of the bound. A retention that a handler sets, such as `keep_done="1d"`, has no bound.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from bide.core.instants import Millis
from bide.core.records import State, Topic
from bide.engine.terms import Retention, Terms

MOST = 10_000
"""Done, and as many cancelled, tasks of one topic."""
_TOPICS = 10_000
"""Topics that are counted. With one more, all counts begin anew."""


class Counted(Retention, frozen=True, kw_only=True):
    """A retention with a bound on the number of remembered tasks. Dead tasks have no bound."""

    kept: dict[State, deque[Millis]] = msgspec.field(
        default_factory=lambda: {State.DONE: deque(), State.CANCELLED: deque()}
    )
    """Of the states that are counted, until when each task is remembered."""
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


class ByTopic(Mapping[Topic, Retention]):
    """The retention of each topic: its own where it sets one, else a counted one, made at its first use."""

    def __init__(self, general: Retention, given: Mapping[Topic, Retention], most: int = MOST) -> None:
        self._general = general
        self._given = given
        self._most = most
        self._counted = dict[Topic, Retention]()

    def with_topic(self, topic: Topic, retention: Retention) -> ByTopic:
        return ByTopic(self._general, {**self._given, topic: retention}, self._most)

    def get(self, topic: Topic, default: Any = None) -> Any:
        return self._counted.get(topic) or self[topic]

    def __getitem__(self, topic: Topic) -> Retention:
        found = self._given.get(topic) or self._counted.get(topic)
        if found is None:
            if len(self._counted) >= _TOPICS:
                self._counted.clear()
            found = self._counted[topic] = _counted(self._general, self._most)
        return found

    def __iter__(self) -> Iterator[Topic]:
        return iter(self._given)

    def __len__(self) -> int:
        return len(self._given)


def counted(terms: Terms, most: int = MOST) -> Terms:
    """The same terms, remembering at most so many ended tasks of each topic and state, also of what topics say."""
    given = {topic: _counted(one, most) for topic, one in terms.retention_by_topic.items()}
    return msgspec.structs.replace(terms, retention_by_topic=ByTopic(terms.retention, given, most))


def retained(
    terms: Terms, topic: Topic, *, done: Millis | None, cancelled: Millis | None, dead: Millis | None
) -> Terms:
    """The same terms, with what `topic` says itself: that is not counted. None: as of any topic."""
    general, told = terms.retention, terms.retention_by_topic
    by_topic = told if isinstance(told, ByTopic) else ByTopic(general, told)
    one = Counted(
        done=general.done if done is None else done,
        cancelled=general.cancelled if cancelled is None else cancelled,
        dead=general.dead if dead is None else dead,
        kept={state: deque() for state, own in ((State.DONE, done), (State.CANCELLED, cancelled)) if own is None},
    )
    return msgspec.structs.replace(terms, retention_by_topic=by_topic.with_topic(topic, one))


def _counted(one: Retention, most: int) -> Counted:
    return Counted(done=one.done, cancelled=one.cancelled, dead=one.dead, most=most)
