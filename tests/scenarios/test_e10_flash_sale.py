"""Flash sale: thousands of single calls at once, most of them undone before their time, and nothing left behind."""

from __future__ import annotations

import asyncio
import sqlite3
from collections import Counter
from dataclasses import dataclass

import pytest

from bide import Bide, Handler, Task
from bide.core.names import RESERVED_TOPICS
from bide.testing.time_machine import TimeMachine

ORDERS = 5_000


@dataclass
class Order:
    number: int


class Sale:
    """The orders, and what is done with them."""

    def __init__(self, app: Bide) -> None:
        self.status: dict[int, str] = {}
        self.closings: Counter[int] = Counter()

        @app.handler("order.close", keep_done="0s", keep_cancelled="0s")
        async def close(task: Task[Order]) -> None:
            self.closings[task.payload.number] += 1
            if self.status[task.payload.number] == "unpaid":
                self.status[task.payload.number] = "closed"

        self.close: Handler[Order] = close

    async def place(self, number: int) -> str:
        self.status[number] = "unpaid"
        return (await self.close.schedule(Order(number), key=str(number), delay="10m")).result.value

    async def pay(self, number: int) -> str:
        self.status[number] = "paid"
        return (await self.close.cancel(str(number))).result.value


@pytest.fixture
def sale(bide_app: Bide) -> Sale:
    return Sale(bide_app)


async def left(app: Bide) -> int:
    return (await app.tally()).number()


async def test_most_are_paid_and_the_rest_are_closed(
    bide_app: Bide, sale: Sale, file_time: TimeMachine, database: sqlite3.Connection
) -> None:
    assert Counter(await asyncio.gather(*map(sale.place, range(ORDERS)))) == {"created": ORDERS}
    assert await left(bide_app) == ORDERS
    assert await file_time.advance("9m59s") == []
    paid = [number for number in range(ORDERS) if number % 20]
    assert Counter(await asyncio.gather(*map(sale.pay, paid))) == {"cancelled": len(paid)}
    fired = await file_time.advance("1s")
    assert sale.closings == dict.fromkeys(range(0, ORDERS, 20), 1)
    assert {one.at for one in fired} == {file_time.now}
    assert Counter(sale.status.values()) == {"paid": len(paid), "closed": ORDERS - len(paid)}
    assert await left(bide_app) == 0
    assert rows(database) == {"bide_task": 0, "bide_event": 0, "bide_worker": 0}, "nothing is left behind"


async def test_paid_and_closed_in_one_rush_no_order_is_both(bide_app: Bide, sale: Sale, bide_time: TimeMachine) -> None:
    await asyncio.gather(*map(sale.place, range(1_000)))
    answers = dict(enumerate((await asyncio.gather(bide_time.advance("10m"), *map(sale.pay, range(1_000))))[1:]))
    assert set(answers.values()) <= {"cancelled", "cancelled_while_leased", "not_found"}
    assert not [number for number in sale.closings if answers[number] == "cancelled"], "no delivery starts after that"
    assert not [number for number, answer in answers.items() if answer == "not_found" and sale.closings[number] != 1]
    assert await left(bide_app) == 0


def rows(database: sqlite3.Connection) -> dict[str, int]:
    """How many rows the tables have that grow with what is done; what a minute was like is one row of bide's own."""
    tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    own = ", ".join(f"'{topic}'" for topic in RESERVED_TOPICS)
    return {
        name: database.execute(
            f'SELECT count(*) FROM "{name}"' + (f" WHERE topic NOT IN ({own})" if name == "bide_task" else "")
        ).fetchone()[0]
        for name in tables
        if name.startswith("bide_") and name not in {"bide_token", "bide_meta", "bide_wake"}
    }
