"""A store in as few lines as a store can have: one dictionary, and bide's own rules for what happens to a task.

`bide.core.lifecycle` has a pure function for every transition; a store only has to find the task, call it, and keep
what it returns, in one step. Here that is a method without an `await`. Everything is looked through every time, so it
is for small things; it lasts as long as its process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice, pairwise
from typing import Any

from bide import Answer, NewTask, Ref, State, StoreUnavailable
from bide.core import lifecycle
from bide.core.names import RESERVED_TOPICS
from bide.core.records import Change, Count, Filter, Found, Lease, Leased, Page, Record, Settlement, Tally
from bide.ports import Features
from bide.stores.cursors import order_of, place_of, read_cursor, write_cursor

_SHELVES: dict[str, dict[tuple[str, str], Record]] = {}


def store_at(url: str) -> ShelfStore:
    """What the entry point names: called with `shelf:NAME`, which names the dictionary."""
    return ShelfStore(_SHELVES.setdefault(url, {}))


class ShelfStore:
    """A `bide.ports.Store` in a dictionary by (topic, key)."""

    features = Features()
    """No more than the operations: nothing is told of, and nobody's transactions are joined."""

    def __init__(self, tasks: dict[tuple[str, str], Record] | None = None) -> None:
        self._tasks = {} if tasks is None else tasks
        self._token = max((one.token for one in self._tasks.values()), default=0)
        self._is_open = False

    async def open(self) -> None:
        self._is_open = True

    async def close(self) -> None:
        self._is_open = False

    async def add(self, tasks: Sequence[NewTask], *, now: int) -> list[Answer]:
        self._check_open()
        answers = []
        for new in tasks:
            old = self._tasks.get((new.topic, new.key))
            answer = lifecycle.schedule(new, old, now, self._next_token(now))
            if answer.record is not None and answer.result in lifecycle.ADDED:
                self._keep(answer.record, now)
            answers.append(answer)
        return answers

    async def change(self, changes: Sequence[Change], *, now: int) -> list[Answer]:
        self._check_open()
        answers = []
        for asked in changes:
            token = self._next_token(now)
            answer = lifecycle.change(asked, self._tasks.get((asked.topic, asked.key)), now, token)
            if answer.record is not None and answer.record.token == token:
                self._keep(answer.record, now)
            answers.append(answer)
        return answers

    async def lease(self, wants: Mapping[str, int], *, now: int, until: int, holder: str) -> Leased:
        self._check_open()
        taken: list[Record] = []
        heads: dict[str, int] = {}
        for topic, want in wants.items():
            live = sorted((one for one in self._of(topic) if one.state.live), key=lambda one: one.wake_at)
            due = [one for one in live if lifecycle.may_lease(one, now)][: max(want, 0)]
            for old in due:
                record = lifecycle.lease(old, now, until, holder, self._next_token(now))
                self._keep(record, now)
                taken.append(record)
            wakes = [one.wake_at for one in self._of(topic) if one.state.live]
            if wakes and len(due) < max(want, 1):
                heads[topic] = min(wakes)
        return Leased(taken, heads, now)

    async def extend(self, leases: Sequence[Lease], *, now: int, until: int) -> list[bool]:
        self._check_open()
        return [
            self._held(one.topic, one.key, one.token, lambda old: lifecycle.extend(old, until), now) for one in leases
        ]

    async def settle(self, outcomes: Sequence[Settlement], *, now: int) -> list[bool]:
        self._check_open()
        return [self._settle(one, now) for one in outcomes]

    async def purge(self, *, now: int, limit: int) -> int:
        self._check_open()
        gone = list(islice((ref for ref, one in self._tasks.items() if lifecycle.gone(one, now)), max(limit, 0)))
        for ref in gone:
            del self._tasks[ref]
        return len(gone)

    async def get(self, refs: Sequence[Ref]) -> list[Record | None]:
        self._check_open()
        return [self._tasks.get((topic, key)) for topic, key in refs]

    async def find(self, where: Filter, page: Page) -> Found:
        self._check_open()
        order, after = order_of(where), read_cursor(page.cursor, where)

        def place(one: Record) -> tuple[Any, ...]:
            instant = one.finished_at if order == "ended" else one.wake_at
            return (one.topic, one.key) if order in ("name", "group") else (one.topic, instant, one.key)

        shown = [one for one in self._tasks.values() if where.admits(one)]
        if where.topic is None and where.group is None:
            shown = [one for one in shown if one.topic not in RESERVED_TOPICS]
        if page.cursor is not None:
            last = (after.topic, after.key) if order in ("name", "group") else (after.topic, after.instant, after.key)
            shown = [one for one in shown if place(one) > last]
        shown.sort(key=place)
        if len(shown) <= page.limit:
            return Found(shown, None)
        shown = shown[: max(page.limit, 0)]
        return Found(shown, write_cursor(place_of(order, shown[-1], 0)) if shown else page.cursor)

    async def tally(
        self, edges: Sequence[int] | None = None, *, upto: int = 10_000, topics: Collection[str] | None = None
    ) -> Tally:
        self._check_open()
        counted = [one for one in self._tasks.values() if topics is None or one.topic in topics]
        counts = Counter((one.topic, one.state) for one in counted)
        forecast = {}
        for topic in {one.topic for one in counted if one.state is State.WAITING} if edges is not None else ():
            wakes = [one.wake_at for one in counted if one.topic == topic and one.state is State.WAITING]
            forecast[topic] = [Count(sum(low <= wake < high for wake in wakes)) for low, high in pairwise(edges or ())]
        return Tally({what: Count(number) for what, number in counts.items()}, forecast)

    def _next_token(self, now: int) -> int:
        self._token = lifecycle.next_token(self._token, now)
        return self._token

    def _of(self, topic: str) -> list[Record]:
        return [one for one in self._tasks.values() if one.topic == topic]

    def _keep(self, record: Record, now: int) -> None:
        """In the place of what was there. What is not to be remembered any more is forgotten at once."""
        if lifecycle.gone(record, now):
            self._tasks.pop((record.topic, record.key), None)
        else:
            self._tasks[record.topic, record.key] = record

    def _settle(self, asked: Settlement, now: int) -> bool:
        def ended(old: Record) -> Record:
            return lifecycle.settle(asked, old, now, self._next_token(now))

        return self._held(asked.topic, asked.key, asked.token, ended, now)

    def _held(self, topic: str, key: str, token: int, become: Callable[[Record], Record], now: int) -> bool:
        """Let what is held by `token` become something else; whether it is held."""
        old = self._tasks.get((topic, key))
        if old is None or not lifecycle.holds(old, token):
            return False
        self._keep(become(old), now)
        return True

    def _check_open(self) -> None:
        if not self._is_open:
            raise StoreUnavailable("the store is not open: nothing was done")
