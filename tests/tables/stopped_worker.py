"""A worker in a process of its own, which writes its effect, says so, and then hangs until it is killed.

`python stopped_worker.py URL TABLE LOG`
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.tables.writing import write
from tests.waiting import forever

from bide import Bide, Row, Sql, TableSource

url, table, log = sys.argv[1:]
app = Bide(url)
watch = app.watch(
    TableSource(table=table, due="due", where="status = 2", changes={"status": 3, "times": Sql("times + 1")})
)


@watch.handler
async def publish(row: Row) -> None:
    await write(row, f"INSERT INTO {log} VALUES ({row.id})")
    print("within", flush=True)
    await forever()


async def main() -> None:
    async with app.worker():
        await forever()


asyncio.run(main())
