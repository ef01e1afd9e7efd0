"""Unpaid orders: reminded, then closed, unless they are paid before; and now and then a sale with one deadline for all.

Two thirds are paid, which cancels what is to become of the order. The deadline of a sale falls on one second, and
`order.close` works on eight at a time only, 25 ms each: so the last of five hundred is late by a second or two, and its
page in the console tells why.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from random import Random

import msgspec

from bide.app import Bide
from bide.cli.demo.payments import Payment, Payments
from bide.cli.demo.story import Notebook, Story
from bide.core.instants import Millis, as_datetime
from bide.core.records import NewTask
from bide.core.tasks import Task
from bide.engine.acting import acting_as

SALE = 1_500
"""Orders of a sale."""
_CROWD = 75
"""So many of them in one transaction."""
_SELLS_FOR: Millis = 10_000
"""In which they are made."""
_SALE_EVERY: Millis = 5 * 60_000
_AHEAD: Millis = 50_000
"""How long before the deadline a sale begins."""
_TOLD_EVERY: Millis = 500
"""The bank tells of what was paid twice a second."""


class Order(msgspec.Struct):
    number: int
    cents: int
    placed: Millis
    due: Millis
    sale: bool = False


class Orders(Story):
    def __init__(self, app: Bide, notebook: Notebook, payments: Payments) -> None:
        super().__init__(app, notebook)
        self.payments = payments
        self.sale: range
        """The numbers of the next sale's orders."""
        self.sale_ends: Millis

    def define(self, app: Bide) -> None:
        @app.handler("order.remind", keep_done="10m")
        async def remind(task: Task[Order]) -> None:
            """A message to the customer."""

        @app.handler("order.close", concurrency=8, retry="quick")
        async def close(task: Task[Order]) -> None:
            await asyncio.sleep(0.025)  # the stock gets its goods back
            order = task.payload
            if not order.sale:
                await self.archive.schedule(order, key=task.key, group=task.group, delay="20m")

        @app.handler("order.archive", keep_done="10m")
        async def archive(task: Task[Order]) -> None:
            """Out of the shop's list."""

        self.remind, self.close, self.archive = remind, close, archive

    async def prepare(self) -> None:
        """The first sale has its numbers already, so that its last unpaid order can be told."""
        self.sale = await self.notebook.numbers(SALE)
        now = self.app.clock.now()
        self.sale_ends = -(-(now + _AHEAD + 5_000) // 10_000) * 10_000  # a whole ten seconds on the clock
        async for task in self.app.find(topic="order.close", state="waiting"):
            with suppress(msgspec.MsgspecError):  # no order of ours: somebody tries what happens to it
                self._customer(msgspec.json.decode(task.payload_bytes, type=Order))

    @property
    def last_of_the_sale(self) -> int:
        """The order that will be closed last, since it is not paid."""
        return max(number for number in self.sale if not is_paid(number))

    async def play(self) -> None:
        async with asyncio.TaskGroup() as both:
            both.create_task(self.now_and_then(1 / 3, self._order))
            both.create_task(self._sales())  # waits for a store that is away, as the other does: neither ends

    async def _order(self) -> None:
        [number] = await self.notebook.numbers()
        now = self.app.clock.now()
        await self._take([_order(number, now, now + self.chance.randrange(20_000, 90_000))])

    async def _sales(self) -> None:
        while True:
            await self.until(self.sale_ends - _AHEAD)
            crowds = [self.sale[place : place + _CROWD] for place in range(0, SALE, _CROWD)]
            for crowd in crowds:
                begun = self.app.clock.now()
                orders = [_order(number, begun, self.sale_ends, sale=True) for number in crowd]
                await self.patiently(partial(self._take, orders))
                await self.until(begun + _SELLS_FOR * _CROWD // SALE)
            await self.patiently(self._next_sale)

    async def _next_sale(self) -> None:
        self.sale = await self.notebook.numbers(SALE)
        self.sale_ends += _SALE_EVERY

    async def _take(self, orders: Sequence[Order]) -> None:
        """Orders come in: each with what is to become of it, in one transaction; its customer pays in time, or not."""
        tasks: list[NewTask] = []
        for order in orders:
            key = str(order.number)
            group = f"order-{key}"
            tasks.append(self.close.new(order, key=key, group=group, at=as_datetime(order.due)))
            if not order.sale:
                reminder = as_datetime(order.placed + round(0.4 * (order.due - order.placed)))
                tasks.append(self.remind.new(order, key=key, group=group, at=reminder))
        await self.app.schedule_many(tasks)
        for order in orders:
            self._customer(order)

    def _customer(self, order: Order) -> None:
        if is_paid(order.number) and self.app.clock.now() < order.due:
            paid = order.placed + round(Random(order.number).uniform(0.1, 0.95) * (order.due - order.placed))
            self.person(self._pay(order, -(-paid // _TOLD_EVERY) * _TOLD_EVERY))

    async def _pay(self, order: Order, at: Millis) -> None:
        await self.until(at)
        topics = ("order.close",) if order.sale else ("order.close", "order.remind")
        with acting_as("shop"):  # all calls of one moment become one transaction
            await asyncio.gather(*(self.app.cancel(topic, str(order.number)) for topic in topics))
        if not order.sale and order.number % 3 == 1:
            await self.app.schedule_new(self.payments.new(Payment(order.number, order.cents)))


def _order(number: int, placed: Millis, due: Millis, *, sale: bool = False) -> Order:
    return Order(number, 500 + 17 * number % 20_000, placed, due, sale)


def is_paid(number: int) -> bool:
    """Two of three are."""
    return number % 3 != 0
