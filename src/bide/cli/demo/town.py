"""All stories of the live traffic together, beside the service that serves them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from bide.app import Bide
from bide.cli.demo import words
from bide.cli.demo.coupons import Coupons
from bide.cli.demo.heartbeats import Heartbeats
from bide.cli.demo.meals import Meals
from bide.cli.demo.notebook import Notebook
from bide.cli.demo.orders import Orders
from bide.cli.demo.payments import Payments
from bide.cli.demo.posts import Posts
from bide.cli.demo.reminders import Reminders
from bide.cli.demo.reviews import Reviews
from bide.cli.demo.story import Story
from bide.cli.demo.subscriptions import Subscriptions
from bide.core.errors import StoreError
from bide.core.instants import Millis
from bide.engine.history import MINUTE, rows_between

_log = logging.getLogger("bide.demo")
_WRITTEN: Millis = 4_000
"""So long after a minute its row of the history is written for certain."""


class Town:
    """Declares the handlers of every story on `app`, which the service then opens and works on."""

    def __init__(self, app: Bide, *, shown_store: str, say: Callable[[str], None]) -> None:
        self._app = app
        self._shown_store = shown_store
        self._say = say
        self._notebook = Notebook(app)
        payments = Payments(app, self._notebook)
        self.orders = Orders(app, self._notebook, payments)
        self.coupons = Coupons(app, self._notebook)
        others = (Reminders, Posts, Meals, Heartbeats, Reviews, Subscriptions)
        self.stories: list[Story] = [
            self.orders, payments, self.coupons, *(story(app, self._notebook) for story in others)
        ]  # fmt: skip

    async def ready(self) -> None:
        """Raises BadInput for a store with tasks of others, before any of them is delivered; StoreError."""
        async with self._app:
            await self._notebook.refuse_strangers()

    @asynccontextmanager
    async def beside(self, where: str) -> AsyncIterator[None]:
        """Everybody lives, while the service answers at `where`."""
        for story in self.stories:
            await story.prepare()
        self._say(words.opening(where, self._shown_store, self.orders, self.coupons))
        lives = [asyncio.create_task(_live(story), name=f"bide demo {type(story).__name__}") for story in self.stories]
        lives.append(asyncio.create_task(self._tell(), name="bide demo minutes"))
        try:
            yield
        finally:
            for life in lives:
                life.cancel()
            await asyncio.gather(*lives, return_exceptions=True)

    async def _tell(self) -> None:
        """One line a minute, of the minute that has just passed."""
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
                self._say(words.of_minute(minute, rows[minute]))


async def _live(story: Story) -> None:
    """A defect ends one story, loudly, and neither the others nor the service."""
    try:
        await story.live()
    except Exception:  # noqa: BLE001 - whatever it is, its traceback is told
        _log.exception("a defect in the demo: %s are over", type(story).__name__.lower())
