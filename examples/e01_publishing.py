"""Scheduled publishing: each post appears at its author's own 08:00, unless published, moved or taken back before."""

import asyncio
import sqlite3
from dataclasses import dataclass
from datetime import datetime, timedelta
from tempfile import TemporaryDirectory
from zoneinfo import ZoneInfo

from bide import Bide, Task
from bide.engine.clock import ScaledClock

HOUR = 0.15  # seconds that an hour of the story takes
folder = TemporaryDirectory()  # gone when the program ends
app = Bide(f"sqlite:///{folder.name}/blog.db", clock=ScaledClock(3600 / HOUR), lease="24h", max_sleep="1h")
blog = sqlite3.connect(f"{folder.name}/blog.db", isolation_level=None)
blog.execute("CREATE TABLE posts (slug TEXT PRIMARY KEY, status TEXT DEFAULT 'draft', times INT DEFAULT 0)")


@dataclass
class Post:
    slug: str
    zone: str


@app.handler("post.publish")
async def publish(task: Task[Post]) -> None:
    post = task.payload
    appear = "UPDATE posts SET status = 'published', times = times + 1 WHERE slug = ? AND status = 'scheduled'"
    if blog.execute(appear, (post.slug,)).rowcount:  # the row decides: delivered twice, it still appears once
        late = (app.clock.now() - task.record.planned_at) * HOUR / 3600
        print(f"{post.slug} appears, due {task.due_at.astimezone(ZoneInfo(post.zone)):%a %H:%M %Z}, {late:.0f} ms late")


def morning(zone: str, hour: int = 8) -> datetime:
    """Tomorrow at that hour of the author's wall clock, whatever daylight saving does in between."""
    return (datetime.now(ZoneInfo(zone)) + timedelta(days=1)).replace(hour=hour, minute=0, second=0, microsecond=0)


async def main() -> None:
    print(f"1 hour = {HOUR:g} s")
    zones = {"bees": "Asia/Shanghai", "news": "Europe/Paris", "bread": "Asia/Tokyo", "rant": "America/New_York"}
    async with app, app.worker():
        for slug, zone in zones.items():
            blog.execute("INSERT INTO posts (slug, status) VALUES (?, 'scheduled')", (slug,))
            await publish.schedule(Post(slug, zone), key=slug, at=morning(zone))
        clicks = await asyncio.gather(publish.fire_now("news"), publish.fire_now("news"))
        moved = await publish.reschedule("bread", at=morning("Asia/Tokyo", 18))
        back = await publish.cancel("rant")
        if back.result == "cancelled":  # from here on nothing starts: the post is the author's again
            blog.execute("UPDATE posts SET status = 'draft' WHERE slug = 'rant'")
        print(f"publish news now, two clicks: {[click.result.value for click in clicks]}")
        print(f"bread at 18:00 instead: {moved.result.value}; rant back to draft: {back.result.value}")
        while [task async for task in app.find()]:  # noqa: ASYNC110 - until nothing is left
            await asyncio.sleep(HOUR)
    outcome = dict(blog.execute("SELECT slug, status || ' ' || times FROM posts"))
    assert outcome == {"bees": "published 1", "news": "published 1", "bread": "published 1", "rant": "draft 0"}, outcome


asyncio.run(main())
