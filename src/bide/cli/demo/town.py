"""Runs all stories of the demo in the process of the service, and prints a line a minute."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta

from bide.app import Bide
from bide.cli.demo.ahead import AUDIENCE, GUESTS, SUMMER, Coupons, Posts, Reminders, Rounds, Subscriptions
from bide.cli.demo.orders import SALE, TOPIC, Orders, Payments
from bide.cli.demo.story import DemoState, Story
from bide.core.errors import StoreError
from bide.core.instants import Millis, as_datetime, instant
from bide.engine.history import MINUTE, MinuteRow, rows_between

_WRITTEN: Millis = 4_000
"""Milliseconds after a minute by which its row of the history is written."""


class Town:
    """Declares the handlers of every story on `app`, which the service then opens and runs."""

    def __init__(self, app: Bide, *, shown_store: str, say: Callable[[str], None]) -> None:
        self._app = app
        self._shown_store = shown_store
        self._say = say
        self._state = DemoState(app)
        payments = Payments(app, self._state)
        self.orders = Orders(app, self._state, payments)
        self.coupons = Coupons(app, self._state)
        others = (Reminders, Posts, Subscriptions, Rounds)
        self.stories: list[Story] = [
            self.orders, payments, self.coupons, *(story(app, self._state) for story in others)
        ]  # fmt: skip

    async def prepare(self) -> None:
        """Raises BadInput for a store with foreign tasks, before any of them is delivered; StoreError."""
        async with self._app:
            await self._state.refuse_foreign_tasks()

    @asynccontextmanager
    async def running(self, where: str) -> AsyncIterator[None]:
        """Play the stories, while the service answers at `where`."""
        for story in self.stories:
            await story.prepare()
        self._say(self._opening(where))
        named = {f"bide demo {type(story).__name__}": story.live() for story in self.stories}
        lives = [asyncio.create_task(life, name=name) for name, life in named.items()]
        lives.append(asyncio.create_task(self._report(), name="bide demo minutes"))
        try:
            yield
        finally:
            for life in lives:
                life.cancel()
            await asyncio.gather(*lives, return_exceptions=True)

    def _opening(self, where: str) -> str:
        """The opening text: the address of the console, and three things to try."""
        evening, last = self.coupons.evening, self.orders.last_of_the_sale
        begins, until = (instant(evening + timedelta(hours=hours)) for hours in (-12, 4))
        return f"""\
The console is at {where}
Live traffic of a small town, on {self._shown_store}. Ctrl-C ends it; started again, it continues.

Three things to try:
  1. Why was an order closed late? The {SALE:,} orders of a sale must be paid by {_clock(self.orders.sale_ends)}.
     A minute later see {where}/tasks/order.close/{last}
  2. When is the next peak, and what rate does it need? {evening:%A} at {evening:%H:%M:%S} {AUDIENCE:,} coupons are due.
     {where}/timeline?from={begins}&until={until}
  3. The summer party starts later: move its {GUESTS} reminders by an hour, all at once.
     {where}/tasks?group={SUMMER}
"""

    async def _report(self) -> None:
        """Print one line a minute about the minute that has just passed."""
        clock = self._app.clock
        while True:
            minute = clock.now() // MINUTE
            await asyncio.sleep(clock.seconds_until((minute + 1) * MINUTE + _WRITTEN))
            try:
                rows = await rows_between(self._app.store, clock, minute, minute)
            except StoreError as error:
                self._say(f"the store does not answer: {error}")
                continue
            if minute in rows:
                self._say(_of_minute(minute, rows[minute]))


def _of_minute(minute: int, row: MinuteRow) -> str:
    """Describe a minute: the deliveries, and the lateness of the latest one."""
    delivered = sum(past.begun for past in row.topics.values())
    latest, topic = max(((past.lateness(1.0) or 0, topic) for topic, past in row.topics.items()), default=(0, ""))
    length = f"{latest} ms" if latest < 1_000 else f"{latest / 1000:.1f} s"
    worst = f"; the latest began {length} late ({topic})" if delivered else ""
    return f"{_clock(minute * MINUTE)[:5]}  {delivered:,} delivered, {row.scheduled:,} scheduled{worst}"


def uneventful(record: logging.LogRecord) -> bool:
    """A log filter for the terminal: drops the audit log, and the failures of merchants, which are part of the show."""
    if record.name == "bide.audit":
        return False
    topic = record.args[0] if isinstance(record.args, tuple) and record.args else None
    return not (record.name == "bide.worker" and topic == TOPIC)


def _clock(at: Millis) -> str:
    return f"{as_datetime(at).astimezone():%H:%M:%S}"
