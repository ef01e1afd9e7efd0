"""Scheduled publishing: on the author's clock, once, and never after it was taken back."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest

from bide import Bide, Handler, Result, Task
from bide.testing.time_machine import TimeMachine

BERLIN = ZoneInfo("Europe/Berlin")


@dataclass
class Post:
    slug: str


class Blog:
    """The posts, and what is done with them."""

    def __init__(self, app: Bide, database: sqlite3.Connection) -> None:
        self.database = database
        database.execute("CREATE TABLE posts (slug TEXT PRIMARY KEY, status TEXT, appeared INTEGER DEFAULT 0)")
        database.execute("INSERT INTO posts (slug, status) VALUES ('bees', 'draft')")
        self.broken_once = False
        self.click_meanwhile = False
        self.click: Result | None = None

        @app.handler("post.publish", retry="quick")
        async def publish(task: Task[Post]) -> None:
            appear = "UPDATE posts SET status = 'published', appeared = appeared + 1 WHERE slug = ? AND status = ?"
            database.execute(appear, (task.payload.slug, "scheduled"))
            if self.click_meanwhile:
                self.click = (await publish.fire_now(task.key)).result
            if self.broken_once:
                self.broken_once = False
                raise ConnectionError("the worker died after the effect, before it could say so")

        self.publish: Handler[Post] = publish

    async def schedule(self, at: datetime) -> Result:
        self.database.execute("UPDATE posts SET status = 'scheduled'")
        return (await self.publish.schedule(Post("bees"), key="bees", at=at)).result

    async def take_back(self) -> Result:
        result = (await self.publish.cancel("bees")).result
        if result is Result.CANCELLED:
            self.database.execute("UPDATE posts SET status = 'draft'")
        return result

    @property
    def post(self) -> tuple[str, int]:
        status, appeared = self.database.execute("SELECT status, appeared FROM posts").fetchone()
        return status, appeared


@pytest.fixture
def blog(bide_app: Bide, database: sqlite3.Connection) -> Blog:
    return Blog(bide_app, database)


async def test_it_appears_at_its_time_and_not_before(blog: Blog, bide_time: TimeMachine) -> None:
    await blog.schedule(datetime(2027, 1, 16, 8, tzinfo=BERLIN))
    assert await bide_time.advance_to("2027-01-16T07:59:59.999+01:00") == []
    assert blog.post == ("scheduled", 0)
    fired = await bide_time.advance("1ms")
    assert [one.ref for one in fired] == [("post.publish", "bees")]
    assert blog.post == ("published", 1)


@pytest.mark.parametrize(
    ("evening", "morning", "hours"),
    [
        (datetime(2027, 3, 27, 20, tzinfo=BERLIN), datetime(2027, 3, 28, 8, tzinfo=BERLIN), "11h"),
        (datetime(2027, 10, 30, 20, tzinfo=BERLIN), datetime(2027, 10, 31, 8, tzinfo=BERLIN), "13h"),
    ],
    ids=["spring", "autumn"],
)
async def test_eight_is_eight_on_the_author_s_clock_when_it_changes_overnight(
    evening: datetime, morning: datetime, hours: str
) -> None:
    app = Bide("memory:")

    @app.handler("post.publish")
    async def publish(task: Task[Post]) -> None: ...

    async with TimeMachine(app, start=evening) as time:
        await publish.schedule(Post("bees"), key="bees", at=morning)
        (fired,) = await time.advance(hours)
        assert fired.at == morning.astimezone(UTC)
        assert f"{fired.at.astimezone(BERLIN):%H:%M}" == "08:00"


async def test_publish_now(blog: Blog, bide_time: TimeMachine) -> None:
    await blog.schedule(datetime(2027, 1, 16, 8, tzinfo=BERLIN))
    assert (await blog.publish.fire_now("bees")).result is Result.MOVED
    assert [one.at for one in await bide_time.advance("0s")] == [bide_time.now]
    assert await bide_time.advance("2d") == [], "its old time is gone"
    assert (await blog.publish.fire_now("bees")).result is Result.NOT_FOUND
    assert blog.post == ("published", 1)


async def test_a_second_click_while_it_is_published_does_not_publish_twice(blog: Blog, bide_time: TimeMachine) -> None:
    blog.click_meanwhile = True
    await blog.schedule(datetime(2027, 1, 16, 8, tzinfo=BERLIN))
    await blog.publish.fire_now("bees")
    assert len(await bide_time.advance("2d")) == 1
    assert blog.click is Result.UNDER_WAY
    assert blog.post == ("published", 1)


@pytest.mark.parametrize("hour", [6, 10], ids=["earlier", "later"])
async def test_another_time(blog: Blog, bide_time: TimeMachine, hour: int) -> None:
    await blog.schedule(datetime(2027, 1, 16, 8, tzinfo=BERLIN))
    moved = datetime(2027, 1, 16, hour, tzinfo=BERLIN)
    assert (await blog.publish.reschedule("bees", at=moved)).result is Result.MOVED
    assert [one.at for one in await bide_time.advance("2d")] == [moved]
    assert blog.post == ("published", 1)


async def test_back_to_draft_it_does_not_appear_and_may_be_scheduled_again(blog: Blog, bide_time: TimeMachine) -> None:
    await blog.schedule(datetime(2027, 1, 16, 8, tzinfo=BERLIN))
    assert await blog.take_back() is Result.CANCELLED
    assert await bide_time.advance("2d") == []
    assert blog.post == ("draft", 0)
    assert await blog.schedule(datetime(2027, 1, 18, 8, tzinfo=BERLIN)) is Result.CREATED
    await bide_time.advance("2d")
    assert blog.post == ("published", 1)
    assert await blog.take_back() is Result.NOT_FOUND, "what has appeared cannot be taken back"
    assert blog.post == ("published", 1)


async def test_delivered_twice_it_still_appears_once(blog: Blog, bide_time: TimeMachine) -> None:
    blog.broken_once = True
    await blog.schedule(datetime(2027, 1, 16, 8, tzinfo=BERLIN))
    fired = await bide_time.advance("2d")
    assert [one.attempt for one in fired] == [1, 2]
    assert fired[0].record.id == fired[1].record.id
    assert blog.post == ("published", 1)
