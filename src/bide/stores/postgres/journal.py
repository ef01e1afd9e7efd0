"""What lies beside the tasks: the log of events, and who works on what."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from bide.core.events import Event, EventKind
from bide.core.instants import Millis
from bide.core.records import Ref, Topic
from bide.core.texts import storable
from bide.stores.postgres.lane import Call, Lane
from bide.stores.postgres.rows import columns


async def record(lane: Lane, events: Sequence[Event], kept: int) -> None:
    """Append to the log; it is cut back to `kept` lines once it is a tenth over, so that most calls only append."""
    arguments = columns(
        [
            (one.at, one.topic, one.key, one.id, one.kind.value, one.attempt, one.who and storable(one.who),
             storable(one.what), one.was, one.wake_at)
            for one in events[-kept:]
        ],
        10,
    )  # fmt: skip

    async def work(call: Call) -> None:
        await call.fetch("insert_events", *arguments)
        [(first, last)] = await call.fetch("event_span")
        if last - first >= kept + kept // 10:
            await call.fetch("trim_events", last - kept)

    await lane.repeat(work)


async def events(lane: Lane, ref: Ref | None, limit: int, kept: int) -> list[Event]:
    """The newest first; never more than the log is said to keep."""
    limit = max(0, min(limit, kept))

    async def work(call: Call) -> list[Event]:
        rows = await (call.fetch("events", limit) if ref is None else call.fetch("events_by_name", *ref, limit))
        return [
            Event(
                at=at, topic=topic, key=key, id=life, kind=EventKind(kind), attempt=attempt, who=who, what=what,
                was=was, wake_at=wake_at,
            )
            for at, topic, key, life, kind, attempt, who, what, was, wake_at in rows
        ]  # fmt: skip

    return await lane.read(work)


async def announce(
    lane: Lane, holder: str, topics: Collection[Topic], until: Millis, now: Millis
) -> dict[str, list[Topic]]:
    """Say that `holder` works on `topics` until then (none: it has gone); who lives, with their topics."""

    async def work(call: Call) -> dict[str, list[Topic]]:
        if topics:
            await call.fetch("announce", holder, sorted(topics), until)
        else:
            await call.fetch("leave", holder)
        await call.fetch("forget_workers", now)
        return {name: list(its) for name, its in await call.fetch("workers", now)}

    return await lane.repeat(work)
