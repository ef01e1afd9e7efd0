"""The operation that adds: one statement where every key is new, else also the way of what looks at a task first."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from bide.core import lifecycle
from bide.core.answers import Answer
from bide.core.errors import PartlyFailed, StoreError
from bide.core.instants import LAST_INSTANT, Millis
from bide.core.records import At, NewTask, Topic
from bide.stores.batches import Conflicts, rounds, wakes_of
from bide.stores.postgres.journaled_connection import Call, Row
from bide.stores.postgres.operations import (
    HELD,
    Places,
    Tell,
    Writes,
    answers_of,
    encode,
    lock,
)
from bide.stores.postgres.rows import packed, record_of
from bide.stores.sql.dialect import Shut, Taken
from bide.stores.sql.journaled_connection import Runs
from bide.stores.sql.locked_rows import RowLocked

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
    first, *later = rounds(tasks)
    rest: Places = []
    said = tell(wakes_of(tasks, about))
    tries = [_TRIES]

    async def insert_some(places: Places) -> None:
        arguments = _insertion(tasks, places)
        news = [tasks[place] for place in places]
        form = "insert_tasks" if conflicts is None or conflicts.likely(news) else "insert_tasks_all_new"

        async def insert(call: Call) -> None:
            rows = await call.timed(form, now, call.caller, call.number, *arguments, said)
            if not rows:
                raise Shut
            rest.extend(_inserted(tasks, places, rows[0], answers))

        async def inserted(row: Row, call: Call) -> None:
            rest.extend(_inserted(tasks, places, row, answers))

        try:
            await connection.run(insert, inserted, past=insert, adding=True)
        except Taken:
            form = "insert_tasks"
            await connection.run(insert, inserted, past=insert, adding=True)
        if conflicts is not None:
            conflicts.met(news, [tasks[place] for place in rest])

    async def add_again(places: Places) -> None:
        await _add_again(connection, tasks, places, answers, now, said)

    try:
        await _apart(tasks, first, insert_some, answers, tries)
        for place in (place for part in later for place in part):
            rest.append(place)
        locked = {(tasks[place].topic, tasks[place].key) for place, one in enumerate(answers) if one is HELD}
        for place in [place for place in rest if (tasks[place].topic, tasks[place].key) in locked]:
            answers[place] = HELD  # what comes later of the same task has to wait for it
            rest.remove(place)
        if rest:
            await _apart(tasks, rest, add_again, answers, tries)
    except StoreError as error:
        if all(answer is None for answer in answers):
            raise
        raise PartlyFailed([error if answer is None else answer for answer in answers]) from error
    return answers


async def _apart(
    tasks: Sequence[NewTask],
    places: Places,
    attempt: Callable[[Places], Awaitable[None]],
    answers: list[Any],
    tries: list[int],
) -> None:
    """`attempt` these; if something is locked, each half: who waits for whom is not to be learned in another way.

    A statement that inserts cannot pass over a key that an open transaction is just inserting. `tries`: how many are
    left, since everything may be locked.
    """
    try:
        await attempt(places)
    except RowLocked:
        tries[0] -= 1
        names: dict[tuple[Topic, str], Places] = {}
        for place in places:
            names.setdefault((tasks[place].topic, tasks[place].key), []).append(place)
        if len(names) == 1 or tries[0] <= 0:
            for place in places:
                answers[place] = HELD
            return
        parts = list(names.values())
        for half in (parts[: len(parts) // 2], parts[len(parts) // 2 :]):
            await _apart(tasks, [place for part in half for place in part], attempt, answers, tries)


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


async def _add_again(
    connection: Runs, tasks: Sequence[NewTask], rest: Places, answers: list[Any], now: Millis | None, said: list[str]
) -> None:
    """Some keys were taken, or come twice: take those through the lifecycle, under locks."""
    rest.sort()
    asked = [tasks[place] for place in rest]

    async def decide(call: Call, query: str = "lock_tasks") -> list[Answer | None]:
        decided: list[Any] = [None] * len(asked)
        past = query == "lock_tasks_past"
        locked: set[tuple[Topic, str]] = set()
        await call.begin()
        there: Millis = 0
        gate: tuple[Any, Any] = (call.caller, call.number)
        for part in rounds(asked):
            left = part
            while left:
                rows = await lock(call, now, gate, asked, left, query)
                gate, there = (None, None), rows[0]["now"]
                writes = Writes()
                free = []
                for place, row in zip(left, rows, strict=True):
                    name = asked[place].topic, asked[place].key
                    if past and (row["held"] or name in locked):
                        locked.add(name)
                        continue
                    if row["topic"] is None:  # it ended meanwhile, and nothing is in the way any more
                        free.append(place)
                        continue
                    new, old = asked[place], record_of(row, 3)
                    answer = decided[place] = lifecycle.schedule(new, old, row["now"], row["new_token"])
                    if answer.result in lifecycle.ADDED and answer.record is not None:
                        writes.put(answer.record)
                await writes.flush(call)
                left = free
                if free:
                    [one] = await call.timed("insert_tasks", now, None, None, *_insertion(asked, free), [])
                    left = _inserted(asked, free, one, decided)
        await Writes().flush(call, encode(decided), said, there)
        await call.commit()
        return decided

    async def decide_past(call: Call) -> list[Answer | None]:
        return await decide(call, "lock_tasks_past")

    async def decided_before(row: Row, call: Call) -> list[Answer | None]:
        return answers_of.decode(row["answer"])  # type: ignore[call-overload]

    decided = await connection.run(decide, decided_before, past=decide_past, adding=True)
    for place, answer in zip(rest, decided, strict=True):
        answers[place] = HELD if answer is None else answer
