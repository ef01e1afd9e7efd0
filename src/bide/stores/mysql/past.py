"""Past what somebody keeps locked: who asked for other tasks is not to wait for it.

A call that waits for a lock for as long as our connections do (a second) is undone. Then each of its tasks is looked at
without waiting, and those that are locked are left out: they are tried again beside, see `sql.locked_rows`.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any

from bide.core.errors import StoreError, StoreUnavailable
from bide.core.records import Topic
from bide.stores.batches import Named
from bide.stores.mysql.dialect import meaning
from bide.stores.mysql.journaled_connection import Call, MySqlConnection
from bide.stores.sql.dialect import Locked
from bide.stores.sql.locked_rows import RowLocked

Name = tuple[Topic, str]
_AT_ONCE = 200


async def go_past(
    connection: MySqlConnection,
    probe: MySqlConnection,
    asked: Sequence[Any],
    ask: Callable[[MySqlConnection, Sequence[Any]], Awaitable[list[Any]]],
    *,
    known: Collection[Name] = (),
    waiting: bool = True,
) -> list[Any]:
    """The answers of `ask`, and RowLocked for each that is locked.

    `known`: those that are, and need not be tried. Not `waiting`: each is looked at first, on the connection `probe`.
    """
    answers: list[Any] = [None] * len(asked)
    left = list(range(len(asked)))
    locked = {(one.topic, one.key) for one in asked} & set(known) if known else set()
    ends = time.monotonic() + connection.patience
    while left:
        if not waiting or locked:
            if not waiting:
                locked = await find_locked(probe, [asked[place] for place in left])
            for place in left:
                if (asked[place].topic, asked[place].key) in locked:
                    answers[place] = RowLocked("an open transaction of somebody else's keeps the task locked")
            left = [place for place in left if answers[place] is None]
            if not left:
                break
        try:
            if len(left) == len(asked):
                return await ask(connection, asked)
            for place, answer in zip(left, await ask(connection, [asked[place] for place in left]), strict=True):
                answers[place] = answer
            break
        except RowLocked as error:
            if not waiting and time.monotonic() >= ends:
                raise StoreUnavailable(str(error)) from error
            waiting, locked = False, set()
        except StoreError as error:
            if len(left) == len(asked):
                raise
            for place in left:
                answers[place] = error
            break
    return answers


async def find_locked(connection: MySqlConnection, asked: Sequence[Named]) -> set[Name]:
    """Those of these tasks that somebody else has locked, also one that is just being inserted."""
    names = sorted({(one.topic, one.key) for one in asked})

    async def work(call: Call) -> set[Name]:
        locked: set[Name] = set()
        rest = names
        while rest:
            part = rest[:_AT_ONCE]
            statements = [call.write("probe", topic=topic, key=key) for topic, key in part]
            answered, error = await call.connection.ask_on(b"; ".join(statements))
            if error is not None:
                if not isinstance(meaning(error, ""), Locked):
                    raise error
                locked.add(part[answered])
                answered += 1
            rest = rest[answered:]
        return locked

    return await connection.read(work)
