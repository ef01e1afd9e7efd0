"""What is forgotten: tasks that have been kept for long enough, and callers that nobody hears of any more."""

from __future__ import annotations

from bide.core.instants import Millis
from bide.stores.mysql.lane import Call, Runs
from bide.stores.mysql.statements import listed, table_of_numbers

_AT_ONCE = 1_000


async def purge(lane: Runs, now: Millis | None, limit: int) -> int:
    """Forget up to `limit` ended tasks, by their primary keys; how many it was."""
    purged = 0

    async def work(call: Call) -> int:
        values = {"most": min(limit - purged, _AT_ONCE)}
        opened = [call.write("begin"), *call.read_clock(now)]
        [rows] = await call.send(*opened, call.write("purgeable", **values))
        numbers = sorted(row for (row,) in rows)
        deleted = [call.write("forget_tasks", rows=table_of_numbers(numbers))] if numbers else []
        await call.send(*deleted, *call.commit())
        return len(numbers)

    while purged < limit:
        forgotten = await lane.read(work)
        purged += forgotten
        if forgotten < _AT_ONCE:
            break
    return purged


async def forget_callers(lane: Runs, ours: list[str]) -> None:
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
                *call.commit(),
            )

    await lane.read(work)
