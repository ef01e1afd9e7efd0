"""The log of what was out of the ordinary: who asks for it sees all that was noted before, whoever is writing it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
from tests.waiting import pause

from bide.core.errors import StoreUnavailable
from bide.core.events import Event, EventKind
from bide.engine.history import Recorder
from bide.stores.memory import MemoryStore


class SlowStore(MemoryStore):
    """Writes events when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.let = asyncio.Event()
        self.asked = asyncio.Event()
        self.error: StoreUnavailable | None = None

    async def record(self, events: Sequence[Event]) -> None:
        self.asked.set()
        await self.let.wait()
        if self.error is not None:
            raise self.error
        await super().record(events)

    async def keys(self) -> list[str]:
        """Of what is written, oldest first."""
        return [event.key for event in reversed(await self.events())]


@pytest.fixture
async def store() -> AsyncIterator[SlowStore]:
    store = SlowStore()
    await store.open()
    yield store
    await store.close()


def event(key: str) -> Event:
    return Event(at=1, topic="a", key=key, id="i", kind=EventKind.CHANGE)


async def test_a_flush_waits_for_what_another_is_writing(store: SlowStore) -> None:
    recorder = Recorder(store)
    recorder.note(event("1"))
    by_itself = asyncio.create_task(recorder.flush())
    await store.asked.wait()
    recorder.note(event("2"))
    flushes = [asyncio.create_task(recorder.flush()) for _ in range(3)]
    await pause(0.02, why="a flush that does not wait would be over by now")
    assert not any(flush.done() for flush in flushes)
    store.let.set()
    await asyncio.wait(flushes, return_when=asyncio.FIRST_COMPLETED)
    assert await store.keys() == ["1", "2"]
    await asyncio.gather(by_itself, *flushes)
    assert await store.keys() == ["1", "2"], "once each"
    await recorder.close()


async def test_what_was_being_written_is_written_although_who_asked_has_gone(store: SlowStore) -> None:
    recorder = Recorder(store)
    recorder.note(event("1"))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await recorder.flush()
    closing = asyncio.create_task(recorder.close())
    await pause(0.02, why="a close that does not wait would be over by now")
    assert not closing.done(), "the store is needed yet"
    store.let.set()
    await closing
    assert await store.keys() == ["1"]


async def test_what_the_store_does_not_take_is_counted(store: SlowStore) -> None:
    store.let.set()
    store.error = StoreUnavailable("away")
    recorder = Recorder(store)
    recorder.note(event("1"))
    recorder.note(event("2"))
    await recorder.flush()
    assert recorder.dropped == 2
    store.error = None
    recorder.note(event("3"))
    await recorder.close()
    assert await store.keys() == ["3"]
    assert recorder.dropped == 2
