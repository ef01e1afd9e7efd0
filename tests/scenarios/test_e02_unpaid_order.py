"""Unpaid order: three steps by the clock, all called off by a payment; the order and its tasks are one transaction."""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import pytest

from bide import Answer, Bide, Task
from bide.testing.time_machine import TimeMachine

STEPS = {
    "order.remind": ("5m", "UPDATE orders SET reminders = reminders + 1 WHERE number = ? AND status = 'unpaid'"),
    "order.cancel": ("15m", "UPDATE orders SET status = 'cancelled' WHERE number = ? AND status = 'unpaid'"),
    "order.close": ("1d", "UPDATE orders SET status = 'closed' WHERE number = ? AND status = 'cancelled'"),
}


@dataclass
class Order:
    number: int


class Shop:
    """The orders, and what is done with them."""

    def __init__(self, app: Bide, database: sqlite3.Connection) -> None:
        self.app = app
        self.database = database
        database.execute(
            "CREATE TABLE orders (number INTEGER PRIMARY KEY, status TEXT DEFAULT 'unpaid', reminders INT DEFAULT 0)"
        )
        self.before: Callable[[Task[Order]], Awaitable[object]] | None = None
        """What happens once a step is under way, and before its transaction."""
        for topic in STEPS:
            app.handler(topic, retry="quick")(self.step)

    async def step(self, task: Task[Order]) -> None:
        if self.before is not None:
            await self.before(task)
        async with task.transaction() as conn:
            conn.execute(STEPS[task.topic][1], (task.payload.number,))

    async def place(self, number: int) -> None:
        with self.database:
            self.database.execute("INSERT INTO orders (number) VALUES (?)", (number,))
            async with self.app.using(self.database):
                for topic, (delay, _) in STEPS.items():
                    await self.app.schedule(topic, Order(number), key=f"{number}", group=f"order-{number}", delay=delay)

    async def pay(self, number: int) -> list[Answer]:
        with self.database:
            pay = "UPDATE orders SET status = 'paid' WHERE number = ? AND status = 'unpaid'"
            if not self.database.execute(pay, (number,)).rowcount:
                return []
            async with self.app.using(self.database):
                return await self.app.cancel_group(f"order-{number}")

    @property
    def orders(self) -> dict[int, tuple[str, int]]:
        rows = self.database.execute("SELECT number, status, reminders FROM orders")
        return {number: (status, reminders) for number, status, reminders in rows}


@pytest.fixture
def shop(bide_app: Bide, database: sqlite3.Connection) -> Shop:
    return Shop(bide_app, database)


async def test_unpaid_it_is_reminded_cancelled_and_closed(shop: Shop, file_time: TimeMachine) -> None:
    await shop.place(1)
    begin = file_time.now
    fired = await file_time.advance("5m")
    assert shop.orders == {1: ("unpaid", 1)}
    fired += await file_time.advance("10m")
    assert shop.orders == {1: ("cancelled", 1)}
    fired += await file_time.advance("1d")
    assert shop.orders == {1: ("closed", 1)}
    assert [(one.topic, (one.at - begin).total_seconds() / 60) for one in fired] == [
        ("order.remind", 5),
        ("order.cancel", 15),
        ("order.close", 1440),
    ]


@pytest.mark.parametrize(
    ("after", "reminders", "called_off"), [("0s", 0, 3), ("5m", 1, 2), ("14m59s", 1, 2)], ids=["0", "5m", "14m59s"]
)
async def test_a_payment_calls_off_what_is_left(
    shop: Shop, file_time: TimeMachine, after: str, reminders: int, called_off: int
) -> None:
    await shop.place(1)
    await shop.place(2)
    await file_time.advance(after)
    assert [answer.result for answer in await shop.pay(1)] == ["cancelled"] * called_off
    await file_time.advance("2d")
    assert shop.orders == {1: ("paid", reminders), 2: ("closed", 1)}, "the other order is not touched"
    assert not await file_time.waiting()


async def test_a_payment_while_the_cancellation_is_under_way_wins(shop: Shop, file_time: TimeMachine) -> None:
    answers: dict[str, str] = {}

    async def pay(task: Task[Order]) -> None:
        if task.topic == "order.cancel":
            answers.update({answer.record.topic: answer.result for answer in await shop.pay(1) if answer.record})

    shop.before = pay
    await shop.place(1)
    await file_time.advance("2d")
    assert answers == {"order.cancel": "cancelled_while_leased", "order.close": "cancelled"}
    assert shop.orders == {1: ("paid", 1)}
    assert not await file_time.waiting()
