"""What lies beside the tasks: the log of events, and who works on what."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from bide.core.events import Event, EventKind
from bide.core.instants import Millis
from bide.core.records import Ref, Topic
from bide.core.texts import storable
from bide.stores.mysql.lane import Call, Lane
from bide.stores.mysql.statements import listed
from bide.stores.mysql.statements import rows as tuples

_encode = msgspec.json.encode
_topics = msgspec.json.Decoder(list[Topic])


async def record(lane: Lane, events: Sequence[Event], kept: int) -> None:
    """Append to the log; it is cut back to `kept` lines once it is a tenth over, so that most calls only append."""
    lines = [
        (one.at, one.topic, one.key, one.id, one.kind.value, one.attempt, one.who and storable(one.who),
         storable(one.what), one.was, one.wake_at)
        for one in events[-kept:]
    ]  # fmt: skip

    async def work(call: Call) -> None:
        written = call.write("insert_events", rows=tuples(lines, call.quote))
        [[(first, last)]] = await call.send(written, call.write("event_span"))
        if last - first >= kept + kept // 10:
            await call.send(call.write("trim_events", line=int(last) - kept))

    await lane.repeat(work)


async def events(lane: Lane, ref: Ref | None, limit: int, kept: int) -> list[Event]:
    """The newest first; never more than the log is said to keep."""
    limit = max(0, min(limit, kept))

    async def work(call: Call) -> list[Event]:
        if ref is None:
            asked = call.write("events", most=limit)
        else:
            asked = call.write("events_by_name", topic=ref.topic, key=ref.key, most=limit)
        [rows] = await call.send(asked)
        return [
            Event(
                at=at, topic=_text(topic), key=_text(key), id=_text(life), kind=EventKind(_text(kind)),
                attempt=attempt, who=None if who is None else _text(who), what=_text(what), was=was, wake_at=wake_at,
            )
            for at, topic, key, life, kind, attempt, who, what, was, wake_at in rows
        ]  # fmt: skip

    return await lane.read(work)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


async def announce(
    lane: Lane, holder: str, topics: Collection[Topic], until: Millis, now: Millis
) -> dict[str, list[Topic]]:
    """Say that `holder` works on `topics` until then (none: it has gone); who lives, with their topics."""

    async def work(call: Call) -> dict[str, list[Topic]]:
        if topics:
            said = call.write("announce", holder=holder, topics=_encode(sorted(topics)), until=until)
        else:
            said = call.write("leave", holder=holder)
        [rows] = await call.send(said, call.write("workers"))
        gone = [name for name, _, end in rows if end <= now]
        if gone:
            await call.send(call.write("forget_workers", holders=listed(gone, call.quote), now=now))
        return {_text(name): _topics_of(its) for name, its, end in rows if end > now}

    return await lane.repeat(work)


def _topics_of(packed: bytes) -> list[Topic]:
    """None of a row that no worker wrote."""
    try:
        return _topics.decode(packed)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return []
