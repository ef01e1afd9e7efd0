"""E1, scheduled publishing: a post goes out tomorrow at 08:00, unless its author thinks again."""

from __future__ import annotations

from datetime import datetime, timedelta

import msgspec

from bide.app import Bide
from bide.cli.demo.pace import Scale, zone_of
from bide.cli.demo.story import Story, act
from bide.core.tasks import Task

ZONE = zone_of("Asia/Shanghai", 8)
EVENING = datetime(2027, 4, 1, 20, 0, tzinfo=ZONE)
TOMORROW_8 = datetime(2027, 4, 2, 8, 0, tzinfo=ZONE)
TOMORROW_14 = TOMORROW_8 + timedelta(hours=6)


class Post(msgspec.Struct):
    title: str


class Publishing(Story):
    code = "E1"
    title = "Scheduled publishing"
    scale = Scale("1h", "1.5s")
    topics = ("blog.publish",)
    tables = ("demo_post (title TEXT PRIMARY KEY, status TEXT NOT NULL)",)
    opens = EVENING
    place = "Shanghai"

    def define(self, app: Bide) -> None:
        @app.handler("blog.publish")
        async def publish(task: Task[Post]) -> None:
            async with task.transaction() as database:  # published and done, or neither
                database.execute(
                    "UPDATE demo_post SET status = 'published' WHERE title = ? AND status = 'scheduled'",
                    (task.payload.title,),
                )
            self.fired(task, "published")

        self.publish = publish

    @act("0h")
    async def write_four_posts(self) -> None:
        for title in ("Morning news", "Price list", "Big surprise", "Bold claims"):
            async with self.transaction() as database, self.app.using(database):  # the post and its time, or neither
                database.execute("INSERT OR REPLACE INTO demo_post VALUES (?, 'scheduled')", (title,))
                await self.publish.schedule(Post(title), key=title, at=self.pace.at(TOMORROW_8))
            self.said(title, "for 08:00")

    @act("2h")
    async def another_time_for_the_price_list(self) -> None:
        answer = await self.publish.reschedule("Price list", at=self.pace.at(TOMORROW_14))
        self.said("Price list", f"{answer.result} to 14:00")

    @act("3h30m")
    async def publish_the_surprise_now(self) -> None:
        await self.publish.fire_now("Big surprise")
        self.said("Big surprise", "now!")

    @act("5h")
    async def take_the_claims_back(self) -> None:
        async with self.transaction() as database, self.app.using(database):
            answer = await self.publish.cancel("Bold claims")
            if answer.ok:  # else it is out already, and stays so
                database.execute("UPDATE demo_post SET status = 'draft' WHERE title = 'Bold claims'")
                self.called_off("Bold claims", "back to draft")
