"""Orders and their payments.

Unpaid orders are reminded, then closed; now and then there is a sale with one deadline for all its orders. Two thirds
are paid, which cancels the reminder and the closing. `order.close` runs eight handlers at a time, 25 ms each: so the
last of five hundred orders of a sale is late by a second or two, and its page in the console explains why.

A payment is notified to the merchant's system, at growing intervals until that has answered, then given up. A third of
the merchants fail for three minutes at a time, each in its own way. Now and then the support redrives the dead
notifications of merchants that have recovered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from random import Random

import msgspec

from bide.app import Bide
from bide.cli.demo.story import DemoState, Story
from bide.core.instants import Millis, as_datetime
from bide.core.outcomes import Retry
from bide.core.records import NewTask, Page
from bide.core.retry import Ladder
from bide.core.tasks import Task
from bide.engine.session import acting_as
from bide.engine.verbs import filter_of

TOPIC = "payment.notify"
MERCHANTS = (
    "book-shop", "tea-house", "noodle-bar", "flower-stall", "bike-repair", "print-works", "cheese-corner", "shoe-maker",
    "toy-store", "garden-centre", "record-shop", "bakery",
)  # fmt: skip
_PERIOD: Millis = 3 * 60_000
"""How long a merchant answers well, or fails."""
_ANSWERS_BADLY = 0.8
"""The share of tries that fail, while it does."""
_ILLNESSES = ("slow", "down", "signature")


class Payment(msgspec.Struct):
    order: int
    cents: int

    @property
    def merchant(self) -> str:
        return MERCHANTS[self.order // 3 % len(MERCHANTS)]


class Payments(Story):
    def define(self, app: Bide) -> None:
        ladder = Ladder("2s", "5s", "15s", "30s")

        @app.handler(TOPIC, retry=ladder, timeout="500ms", concurrency=50, keep_done="10m", keep_dead="2h")
        async def notify(task: Task[Payment]) -> None:
            illness = illness_of(task.payload.merchant, app.clock.now())
            if illness is None or Random(f"{task.key} {task.attempt}").random() > _ANSWERS_BADLY:
                return
            if illness == "slow":
                await asyncio.sleep(5)  # longer than the handler may take
            if illness == "down":
                raise Retry("the merchant answered 503 Service Unavailable")
            raise Retry("the merchant answered 401: bad signature")

        self.notify = notify

    async def play(self) -> None:
        first = await self.state.numbers(3 * len(MERCHANTS))
        await self.app.schedule_many(self.new(Payment(number, 1_000)) for number in first[::3])
        await self.now_and_then(180, self._redrive_some)

    def new(self, payment: Payment) -> NewTask:
        """A task that notifies the merchant now."""
        return self.notify.new(payment, key=str(payment.order), group=payment.merchant, delay="0s")

    async def _redrive_some(self) -> None:
        """Bo redrives dead notifications, the oldest deaths first."""
        found = await self.app.find_page(filter_of(TOPIC, "dead", None, None, None), Page(limit=200))
        now = self.app.clock.now()
        well = [one.ref for one in found.tasks if one.group is not None and illness_of(one.group, now) is None]
        with acting_as("bo"):
            await self.app.redrive_many(well[:12])


def illness_of(merchant: str, at: Millis) -> str | None:
    """How a merchant fails at that time: slow, down, or refusing signatures; None: it does not."""
    if merchant not in MERCHANTS:
        return None
    period, place = at // _PERIOD, MERCHANTS.index(merchant)
    return _ILLNESSES[(place // 3 + period) % 3] if (place + period) % 3 == 0 else None


SALE = 1_500
"""Orders of a sale."""
_CROWD = 75
"""How many of them are scheduled in one transaction."""
_SELLS_FOR: Millis = 10_000
"""Milliseconds within which they are placed."""
_SALE_EVERY: Millis = 5 * 60_000
_AHEAD: Millis = 50_000
"""How long before the deadline a sale begins."""
_TOLD_EVERY: Millis = 500
"""The bank reports payments twice a second."""


class Order(msgspec.Struct):
    number: int
    cents: int
    placed: Millis
    due: Millis
    sale: bool = False


class Orders(Story):
    def __init__(self, app: Bide, state: DemoState, payments: Payments) -> None:
        super().__init__(app, state)
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
        """Reserve the numbers of the first sale, so that its last unpaid order is known."""
        self.sale = await self.state.numbers(SALE)
        now = self.app.clock.now()
        self.sale_ends = -(-(now + _AHEAD + 5_000) // 10_000) * 10_000  # a whole ten seconds on the clock
        async for task in self.app.find(topic="order.close", state="waiting"):
            with suppress(msgspec.MsgspecError):  # not an order of the demo: the viewer scheduled it
                self._customer(msgspec.json.decode(task.payload_bytes, type=Order))

    @property
    def last_of_the_sale(self) -> int:
        """The last unpaid order of the sale, which is closed last."""
        return max(number for number in self.sale if not is_paid(number))

    async def play(self) -> None:
        async with asyncio.TaskGroup() as both:
            both.create_task(self.now_and_then(1 / 3, self._order))
            both.create_task(self._sales())  # both wait while the store is unavailable: neither ends

    async def _order(self) -> None:
        [number] = await self.state.numbers()
        now = self.app.clock.now()
        await self._take([_order(number, now, now + self.chance.randrange(20_000, 90_000))])

    async def _sales(self) -> None:
        while True:
            await self.until(self.sale_ends - _AHEAD)
            crowds = [self.sale[place : place + _CROWD] for place in range(0, SALE, _CROWD)]
            for crowd in crowds:
                begun = self.app.clock.now()
                orders = [_order(number, begun, self.sale_ends, sale=True) for number in crowd]
                await self.retry_while_away(partial(self._take, orders))
                await self.until(begun + _SELLS_FOR * _CROWD // SALE)
            await self.retry_while_away(self._next_sale)

    async def _next_sale(self) -> None:
        self.sale = await self.state.numbers(SALE)
        self.sale_ends += _SALE_EVERY

    async def _take(self, orders: Sequence[Order]) -> None:
        """Place orders: schedule their tasks in one transaction, and let the customers pay in time, or not."""
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
        with acting_as("shop"):  # concurrent calls become one transaction
            await asyncio.gather(*(self.app.cancel(topic, str(order.number)) for topic in topics))
        if not order.sale and order.number % 3 == 1:
            await self.app.schedule_new(self.payments.new(Payment(order.number, order.cents)))


def _order(number: int, placed: Millis, due: Millis, *, sale: bool = False) -> Order:
    return Order(number, 500 + 17 * number % 20_000, placed, due, sale)


def is_paid(number: int) -> bool:
    return number % 3 != 0
