"""Scheduled publishing: each post appears at its author's own 08:00, unless published, moved or taken back before."""

import asyncio
import sqlite3
from dataclasses import dataclass
from datetime import datetime, timedelta
from tempfile import TemporaryDirectory
from zoneinfo import ZoneInfo

from bide import Bide, ScaledClock, Task

SPEED = 36_000  # an hour of the story takes 0.1 s
folder = TemporaryDirectory()  # gone when the program ends
app = Bide(f"sqlite:///{folder.name}/blog.db", clock=ScaledClock(SPEED))
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
        due, late = task.due_at.astimezone(ZoneInfo(post.zone)), task.lateness.total_seconds() / SPEED
        print(f"{post.slug} appears, due {due:%a %H:%M %Z}, {late * 1000:.0f} ms late")


def morning(zone: str, hour: int = 8) -> datetime:
    """Tomorrow at that hour of the author's wall clock, whatever daylight saving does in between."""
    tomorrow = app.now().astimezone(ZoneInfo(zone)) + timedelta(days=1)
    return tomorrow.replace(hour=hour, minute=0, second=0, microsecond=0)


async def main() -> None:
    print(f"1 hour = {3600 / SPEED:g} s")
    zones = {"bees": "Asia/Shanghai", "news": "Europe/Paris", "bread": "Asia/Tokyo", "rant": "America/New_York"}
    async with app, app.worker() as worker:
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
        await worker.until_empty()
    outcome = dict(blog.execute("SELECT slug, status || ' ' || times FROM posts"))
    assert outcome == {"bees": "published 1", "news": "published 1", "bread": "published 1", "rant": "draft 0"}, outcome


asyncio.run(main())
