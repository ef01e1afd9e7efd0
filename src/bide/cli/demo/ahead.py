"""Tasks far ahead: a mass message, event reminders, scheduled posts, subscription renewals."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import datetime, timedelta
from functools import partial

import msgspec

from bide.app import Bide
from bide.cli.demo.story import Story
from bide.core.instants import as_datetime, instant
from bide.core.outcomes import Done
from bide.core.records import NewTask
from bide.core.tasks import Task
from bide.engine.session import acting_as

AUDIENCE = 41_000
SUMMER, GUESTS = "event-summer", 500
"""The group of one event's reminders, which the visitor is invited to move by an hour."""
EVENTS = {SUMMER: (GUESTS, 3, 19), "event-chess": (40, 1, 18), "event-run": (90, 4, 7), "event-market": (180, 5, 21)}
"""By group: the number of guests, the days from today, and the hour at which the event begins."""
SUBSCRIBERS = 20_000
_RENEWED_AFTER = 30
"""Days."""
_SUBJECTS = ("Morning news", "Price list", "Recipe of the day", "Harbour report", "Match preview", "Interview")
_PUBLISHED_AT = (8, 12, 18, 21)
_PLANNED_DAYS = 6
_TOMORROW_AT_8 = 12
"""Posts that all go out at 08:00 tomorrow."""


class Customer(msgspec.Struct):
    number: int
    about: str


class Coupons(Story):
    """41,000 customers are reminded of their coupon tomorrow at 20:00:00, all in one second."""

    def define(self, app: Bide) -> None:
        @app.handler("coupon.remind", concurrency=500, keep_done="0s", keep_cancelled="15m")
        async def remind(task: Task[Customer]) -> None:
            """A message to the customer."""

        self.remind = remind

    async def prepare(self) -> None:
        """Use the evening of an earlier run, if its tasks are still ahead; else tomorrow's."""
        made = await self.state.made_until("coupons")
        self.evening = self.at(1, 20) if made is None else as_datetime(made).astimezone()

    async def play(self) -> None:
        """Schedule the reminders of one evening after another."""
        while True:
            await self.fill("coupons", partial(self._all, self.evening), until=self.evening)
            await self.until(instant(self.evening + timedelta(minutes=1)))
            await self.prepare()

    def _all(self, at: datetime) -> Iterator[NewTask]:
        for number in range(AUDIENCE):
            key = f"{at:%m%d}-{number:05}"
            yield self.remind.new(Customer(number, "SUMMER"), key=key, at=at, on_conflict="keep")


class Reminders(Story):
    """Each guest is reminded two hours before an event. The reminders of an event are a group, which moves as one."""

    def define(self, app: Bide) -> None:
        @app.handler("event.remind")
        async def remind(task: Task[Customer]) -> None:
            """A message to the guest."""

        self.remind = remind

    async def play(self) -> None:
        """Schedule the reminders of each event; the event is held again as many days later."""
        while True:
            begins = {group: self.at(days, hour) for group, (_, days, hour) in EVENTS.items()}
            for group, at in begins.items():
                await self.fill(group, partial(self._all, group, at), until=at)
            await self.until(instant(min(begins.values())))

    def _all(self, group: str, at: datetime) -> Iterator[NewTask]:
        reminded_at = at - timedelta(hours=2)
        for guest in range(EVENTS[group][0]):
            key = f"{group}-{at:%m%d}-{guest:03}"
            yield self.remind.new(Customer(guest, group), key=key, group=group, at=reminded_at, on_conflict="keep")


class Post(msgspec.Struct):
    title: str
    author: str = "anna"


class Posts(Story):
    """Scheduled publishing: posts go out tomorrow at 08:00 and at other hours; Anna, the editor, changes her mind."""

    def define(self, app: Bide) -> None:
        @app.handler("post.publish")
        async def publish(task: Task[Post]) -> None:
            """The page is public now."""

        self.publish = publish

    async def play(self) -> None:
        tomorrow = self.at(1, 8)
        await self.fill(f"posts:{tomorrow.date()}", self._of_the_next_days, until=tomorrow)
        await self.now_and_then(25, self._change_of_mind)

    def _of_the_next_days(self) -> Iterator[NewTask]:
        for day in range(1, _PLANNED_DAYS):
            for hour in _PUBLISHED_AT:
                count = _TOMORROW_AT_8 if (day, hour) == (1, 8) else self.chance.randrange(1, 4)
                yield from (self._post(self.at(day, hour), place) for place in range(count))

    def _post(self, at: datetime, place: int) -> NewTask:
        subject = _SUBJECTS[place % len(_SUBJECTS)]
        key = f"{at:%m-%d-%H%M}-{subject.lower().replace(' ', '-')}-{place}"
        return self.publish.new(Post(f"{subject}, {at:%A}"), key=key, at=at, on_conflict="keep")

    async def _change_of_mind(self) -> None:
        """Move, publish or cancel a post, and write another one."""
        post = await self.one_of("post.publish")
        if post is None:
            return
        with acting_as("anna"):
            chance = self.chance.random()
            if chance < 0.6:
                hours = self.chance.randint(1, 3)
                await self.app.reschedule(*post.record.ref, at=post.due_at + timedelta(hours=hours))
            elif chance < 0.8:
                await self.app.fire_now(*post.record.ref)
            else:
                await self.app.cancel(*post.record.ref)
        [number] = await self.state.numbers()
        at = self.waking_hours(self.chance.randrange(1, _PLANNED_DAYS))
        await self.publish.schedule(Post(f"{self.chance.choice(_SUBJECTS)} {number}"), key=f"draft-{number}", at=at)


class Subscriptions(Story):
    """Each subscription renews itself every 30 days, at a time of day at which people subscribe."""

    def define(self, app: Bide) -> None:
        @app.handler("subscription.renew")
        async def renew(task: Task[Customer]) -> Done:
            return Done(again_in=f"{_RENEWED_AFTER}d")

        self.renew = renew

    async def play(self) -> None:
        await self.fill("subscriptions", self._all)
        await self.now_and_then(60, self._one_more_week)

    def _all(self) -> Iterator[NewTask]:
        number = 0
        for day in range(_RENEWED_AFTER):
            a_day = SUBSCRIBERS * (day + 1) // _RENEWED_AFTER - number
            for at in sorted(self.waking_hours(day + 1) for _ in range(a_day)):  # in order: cheap for an index
                customer = Customer(number, self.chance.choice(("month", "family", "student")))
                yield self.renew.new(customer, key=f"customer-{number:05}", at=at, on_conflict="keep")
                number += 1

    async def _one_more_week(self) -> None:
        """Bo gives one subscriber a week for free."""
        found = await self.one_of("subscription.renew")
        if found is not None:
            with acting_as("bo"):
                await self.app.reschedule(*found.record.ref, delay="7d")


class Rounds(Story):
    """The tills are counted each minute, and a newspaper goes out on weekdays at 08:00 in three zones."""

    def define(self, app: Bide) -> None:
        @app.every("1m", topic="till.count")
        async def count(task: Task[None]) -> None:
            await asyncio.sleep(0.05)

        @app.handler("news.send")
        async def send(task: Task[None]) -> None:
            await asyncio.sleep(0.05)

        for zone in ("Europe/Rome", "Asia/Shanghai", "America/New_York"):
            app.cron("0 8 * * mon-fri", zone=zone, key=zone)(send)
