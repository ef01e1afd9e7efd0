"""The operation that adds: one statement where every key is new, else also the way of what looks at a task first."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from msgspec import Struct

from bide.core import lifecycle
from bide.core.answers import Answer
from bide.core.instants import LAST_INSTANT, Millis
from bide.core.records import At, NewTask, Topic
from bide.stores.batches import Conflicts, rounds, wakes_of
from bide.stores.postgres.journaled_connection import Call, Row
from bide.stores.postgres.operations import PostgresBatch
from bide.stores.postgres.queries import packed
from bide.stores.sql.dialect import Taken
from bide.stores.sql.journaled_connection import Runs
from bide.stores.sql.locked_rows import RowLocked
from bide.stores.sql.operations import HELD, AddingBatch, Places, Tell, decide_added, rest_of

_TRIES = 16
"""How often a batch comes upon something locked before the rest of it counts as locked: half a second."""


async def add(
    connection: Runs,
    tasks: Sequence[NewTask],
    now: Millis | None,
    about: Millis,
    tell: Tell,
    conflicts: Conflicts | None = None,
) -> list[Answer]:
    """Schedule each: one statement where every key is new. `about`: what time it is there, as far as is known.

    With `conflicts` the statement may fail, since nothing else depends on its transaction.
    """
    answers: list[Any] = [None] * len(tasks)
    rest: Places = []
    adding = _Adding(connection, tasks, now, tell(wakes_of(tasks, about)), conflicts, answers, rest)
    first, *later = rounds(tasks)
    with rest_of(answers):
        await adding.apart(adding.insert, first)
        rest += [place for part in later for place in part]
        locked = {(tasks[place].topic, tasks[place].key) for place, one in enumerate(answers) if one is HELD}
        for place in [place for place in rest if (tasks[place].topic, tasks[place].key) in locked]:
            answers[place] = HELD  # what comes later of the same task has to wait for it
            rest.remove(place)
        if rest:
            await adding.apart(adding.look_first, rest)
    return answers


class _Adding(Struct):
    """A batch on its way."""

    connection: Runs
    tasks: Sequence[NewTask]
    now: Millis | None
    said: list[str]
    conflicts: Conflicts | None
    answers: list[Any]
    rest: Places
    """The places of those whose keys are taken."""
    tries: int = _TRIES
    """How many are left, since everything may be locked."""

    async def apart(self, attempt: Callable[[Places], Awaitable[None]], places: Places) -> None:
        """`attempt` these; if something is locked, each half: who waits for whom is not to be learned in another way.

        A statement that inserts cannot pass over a key that an open transaction is just inserting.
        """
        try:
            await attempt(places)
        except RowLocked:
            self.tries -= 1
            names: dict[tuple[Topic, str], Places] = {}
            for place in places:
                names.setdefault((self.tasks[place].topic, self.tasks[place].key), []).append(place)
            if len(names) == 1 or self.tries <= 0:
                for place in places:
                    self.answers[place] = HELD
                return
            parts = list(names.values())
            for half in (parts[: len(parts) // 2], parts[len(parts) // 2 :]):
                await self.apart(attempt, [place for part in half for place in part])

    async def insert(self, places: Places) -> None:
        """Insert these; those whose keys are taken are left to `look_first`."""
        tasks, conflicts = self.tasks, self.conflicts
        arguments = _insertion(tasks, places)
        news = [tasks[place] for place in places]
        form = "insert_tasks" if conflicts is None or conflicts.likely(news) else "insert_tasks_all_new"

        async def insert(call: Call) -> None:
            [row] = await call.numbered(form, self.now, *arguments, self.said)
            self.rest += _inserted(tasks, places, row, self.answers)

        async def inserted(row: Row, call: Call) -> None:
            self.rest += _inserted(tasks, places, row, self.answers)

        try:
            await self.connection.run(insert, inserted, locked="report", adding=True)
        except Taken:
            form = "insert_tasks"
            await self.connection.run(insert, inserted, locked="report", adding=True)
        if conflicts is not None:
            conflicts.met(news, [tasks[place] for place in self.rest])

    async def look_first(self, places: Places) -> None:
        """Some keys were taken, or come twice: take those through the lifecycle, under locks."""
        places.sort()
        asked = [self.tasks[place] for place in places]

        decided = await decide_added(
            self.connection, asked, lambda wakes: self.said, partial(_Batch, now=self.now), locked="pass"
        )
        for place, answer in zip(places, decided, strict=True):
            self.answers[place] = answer


class _Batch(PostgresBatch, AddingBatch):
    """Inserts what ended meanwhile, so that nothing is in the way any more."""

    async def insert(self, tasks: Sequence[NewTask], places: Places, answers: list[Any]) -> Places:
        await self.flush()
        [row] = await self.call.timed("insert_tasks", self.now, None, None, *_insertion(tasks, places), [])
        return _inserted(tasks, places, row, answers)


_OFTEN_ALIKE = (0, 3, 7)
"""Topic, relative, options."""


def _insertion(tasks: Sequence[NewTask], places: Places) -> list[list[Any]]:
    rows = []
    for place in places:
        new = tasks[place]
        due = min(max(new.due.millis, -LAST_INSTANT), LAST_INSTANT)
        rows.append(
            (new.topic, new.key, due, type(new.due) is not At, new.deadline, new.id, new.group, new.options,
             new.payload)
        )  # fmt: skip
    return packed(rows, _OFTEN_ALIKE)


def _inserted(tasks: Sequence[NewTask], places: Places, row: Any, answers: list[Any]) -> Places:
    """Fill in the answers of those that were new; the places of the others."""
    now, tokens, keys = row["now"], row["tokens"] or [], row["keys"]
    schedule = lifecycle.schedule
    if keys is None and len(tokens) == len(places):
        for place, token in zip(places, tokens, strict=True):
            answers[place] = schedule(tasks[place], None, now, token)
        return []
    given = dict(zip(zip(row["topics"] or (), keys or (), strict=True), tokens, strict=True))
    taken = []
    for place in places:
        new = tasks[place]
        token = given.get((new.topic, new.key))
        if token is None:
            taken.append(place)
        else:
            answers[place] = schedule(new, None, now, token)
    return taken
