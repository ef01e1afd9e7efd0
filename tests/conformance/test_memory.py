"""The contract of a store, kept by the memory store over each timer, and behind a facade."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from bide.ports import StoreFacade
from bide.stores.memory import MemoryStore
from bide.testing.store_suite import StoreSuite
from bide.testing.store_suite.calls import Batches, Fairness, Holding, Leasing, OddInput
from bide.testing.store_suite.capabilities import Announcing, Listening, Opening, Remembering, Retention
from bide.testing.store_suite.finding import Counting
from bide.timers import HashedWheel, HeapTimer, HierarchicalWheel


class TestMemory(StoreSuite):
    tells_what_is_taken: ClassVar[bool] = True

    async def make_store(self, tmp_path: Path) -> MemoryStore:
        return MemoryStore()


class TestMemoryBehindFacade(Batches, Counting, Opening, Listening, Announcing, Remembering):
    """It forwards each call as it is: these make all of them."""

    async def make_store(self, tmp_path: Path) -> StoreFacade:
        return StoreFacade(MemoryStore())


class OverTimer(Leasing, Fairness, Holding, Retention, Batches, OddInput, Listening):
    """What depends on when a task wakes."""


class TestMemoryOverHeap(OverTimer):
    async def make_store(self, tmp_path: Path) -> MemoryStore:
        return MemoryStore(timer=lambda now: HeapTimer(start=now))


class TestMemoryOverHashedWheel(OverTimer):
    exact_wakes: ClassVar[bool] = False

    async def make_store(self, tmp_path: Path) -> MemoryStore:
        return MemoryStore(timer=lambda now: HashedWheel(slots=64, start=now))


class TestMemoryOverHierarchicalWheel(OverTimer):
    exact_wakes: ClassVar[bool] = False

    async def make_store(self, tmp_path: Path) -> MemoryStore:
        return MemoryStore(timer=lambda now: HierarchicalWheel(start=now))
