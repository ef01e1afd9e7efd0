"""Subscriptions: each renews itself every 30 days, at a time of day at which people subscribe."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from bide.app import Bide
from bide.cli.demo.story import Story
from bide.core.outcomes import Done
from bide.core.records import NewTask
from bide.core.tasks import Task
from bide.engine.acting import acting_as

SUBSCRIBERS = 20_000
_DAYS = 30


class Subscription(msgspec.Struct):
    customer: int
    plan: str


class Subscriptions(Story):
    topics = ("subscription.renew",)

    def define(self, app: Bide) -> None:
        @app.handler("subscription.renew")
        async def renew(task: Task[Subscription]) -> Done:
            return Done(again_in=f"{_DAYS}d")

        self.renew = renew

    async def play(self) -> None:
        await self.fill("subscriptions", self._all)
        await self.now_and_then(60, self._one_more_month)

    def _all(self) -> Iterator[NewTask]:
        customer = 0
        for day in range(_DAYS):
            a_day = SUBSCRIBERS * (day + 1) // _DAYS - customer
            for at in sorted(self.waking_hours(day + 1) for _ in range(a_day)):  # in order: an index grows at its end
                subscription = Subscription(customer, self.chance.choice(("month", "family", "student")))
                yield self.renew.new(subscription, key=f"customer-{customer:05}", at=at, on_conflict="keep")
                customer += 1

    async def _one_more_month(self) -> None:
        """Bo gives somebody a week for free."""
        found = await self.one_of("subscription.renew")
        if found is not None:
            with acting_as("bo"):
                await self.app.reschedule(*found.record.ref, delay="7d")
