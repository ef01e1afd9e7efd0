"""A mass message: 41,000 customers are reminded of their coupon tomorrow at 20:00:00, all in one second."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from functools import partial

import msgspec

from bide.app import Bide
from bide.cli.demo.story import Story, millis_of
from bide.core.instants import as_datetime
from bide.core.records import NewTask
from bide.core.tasks import Task

AUDIENCE = 41_000
_HOUR = 20


class Coupon(msgspec.Struct):
    customer: int
    code: str = "SUMMER"


class Coupons(Story):
    topics = ("coupon.remind",)

    def define(self, app: Bide) -> None:
        @app.handler("coupon.remind", concurrency=500, keep_done="0s", keep_cancelled="15m")
        async def remind(task: Task[Coupon]) -> None:
            """A message to the customer."""

        self.remind = remind

    async def prepare(self) -> None:
        """The evening is tomorrow's, or that for which an earlier run has made them."""
        made = await self.notebook.made_until("coupons")
        self.evening = self.at(1, _HOUR) if made is None else as_datetime(made).astimezone()

    async def play(self) -> None:
        """When one has passed, the next day's is made."""
        while True:
            await self.fill("coupons", partial(self._all, self.evening), until=self.evening)
            await self.until(millis_of(self.evening + timedelta(minutes=1)))
            await self.prepare()

    def _all(self, at: datetime) -> Iterator[NewTask]:
        day = f"{at:%m%d}"
        return (
            self.remind.new(Coupon(customer), key=f"{day}-{customer:05}", at=at, on_conflict="keep")
            for customer in range(AUDIENCE)
        )
