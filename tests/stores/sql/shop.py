"""A shop whose orders lie beside its tasks."""

from __future__ import annotations

from tests.stores.sql.database import Database

from bide import Bide


class Shop:
    """A place with tasks and a table of the caller's; `app` is the caller's, `others` is somebody else's."""

    def __init__(self, database: Database, url: str) -> None:
        self.database = database
        self.url = url
        self.app = Bide(url, keep_done="0s", keep_cancelled="0s")
        self.others = Bide(url, keep_done="0s", keep_cancelled="0s")
        self.orders = database.beside(url, "orders")

    async def rows(self) -> int:
        [(count,)] = self.database.ask(self.url, f"SELECT COUNT(*) FROM {self.orders}")
        return int(count)

    async def keys(self) -> list[str]:
        return sorted([task.key async for task in self.others.find(topic="order.close")])
