"""Payment notifications: the merchant's system is told until it has heard, at growing intervals, then it is given up.

Three minutes at a time a third of the merchants answer badly, each in its own way. What has died waits for somebody to
redrive it; the support does so now and then, for merchants that are well again.
"""

from __future__ import annotations

import asyncio
from random import Random

import msgspec

from bide.app import Bide
from bide.cli.demo.story import Story
from bide.core.instants import Millis
from bide.core.outcomes import Retry
from bide.core.records import NewTask, Page
from bide.core.retry import Ladder
from bide.core.tasks import Task
from bide.engine.acting import acting_as
from bide.engine.arguments import filter_of

TOPIC = "payment.notify"
MERCHANTS = (
    "book-shop", "tea-house", "noodle-bar", "flower-stall", "bike-repair", "print-works", "cheese-corner", "shoe-maker",
    "toy-store", "garden-centre", "record-shop", "bakery",
)  # fmt: skip
_PERIOD: Millis = 3 * 60_000
"""How long a merchant is well, or ill."""
_ANSWERS_BADLY = 0.8
"""So many of the tries, while it is ill."""
_ILLNESSES = ("slow", "down", "signature")


class Payment(msgspec.Struct):
    order: int
    cents: int

    @property
    def merchant(self) -> str:
        """The shop that gets the money."""
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
        first = await self.notebook.numbers(3 * len(MERCHANTS))
        await self.app.schedule_many(self.new(Payment(number, 1_000)) for number in first[::3])
        await self.now_and_then(180, self._redrive_some)

    def new(self, payment: Payment) -> NewTask:
        """Tell the merchant now."""
        return self.notify.new(payment, key=str(payment.order), group=payment.merchant, delay="0s")

    async def _redrive_some(self) -> None:
        """Bo looks through the dead, the longest dead first."""
        found = await self.app.find_page(filter_of(TOPIC, "dead", None, None, None), Page(limit=200))
        now = self.app.clock.now()
        well = [one.ref for one in found.tasks if one.group is not None and illness_of(one.group, now) is None]
        with acting_as("bo"):
            await self.app.redrive_many(well[:12])


def illness_of(merchant: str, at: Millis) -> str | None:
    """The illness of a merchant at that time: slow, down, or refusing signatures; None: it is well."""
    if merchant not in MERCHANTS:
        return None
    period, place = at // _PERIOD, MERCHANTS.index(merchant)
    return _ILLNESSES[(place // 3 + period) % 3] if (place + period) % 3 == 0 else None
