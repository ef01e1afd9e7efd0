"""Outbox: the orders rest in a database that bide does not share, so what is to happen later is written beside them.

The order and its line in the outbox are one transaction. A relay takes the lines to bide, again and again until it has
been done, and says so loudly when one does not get there.
"""

import asyncio
import json
import sqlite3
import time
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from tempfile import TemporaryDirectory

from bide import Bide, BideError, Task

TRIES, FIRST_PAUSE, LONGEST_PAUSE = 5, 0.02, 2.0  # in earnest: 5 tries, from 1 s to 5 minutes
folder = TemporaryDirectory()  # gone when the program ends
app = Bide(f"sqlite:///{folder.name}/tasks.db")  # any store: it knows nothing of the shop
shop = sqlite3.connect(f"{folder.name}/shop.db")  # any database: bide knows nothing of it
shop.execute("CREATE TABLE orders (number INTEGER PRIMARY KEY, status TEXT DEFAULT 'unpaid')")
shop.execute("""CREATE TABLE outbox (line INTEGER PRIMARY KEY, topic TEXT, key TEXT, payload TEXT, due TEXT,
    tries INTEGER DEFAULT 0, next_try REAL DEFAULT 0)""")
alarms: list[str] = []


# what is relayed twice, since the relay died in between, meets the first while that is remembered
@app.handler("order.cancel", keep_done="1d")
async def cancel(task: Task[int]) -> None:
    with shop:  # the effect looks at the status that it is for: that is what makes a second one harmless
        shop.execute("UPDATE orders SET status = 'cancelled' WHERE number = ? AND status = 'unpaid'", (task.payload,))


def place(number: int, topic: str = "order.cancel") -> None:
    due = (datetime.now(UTC) + timedelta(milliseconds=300)).isoformat()  # an instant: a late relay shifts nothing
    with shop:  # the order and the promise to do something about it: both, or neither
        shop.execute("INSERT INTO orders (number) VALUES (?)", (number,))
        line = (topic, f"order-{number}", json.dumps(number), due)
        shop.execute("INSERT INTO outbox (topic, key, payload, due) VALUES (?, ?, ?, ?)", line)


async def relay_some() -> None:
    """Every line whose turn it is; of one key only the first that is left, so that their order is kept."""
    head = "line = (SELECT min(line) FROM outbox AS other WHERE other.key = outbox.key)"
    ready = f"SELECT line, topic, key, payload, due, tries FROM outbox WHERE next_try <= ? AND {head} LIMIT 100"
    for line, topic, key, payload, due, tries in shop.execute(ready, (time.time(),)).fetchall():
        try:
            await app.schedule(topic, json.loads(payload), key=key, at=due, on_conflict="keep")
        except BideError as error:
            next_try = time.time() + min(LONGEST_PAUSE, FIRST_PAUSE * 2**tries)
            with shop:
                shop.execute("UPDATE outbox SET tries = tries + 1, next_try = ? WHERE line = ?", (next_try, line))
            if tries + 1 == TRIES:  # it goes on trying: but somebody must know
                alarms.append(f"line {line} of the outbox was not taken {TRIES} times: {error}")
        else:
            with shop:
                shop.execute("DELETE FROM outbox WHERE line = ?", (line,))


async def main() -> None:
    place(1)
    place(2, topic="")  # nobody can take this line, and the others do not wait for it
    place(4)
    with suppress(ZeroDivisionError), shop:
        shop.execute("INSERT INTO orders (number) VALUES (3)")
        raise ZeroDivisionError  # rolled back: nothing was ever promised
    async with app, app.worker() as worker:
        while not alarms:  # in earnest: for ever, in one process or in several
            await relay_some()
            await asyncio.sleep(0.02)
        await worker.until_empty()
    print(*alarms)
    print(orders := shop.execute("SELECT number, status FROM orders ORDER BY number").fetchall())
    assert orders == [(1, "cancelled"), (2, "unpaid"), (4, "cancelled")]
    assert shop.execute("SELECT line, tries FROM outbox").fetchall() == [(2, TRIES)]


asyncio.run(main())
