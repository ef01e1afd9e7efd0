"""Unpaid order: a reminder after 5 minutes, cancelled after 15, closed after a day; a payment calls all three off."""

import asyncio
import sqlite3
from dataclasses import dataclass
from tempfile import TemporaryDirectory

from bide import Bide, ScaledClock, Task

SPEED = 17_280  # a day of the story takes 5 s
STEPS = {  # every effect looks at the status that it is for, so that a late one changes nothing
    "order.remind": ("5m", "UPDATE orders SET reminders = reminders + 1 WHERE number = ? AND status = 'unpaid'"),
    "order.cancel": ("15m", "UPDATE orders SET status = 'cancelled' WHERE number = ? AND status = 'unpaid'"),
    "order.close": ("1d", "UPDATE orders SET status = 'closed' WHERE number = ? AND status != 'paid'"),
}
folder = TemporaryDirectory()  # gone when the program ends
app = Bide(f"sqlite:///{folder.name}/shop.db", clock=ScaledClock(SPEED))
shop = sqlite3.connect(f"{folder.name}/shop.db")  # the orders and their tasks rest in one file
shop.execute("CREATE TABLE orders (number INTEGER PRIMARY KEY, status TEXT DEFAULT 'unpaid', reminders INT DEFAULT 0)")


@dataclass
class Order:
    number: int


async def take_step(task: Task[Order]) -> None:
    late = task.lateness.total_seconds() / SPEED
    async with task.transaction() as conn:  # the effect and the end of the task: both, or neither
        conn.execute(STEPS[task.topic][1], (task.payload.number,))
    print(f"order {task.key}: {task.topic}, due {task.due_at:%a %H:%M:%S}, {late * 1000:.0f} ms late")


async def place(order: Order) -> None:
    with shop:  # the order and its three tasks: all of them, or none
        shop.execute("INSERT INTO orders (number) VALUES (?)", (order.number,))
        async with app.using(shop):
            for topic, (delay, _) in STEPS.items():
                await app.schedule(topic, order, key=f"{order.number}", group=f"order-{order.number}", delay=delay)


async def main() -> None:
    print(f"1 day = {86_400 / SPEED:g} s")
    for topic in STEPS:
        app.handler(topic)(take_step)
    async with app:
        await place(Order(1))
        await place(Order(2))
        with shop:  # a customer pays
            shop.execute("UPDATE orders SET status = 'paid' WHERE number = 2 AND status = 'unpaid'")
            async with app.using(shop):
                print("order 2 is paid:", *(answer.result for answer in await app.cancel_group("order-2")))
        async with app.worker() as worker:
            await worker.until_empty()
    [(*first, reminders), second] = shop.execute("SELECT * FROM orders")
    assert (first, second) == ([1, "closed"], (2, "paid", 0))
    assert reminders <= 1  # none where all three came so late that the order was cancelled before


asyncio.run(main())
