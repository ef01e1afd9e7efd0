"""Flash sale: 20,000 orders at once (--all: 100,000), each closed after 10 minutes unless it is paid, as most are."""

import asyncio
import sqlite3
import sys
import time
from dataclasses import dataclass
from tempfile import TemporaryDirectory

from bide import Bide, ScaledClock, Task

ORDERS, SPEED = (100_000, 20) if "--all" in sys.argv else (20_000, 100)  # ten minutes take 30 s or 6 s
folder = TemporaryDirectory()  # gone when the program ends
app = Bide(f"sqlite:///{folder.name}/sale.db", clock=ScaledClock(SPEED))
shop = sqlite3.connect(":memory:", isolation_level=None)
shop.execute("CREATE TABLE orders (number INTEGER PRIMARY KEY, status TEXT DEFAULT 'unpaid')")
lateness: list[float] = []


@dataclass
class Order:
    number: int


@app.handler("order.close", concurrency=500, keep_done="0s", keep_cancelled="0s")
async def close(task: Task[Order]) -> None:
    lateness.append(task.lateness.total_seconds() / SPEED * 1000)
    shop.execute("UPDATE orders SET status = 'closed' WHERE number = ? AND status = 'unpaid'", (task.payload.number,))


async def place(number: int) -> None:
    shop.execute("INSERT INTO orders (number) VALUES (?)", (number,))
    await close.schedule(Order(number), key=str(number), delay="10m")


async def pay(number: int) -> None:
    if shop.execute("UPDATE orders SET status = 'paid' WHERE number = ? AND status = 'unpaid'", (number,)).rowcount:
        await close.cancel(str(number))


async def main() -> None:
    print(f"10 minutes = {600 / SPEED:g} s")
    async with app, app.worker() as worker:
        for verb, act, count in (("placed", place, ORDERS), ("paid", pay, ORDERS * 19 // 20)):
            begun = time.perf_counter()
            await asyncio.gather(*map(act, range(count)))  # each for itself: bide folds them into few transactions
            took = time.perf_counter() - begun
            print(f"{count:,} orders {verb} in {took:.2f} s: {count / took:,.0f} a second, each of them durable")
        await worker.until_empty()
        assert (await app.tally()).number() == 0, "nothing is left behind"
    print(f"{len(lateness):,} orders closed, due after 10 minutes, {min(lateness):.0f} to {max(lateness):.0f} ms late")
    outcome = dict(shop.execute("SELECT status, count(*) FROM orders GROUP BY status"))
    assert outcome == {"paid": ORDERS * 19 // 20, "closed": ORDERS // 20}, outcome


asyncio.run(main())
