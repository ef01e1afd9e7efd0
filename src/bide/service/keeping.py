"""What ended tasks a service remembers: for an hour, and of each topic at most so many.

What would be one too many is forgotten as it ends. Each instance counts what it ended itself, by when it is to be
forgotten; so several together remember at most as many times that.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from bide.core.instants import Millis
from bide.core.records import State, Topic
from bide.engine.terms import Retention, Terms

MOST = 10_000
"""Done, and as many cancelled, tasks of one topic."""
_TOPICS = 10_000
"""Topics that are counted: of those that nothing has ended of for the longest, the counts begin anew."""


class Counted(Retention, frozen=True, kw_only=True):
    """A retention that looks at how many are remembered. Dead tasks are for somebody to look at, and all are kept."""

    kept: dict[State, deque[Millis]] = msgspec.field(
        default_factory=lambda: {State.DONE: deque(), State.CANCELLED: deque()}
    )
    most: int = MOST

    def keep_until(self, state: State, now: Millis) -> Millis:
        until = super().keep_until(state, now)
        kept = self.kept.get(state)
        if not until or kept is None:
            return until
        while kept and kept[0] <= now:
            kept.popleft()
        if len(kept) >= self.most:
            return 0
        kept.append(until)
        return until


class ByTopic(Mapping[Topic, Retention]):
    """A count of its own for each topic, made when it is first asked for."""

    def __init__(self, general: Retention, given: Mapping[Topic, Retention], most: int = MOST) -> None:
        self._general = general
        self._given = given
        self._most = most
        self._counted: OrderedDict[Topic, Retention] = OrderedDict()

    def get(self, topic: Topic, default: Any = None) -> Any:
        return self[topic]

    def __getitem__(self, topic: Topic) -> Retention:
        found = self._counted.get(topic)
        if found is None:
            terms = self._given.get(topic, self._general)
            found = Counted(done=terms.done, cancelled=terms.cancelled, dead=terms.dead, most=self._most)
            self._counted[topic] = found
            if len(self._counted) > _TOPICS:
                self._counted.popitem(last=False)
        else:
            self._counted.move_to_end(topic)
        return found

    def __iter__(self) -> Iterator[Topic]:
        return iter(self._given)

    def __len__(self) -> int:
        return len(self._given)


def counted(terms: Terms, most: int = MOST) -> Terms:
    """The same terms, remembering at most so many ended tasks of each topic and state."""
    by_topic = ByTopic(terms.retention, terms.retention_by_topic, most)
    return msgspec.structs.replace(terms, retention_by_topic=by_topic)
