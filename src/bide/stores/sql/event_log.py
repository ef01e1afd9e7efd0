"""The tables beside the tasks: the log of events, and the workers with their topics."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from bide.core.events import Event, EventKind
from bide.core.instants import Millis
from bide.core.records import Ref, Topic
from bide.core.texts import storable

_COLUMNS = 10


async def record(connection: Any, events: Sequence[Event], kept: int) -> None:
    """Append to the log; it is cut back to `kept` lines once it is a tenth over, so that most calls only append."""
    lines = [
        (one.at, one.topic, one.key, one.id, one.kind.value, one.attempt, one.who and storable(one.who),
         storable(one.what), one.was, one.wake_at)
        for one in events[-kept:]
    ]  # fmt: skip

    async def work(call: Any) -> None:
        [(first, last)] = await call.write_and_ask("insert_events", call.lines(lines, _COLUMNS), "event_span")
        if last - first >= kept + kept // 10:
            await call.ask("trim_events", line=int(last) - kept)

    await connection.repeat(work)


async def events(connection: Any, ref: Ref | None, limit: int, kept: int) -> list[Event]:
    """The newest first; never more than the log is said to keep."""
    limit = max(0, min(limit, kept))

    async def work(call: Any) -> list[Event]:
        if ref is None:
            rows = await call.ask("events", most=limit)
        else:
            rows = await call.ask("events_by_name", topic=ref.topic, key=ref.key, most=limit)
        text = call.text
        return [
            Event(
                at=at, topic=text(topic), key=text(key), id=text(life), kind=EventKind(text(kind)), attempt=attempt,
                who=None if who is None else text(who), what=text(what), was=was, wake_at=wake_at,
            )
            for at, topic, key, life, kind, attempt, who, what, was, wake_at in rows
        ]  # fmt: skip

    found: list[Event] = await connection.read(work)
    return found


async def announce(
    connection: Any, holder: str, topics: Collection[Topic], until: Millis, now: Millis
) -> dict[str, list[Topic]]:
    """Say that `holder` works on `topics` until then (none: it has gone); who lives, with their topics."""

    async def work(call: Any) -> dict[str, list[Topic]]:
        if topics:
            said, values = "announce", {"holder": holder, "topics": call.packed(sorted(topics)), "until": until}
        else:
            said, values = "leave", {"holder": holder}
        rows = await call.write_and_ask(said, values, "workers")
        gone = [name for name, _, end in rows if end <= now]
        if gone:
            await call.ask("forget_workers", holders=call.listed(gone), now=now)
        return {call.text(name): call.unpacked(its) for name, its, end in rows if end > now}

    alive: dict[str, list[Topic]] = await connection.repeat(work)
    return alive
