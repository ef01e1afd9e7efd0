"""Forget tasks that have been kept for long enough, and callers that nobody hears of any more.

What ends with a time to be kept until leaves a line in `kept`. If the task lives again meanwhile, the line stays and is
found out when its time has come.
"""

from __future__ import annotations

from bide.core.instants import Millis
from bide.stores.mysql.journaled_connection import Call, MySqlConnection
from bide.stores.mysql.statements import listed, table_of_pairs, these

_AT_ONCE = 1_000


async def purge(connection: MySqlConnection, now: Millis | None, limit: int) -> int:
    """Forget up to `limit` ended tasks, by their primary keys; how many it was."""
    purged = 0
    most = _AT_ONCE

    async def work(call: Call) -> tuple[int, int]:
        """How many tasks were forgotten, and how many lines of `kept`."""
        opened = [call.write("begin"), *call.read_clock(now), call.write("kept_until_now", most=most)]
        [lines] = await call.send(*opened)
        if not lines:
            await call.send(*call.ending())
            return 0, 0
        rows = these(sorted({row for _, row in lines}))
        [found, there] = await call.send(call.write("purgeable", these=rows), call.write("still_there", these=rows))
        forgotten = sorted(row for row, _ in found)
        grouped = sorted(row for row, has_group in found if has_group)
        locked = {row for (row,) in there}.difference(forgotten)
        over = [(until, row) for until, row in lines if row not in locked]
        statements = []
        if forgotten:
            statements.append(call.write("forget_tasks", these=these(forgotten)))
        if grouped:
            statements.append(call.write("leave_groups", rows=listed(grouped)))
        if over:
            statements.append(call.write("forget_kept", lines=table_of_pairs(over)))
        await call.send(*statements, *call.ending())
        return len(forgotten), len(over)

    while purged < limit:
        most = min(limit - purged, _AT_ONCE)
        forgotten, over = await connection.repeat(work)
        purged += forgotten
        if over < most:
            break
    return purged


async def forget_callers(connection: MySqlConnection, ours: list[str]) -> None:
    """Their highest token stays known."""

    async def work(call: Call) -> None:
        values = {"ours": listed(ours, call.quote), "there": call.there}
        [rows] = await call.send(call.write("forgotten_callers", **values))
        gone = [(name, micros) for name, micros in rows if name]
        if gone:
            await call.send(
                call.write("begin"),
                call.write("keep_highest", micros=max(micros for _, micros in gone)),
                call.write("forget_callers", names=listed([name for name, _ in gone], call.quote), there=call.there),
                *call.ending(),
            )

    await connection.repeat(work)
