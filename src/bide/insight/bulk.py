"""One verb on many tasks: the request, its scope, and the change of each task.

Chosen tasks are changed by the token with which they were seen, so that no newer change is overridden. A filter covers
the tasks that matched when the request was made, not those scheduled later, so a request ends however many tasks arrive
meanwhile. `bulk_run` carries out a request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from bide.core.answers import Answer
from bide.core.errors import BadInput, PartlyFailed, StoreError
from bide.core.instants import LAST_INSTANT, At, Millis, as_datetime
from bide.core.records import Change, Count, Filter, Move, Record, Ref, Result, State, Token, Topic, summed
from bide.engine.client import Client
from bide.engine.verbs import Pages, new_cancel, new_fire, new_redrive, new_shift, shifted
from bide.insight.dead_letters import error_class

PAGE = 500
"""The most tasks that are read or changed in one store call."""
_FIRST_PAGE = 100
MOST_PACE = 1_000_000
_SLACK: Millis = 1_000
"""How far this clock may be behind the clock that a task was made by, so that every earlier task is covered."""
_WALKED = 10_000
"""The most tasks that are read one by one for a count, if no index counts them."""
_COUNTED = 1_000_000
"""The most tasks that an index counts for a preview: a tenth of a second if it has to walk."""
_LEASED = 1_000
"""The most leased tasks that are counted."""
_SHOWN = 10
_PATIENCE = 0.8
"""The most seconds for reading tasks one by one while a viewer waits for the page."""

May: TypeAlias = Callable[[Topic], bool]
"""Returns True if the caller may make the change to tasks of a topic."""


class BulkVerb(StrEnum):
    """The change to make to each task."""

    CANCEL = "cancel"
    MOVE = "move"
    SHIFT = "shift"
    FIRE = "fire"
    REDRIVE = "redrive"


class Version(NamedTuple):
    """The version of a task that a viewer saw."""

    ref: Ref
    token: Token


class BulkRequest(Struct, frozen=True, kw_only=True):
    """A request to change the `chosen` tasks, or all that match `where`. Raises BadInput."""

    verb: BulkVerb
    chosen: tuple[Version, ...] = ()
    where: Filter | None = None
    error: str | None = None
    """Only dead tasks whose error is of this class (see `dead_letters.error_class`)."""
    at: Millis | None = None
    by: Millis | None = None
    """The length to shift the tasks by; may be negative."""
    deadlines: bool = False
    """True: their deadlines are shifted too."""
    pace: int | None = None
    """Tasks per second; None: as fast as possible."""
    untouched_since: Token | None = None
    """Skip tasks with this token or a newer one, so that an interrupted shift can go on and shift no task twice.
    """

    def __post_init__(self) -> None:
        if (self.where is None) == (not self.chosen):
            raise BadInput("scope", len(self.chosen), "tasks that were chosen, or a filter, and not both")
        if (self.at is None) == (self.verb is BulkVerb.MOVE):
            raise BadInput("to", self.at, "an instant, for move alone")
        if (self.by is None) == (self.verb is BulkVerb.SHIFT) or self.by == 0:
            raise BadInput("by", self.by, "a length other than zero, for shift alone")
        if self.pace is not None and not 1 <= self.pace <= MOST_PACE:
            raise BadInput("pace", self.pace, f"a whole number of tasks per second from 1 to {MOST_PACE:,}")
        if self.where is not None:
            self._check_filter(self.where)

    def _check_filter(self, where: Filter) -> None:
        if self.verb is BulkVerb.REDRIVE:
            if where.state not in (None, State.DEAD):
                raise BadInput("state", where.state.value, "dead: only dead tasks can be sent again")
            if where.wake_from is not None or where.wake_before is not None:
                raise BadInput("wake_from", "a range of times", "none: dead tasks are due at no time")
        elif where.state is not None and not where.state.live:
            raise BadInput("state", where.state.value, "waiting or leased: ended tasks cannot be changed")
        elif self.error is not None:
            raise BadInput("error", self.error, "no error except for redrive: it selects among dead tasks only")


class MissedTask(Struct, frozen=True, array_like=True):
    """A task that was not changed as requested, and its state at that time."""

    topic: Topic
    key: str
    result: str
    """A `Result`, or UNKNOWN or FAILED."""
    state: State | None = None
    wake_at: Millis | None = None
    deadline: Millis | None = None
    holder: str | None = None
    seen: Token | None = None
    """The token it was chosen with, which shows when it was seen."""
    now: Token | None = None
    who: str | None = None
    """The last caller to change it, if the event log has that change."""
    what: str = ""
    """That change, or the error."""


UNKNOWN = "unknown"
"""The answer to the change was lost: it was done once or not at all."""
FAILED = "unavailable"
"""The store could not make the change; nothing was done."""


def change_of(bulk: BulkRequest, record: Record, token: Token, client: Client) -> Change:
    """The change of a task, on the condition that it still has `token`."""
    topic, key = record.ref
    if bulk.at is not None:
        return Move(topic, key, At(bulk.at), token)
    if bulk.by is not None:
        return new_shift(record, bulk.by, deadlines=bulk.deadlines, if_token=token)
    if bulk.verb is BulkVerb.CANCEL:
        return new_cancel(topic, key, if_token=token, config=client.config, clock=client.clock)
    if bulk.verb is BulkVerb.FIRE:
        return new_fire(topic, key, if_token=token)
    return new_redrive(topic, key, delay="0s", if_token=token, clock=client.clock)


def wake_after(bulk: BulkRequest, record: Record, now: Millis) -> Millis | None:
    """The wake time of the task after the change; None: never."""
    if bulk.verb is BulkVerb.CANCEL:
        return None
    if bulk.at is not None:
        return max(bulk.at, now)
    return now if bulk.by is None else max(shifted(record.due_at, bulk.by), now)


async def change_one(client: Client, bulk: BulkRequest) -> Answer:
    """Change the single chosen task by the verb for one task. Returns its answer, or raises its error."""
    [(ref, token)] = bulk.chosen
    if bulk.at is not None:
        return await client.reschedule(*ref, at=as_datetime(bulk.at), if_token=token)
    if bulk.by is None:
        verbs = {BulkVerb.CANCEL: client.cancel, BulkVerb.FIRE: client.fire_now, BulkVerb.REDRIVE: client.redrive}
        return await verbs[bulk.verb](*ref, if_token=token)
    task = await client.get(*ref)  # its new time depends on the old one
    if task is None:
        return Answer(Result.NOT_FOUND)
    try:
        [answer] = await client.change_many([change_of(bulk, task.record, token, client)])
    except PartlyFailed as partly:  # which would mean that nothing was done
        [lost] = partly.answers
        assert isinstance(lost, StoreError)
        raise lost from None
    return answer


# --- the tasks of a request


class BulkScope(NamedTuple):
    """The tasks covered by a request made at `asked_at`, in topics that the caller may change."""

    client: Client
    bulk: BulkRequest
    may: May
    asked_at: Millis
    started_at: Millis = 0
    """When the change starts, if it was asked for before: tasks that are due by then are not fired."""

    @property
    def where(self) -> Filter:
        """The filter for reading, in an order that returns an unchanged task once."""
        where = self.bulk.where
        assert where is not None
        if self.bulk.verb is BulkVerb.REDRIVE:
            return replace(where, state=State.DEAD)
        least = where.wake_from or 0
        if self.bulk.verb is BulkVerb.FIRE:  # tasks that are already due keep their order
            least = max(least, self.asked_at + 1, self.started_at + 1)
        return replace(where, wake_from=least)

    def admits(self, record: Record) -> bool:
        """True if the request covers this task, as found or read again."""
        bulk = self.bulk
        if not self.where.admits(record):
            return False
        if bulk.untouched_since is not None and record.token >= bulk.untouched_since:
            return False
        if bulk.verb is BulkVerb.REDRIVE:
            ended = record.finished_at or 0
            return ended <= self.asked_at + _SLACK and (bulk.error is None or error_class(record.error) == bulk.error)
        return self.began_before(record)

    def began_before(self, record: Record) -> bool:
        """True if this life began before the request, within the precision of the clocks."""
        return record.created_at <= self.asked_at + _SLACK

    async def total(self, *, until: float | None = None) -> tuple[Count, frozenset[Topic]]:
        """The number of matching tasks, and their topics; exact if an index counts them, else up to 10,000.

        Reading tasks one by one ends at `until`, by the loop's time.
        """
        client, bulk = self.client, self.bulk
        if until is None:
            until = asyncio.get_running_loop().time() + _PATIENCE
        where = self.where
        if where.group is not None or bulk.error is not None or bulk.untouched_since is not None:
            return await self._walked(_WALKED, until)
        if bulk.verb is BulkVerb.REDRIVE:
            counts = (await client.tally()).counts
            return self._of_topics({topic: count for (topic, state), count in counts.items() if state is State.DEAD})
        if where.state is State.LEASED:
            return await self._walked(_WALKED, until)
        edges = [where.wake_from or 0, LAST_INSTANT if where.wake_before is None else where.wake_before]
        waits: dict[Topic, Count] = {}
        if edges[0] < edges[1]:
            forecast = (await client.tally([as_datetime(edge) for edge in edges], upto=_COUNTED)).forecast
            waits = {topic: counts[0] for topic, counts in forecast.items()}
        waiting, topics = self._of_topics(waits)
        if where.state is State.WAITING:
            return waiting, topics
        leased, more = await self.leased(until=until)
        return summed([waiting, leased]), topics | more

    async def leased(self, *, until: float) -> tuple[Count, frozenset[Topic]]:
        """The same for the currently leased tasks; up to 1,000."""
        leased = replace(self.bulk, where=replace(self.where, state=State.LEASED))
        return await self._replace(bulk=leased)._walked(_LEASED, until)

    def _of_topics(self, counts: Mapping[Topic, Count]) -> tuple[Count, frozenset[Topic]]:
        """The sum over the topics of the request, and those topics that have tasks."""
        only = self.where.topic
        some = [topic for topic, count in counts.items() if count.number and only in (None, topic) and self.may(topic)]
        return summed(counts[topic] for topic in some), frozenset(some)

    async def _walked(self, most: int, until: float) -> tuple[Count, frozenset[Topic]]:
        """Count one by one, up to `most` tasks and until the time `until`."""
        loop = asyncio.get_running_loop()
        number = 0
        topics: set[Topic] = set()
        walk = Walk(self)
        while not walk.over:
            page = await walk.page()
            number += len(page)
            topics.update(record.topic for record in page)
            if number >= most or walk.looked >= 2 * most or loop.time() >= until:
                return Count(number, exact=walk.over), frozenset(topics)
        return Count(number), frozenset(topics)


class Walk:
    """A walk through all tasks of a request, page by page. A page that fails can be read again."""

    def __init__(self, scope: BulkScope, *, limit: int = PAGE) -> None:
        self.looked = 0
        self._scope = scope
        self._pages = Pages(scope.where, limit)

    @property
    def over(self) -> bool:
        return self._pages.over

    async def page(self) -> list[Record]:
        """The next tasks; may be empty. Raises StoreError."""
        tasks = await self._pages.read(self._scope.client)
        self.looked += len(tasks)
        return [one for one in tasks if self._scope.may(one.topic) and self._scope.admits(one)]


# --- the preview


class Preview(NamedTuple):
    """The consequences of a request."""

    meant: Count
    """The number of tasks that the request covers."""
    leased: Count
    """The number of them that are being delivered now."""
    sample: Sequence[Record]
    topics: frozenset[Topic]
    gone: Sequence[Version] = ()
    """The chosen tasks that are gone, or have changed since they were seen."""


async def preview(client: Client, bulk: BulkRequest, may: May) -> Preview:
    """Count the tasks and show some. Costs two pages of a list and a tally, or a read of up to 10,000 tasks."""
    if bulk.chosen:
        return await _preview_chosen(client, bulk)
    scope = BulkScope(client, bulk, may, client.clock.now())
    until = asyncio.get_running_loop().time() + _PATIENCE
    shown: list[Record] = []
    walk = Walk(scope, limit=_FIRST_PAGE)
    while not walk.over and len(shown) < _SHOWN and walk.looked < _WALKED // 10:
        shown += await walk.page()
    count, topics = await scope.total(until=until)
    leased = Count(0)
    if scope.where.state not in (State.DEAD, State.WAITING):
        leased, _ = await scope.leased(until=until)
    return Preview(count, leased, shown[:_SHOWN], topics | {record.topic for record in shown[:_SHOWN]})


async def _preview_chosen(client: Client, bulk: BulkRequest) -> Preview:
    there: list[Record] = []
    gone: list[Version] = []
    for place in range(0, len(bulk.chosen), _FIRST_PAGE):
        part = bulk.chosen[place : place + _FIRST_PAGE]
        for seen, record in zip(part, await client.store.get([seen.ref for seen in part]), strict=True):
            if record is None or record.token != seen.token:
                gone.append(seen)
            else:
                there.append(replace(record, payload=b"", options=b""))
    leased = sum(record.state is State.LEASED for record in there)
    topics = frozenset(record.topic for record in there)
    return Preview(Count(len(there)), Count(leased), there[:_SHOWN], topics, gone)
