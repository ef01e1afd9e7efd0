"""The store keeps every rule that bide's own stores keep."""

from __future__ import annotations

from pathlib import Path

from bide_shelf.store import ShelfStore

from bide.testing.store_suite import StoreSuite


class TestShelf(StoreSuite):
    many, races = 200, 3  # everything is looked through every time

    async def make_store(self, tmp_path: Path) -> ShelfStore:
        return ShelfStore()
