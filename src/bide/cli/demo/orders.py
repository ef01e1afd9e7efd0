"""E2, the unpaid order: reminded after 5 minutes, cancelled after 15, closed after a day, unless it is paid."""

from __future__ import annotations

import msgspec

from bide.app import Bide
from bide.cli.demo.pace import Scale
from bide.cli.demo.story import Story, act
from bide.core.records import Record
from bide.core.tasks import Task


class Order(msgspec.Struct):
    number: int


class Orders(Story):
    code = "E2"
    title = "Unpaid order"
    scale = Scale("1m", "1s", then=Scale("1h", "1s", after="15m"))
    topics = ("order.remind", "order.cancel", "order.close")
    tables = ("demo_order (number INTEGER PRIMARY KEY, status TEXT NOT NULL)",)

    def define(self, app: Bide) -> None:
        @app.handler("order.remind")
        async def remind(task: Task[Order]) -> None:
            self.fired(task, "reminded")

        @app.handler("order.cancel")
        async def cancel(task: Task[Order]) -> None:
            await self._set_status(task, "cancelled")

        @app.handler("order.close")
        async def close(task: Task[Order]) -> None:
            await self._set_status(task, "closed")

        self.remind, self.cancel, self.close = remind, cancel, close

    def thing_of(self, record: Record) -> str:
        return record.group or record.key

    async def _set_status(self, task: Task[Order], status: str) -> None:
        async with task.transaction() as database:  # the status changes and the task is done, or neither
            database.execute(
                "UPDATE demo_order SET status = ? WHERE number = ? AND status <> 'paid'", (status, task.payload.number)
            )
        self.fired(task, status)

    @act("0m")
    async def three_people_order(self) -> None:
        for number in (1041, 1042, 1043):
            await self._order(number)

    async def _order(self, number: int) -> None:
        """The order and what is to become of it, in one transaction: there is never one without the other."""
        order, group = Order(number), f"order-{number}"
        async with self.transaction() as database, self.app.using(database):
            database.execute("INSERT OR REPLACE INTO demo_order VALUES (?, 'unpaid')", (number,))
            for handler, delay in ((self.remind, "5m"), (self.cancel, "15m"), (self.close, "24h")):
                await handler.schedule(order, key=str(number), group=group, at=self.pace.after(delay, since="0m"))
        self.said(group, "ordered")

    async def _pay(self, number: int) -> None:
        async with self.transaction() as database, self.app.using(database):
            database.execute("UPDATE demo_order SET status = 'paid' WHERE number = ?", (number,))
            answers = await self.app.cancel_group(f"order-{number}")
        self.called_off(f"order-{number}", f"paid: {len(answers)} cancelled")

    @act("3m")
    async def one_pays_at_once(self) -> None:
        await self._pay(1041)

    @act("8m")
    async def one_pays_when_reminded(self) -> None:
        await self._pay(1042)
