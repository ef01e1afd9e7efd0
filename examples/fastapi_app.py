"""Orders that close by themselves if nobody pays, in FastAPI: each order and its timer are one transaction.

`uvicorn fastapi_app:api` serves it, `python fastapi_app.py` shows it. SHOP_DATABASE may name a PostgreSQL database, in
which `bide migrate` has been run; by default it is a SQLite file here.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import Depends, FastAPI, HTTPException
from httpx import ASGITransport, AsyncClient
from sqlalchemy import Column, Connection, Integer, MetaData, String, Table, create_engine, insert, select, update

from bide import Bide, Task

DATABASE = os.environ.get("SHOP_DATABASE", "sqlite:///shop.db")
CLOSES_AFTER = os.environ.get("SHOP_CLOSES_AFTER", "1s" if __name__ == "__main__" else "15m")
engine = create_engine(DATABASE.partition("?")[0].replace("postgresql://", "postgresql+psycopg://"))
tables = MetaData()
orders = Table("orders", tables, Column("id", Integer, primary_key=True), Column("status", String))
shop = Bide(DATABASE)


@shop.handler("order.close")
def close(task: Task[int]) -> None:  # a plain function: it runs in a thread
    with engine.begin() as connection:
        connection.execute(
            update(orders).where(orders.c.id == task.payload, orders.c.status == "unpaid").values(status="closed")
        )


@asynccontextmanager
async def lifespan(api: FastAPI) -> AsyncIterator[None]:
    tables.create_all(engine)
    async with shop.worker():  # or leave the work to processes of its own: `bide work fastapi_app:shop`
        yield
    engine.dispose()


def transaction() -> Iterator[Connection]:
    with engine.begin() as connection:
        yield connection


# "function": committed before the answer goes out, and not after
Transaction = Annotated[Connection, Depends(transaction, scope="function")]
api = FastAPI(lifespan=lifespan)


@api.post("/orders", status_code=201)
def place(connection: Transaction, *, sold_out: bool = False) -> dict[str, int]:
    number = connection.execute(insert(orders).values(status="unpaid").returning(orders.c.id)).scalar_one()
    shop.sync.using(connection).schedule("order.close", number, key=f"{number}", delay=CLOSES_AFTER)
    if sold_out:
        raise HTTPException(409, "sold out")  # rolls back the order, and its timer with it
    return {"number": number}


@api.post("/orders/{number}/pay")
def pay(number: int, connection: Transaction) -> dict[str, bool]:
    paid = update(orders).where(orders.c.id == number, orders.c.status == "unpaid").values(status="paid")
    if connection.execute(paid).rowcount == 0:
        raise HTTPException(409, "not to be paid any more")
    return {"timer_cancelled": shop.sync.using(connection).cancel("order.close", f"{number}").ok}


@api.get("/orders/{number}")
def look(number: int, connection: Transaction) -> dict[str, str | None]:
    return {"status": connection.execute(select(orders.c.status).where(orders.c.id == number)).scalar()}


async def show() -> None:
    async with lifespan(api), AsyncClient(transport=ASGITransport(api), base_url="http://shop") as client:
        kept, paid = [(await client.post("/orders")).json()["number"] for _ in range(2)]
        print("sold out:", (await client.post("/orders?sold_out=true")).status_code)
        print("paid:", (await client.post(f"/orders/{paid}/pay")).json())
        await asyncio.sleep(1.5)
        print("not paid:", (await client.get(f"/orders/{kept}")).json()["status"])


if __name__ == "__main__":
    asyncio.run(show())
