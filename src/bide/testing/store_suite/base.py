"""The properties that a binding of the suite declares of its store, and the fixtures that the tests get."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import pytest_asyncio

from bide.core.instants import Millis
from bide.core.records import Ref, Topic
from bide.ports import Store
from bide.testing.store_suite.acts import NOW, lease


class SuiteBase:
    """Subclass `StoreSuite`, override `make_store`, set the flags that differ."""

    pytestmark: ClassVar[list[pytest.MarkDecorator]] = [pytest.mark.asyncio]

    durable: ClassVar[bool] = False
    """True if another store made for the same directory sees the same tasks, at once and after a close."""
    many: ClassVar[int] = 10_000
    """How many tasks the large batches have."""
    races: ClassVar[int] = 1_000
    """How often each race is run."""
    exact_wakes: ClassVar[bool] = True
    """True if `next_wake` is exactly the earliest wake; else it may be earlier, but still ahead of now."""

    exact_ends: ClassVar[bool] = True
    """True if `next_wake` follows a lease that is extended or over; else it may be the end that it would have had."""

    exact_order: ClassVar[bool] = True
    """True if a lease with a limit takes the very oldest of all; else the oldest of some shards."""

    hears_commits: ClassVar[bool] = True
    """True if a listener is notified of a caller's own transaction; else its tasks are found by polling."""

    async def make_store(self, tmp_path: Path) -> Store:
        """A store that is not open yet, keeping what it keeps under `tmp_path` (or in a namespace named after it).

        A store with a clock of its own is made to go by the caller's.
        """
        raise NotImplementedError

    def callers_transaction(self, tmp_path: Path) -> AbstractAsyncContextManager[Any]:
        """A connection that the caller opened to the store's database, in a transaction.

        Committed on leaving without an error, else rolled back. For stores that are a `JoinsTransaction`.
        """
        pytest.skip("this binding knows no connection of the caller's")

    async def write_text(self, connection: Any, text: str) -> None:
        """Write a row of the caller's own, in the transaction that `connection` is in."""
        pytest.skip("this binding writes no rows of the caller's")

    async def texts(self, tmp_path: Path) -> list[str]:
        """Every committed row that `write_text` wrote."""
        raise NotImplementedError

    async def damage(self, tmp_path: Path, ref: Ref) -> None:
        """Make the stored task unreadable, by the back door, as a fault of the disk or of another program would."""
        pytest.skip("this binding has no back door")

    @pytest_asyncio.fixture
    async def store(self, tmp_path: Path) -> AsyncIterator[Store]:
        """An open, empty store."""
        store = await self.make_store(tmp_path)
        await store.open()
        try:
            yield store
        finally:
            await store.close()

    @pytest_asyncio.fixture
    async def rival(self, store: Store, tmp_path: Path) -> AsyncIterator[Store]:
        """Another client of the same tasks, open; the store itself where there can be no other."""
        rival = await self.peer(store, tmp_path)
        try:
            yield rival
        finally:
            await rival.close()

    async def peer(self, store: Store, tmp_path: Path) -> Store:
        """Another client of the same tasks, opened; the store itself where there can be no other. Close it."""
        if not self.durable:
            return store
        other = await self.make_store(tmp_path)
        await other.open()
        return other

    async def rests_until(self, store: Store, wake: Millis, *, topic: Topic = "t", now: Millis = NOW) -> None:
        """Nothing of the topic is due, and the next wake that a lease tells is this one."""
        asked = await lease(store, 5, topic=topic, now=now)
        assert asked.tasks == []
        assert self.wakes_at(asked.next_wake, wake, now)

    def wakes_at(self, told: Millis | None, earliest: Millis, now: Millis) -> bool:
        """True if `told` is an honest `next_wake` for something that wakes at `earliest`."""
        if told is None:
            return False
        if self.exact_wakes or earliest <= now:
            return told == earliest
        return now < told <= earliest
