"""Scheduled publishing on the blog's own table: each post appears at its author's own 08:00, unless it is published,
moved or taken back before. The status and the time in the row say it all; nothing else is kept anywhere."""

import asyncio
import sqlite3
from datetime import UTC, datetime, timedelta
from tempfile import TemporaryDirectory
from zoneinfo import ZoneInfo

from bide import Bide, Row, ScaledClock, Sql, TableSource

SPEED = 36_000  # an hour of the story takes 0.1 s
DRAFT, SCHEDULED, PUBLISHED = 1, 2, 3
folder = TemporaryDirectory()  # gone when the program ends
app = Bide(f"sqlite:///{folder.name}/blog.db", clock=ScaledClock(SPEED))
blog = sqlite3.connect(f"{folder.name}/blog.db", isolation_level=None)
blog.execute("CREATE TABLE posts (slug TEXT PRIMARY KEY, zone TEXT, status INT, due TEXT, published TEXT, times INT)")
blog.execute(f"CREATE INDEX posts_by_due ON posts (due) WHERE status = {SCHEDULED}")
changes = {"status": PUBLISHED, "published": Sql(":now"), "times": Sql("times + 1")}
posts = app.watch(
    TableSource(table="posts", id="slug", due="due", where=f"status = {SCHEDULED}", changes=changes, columns=["zone"])
)


@posts.handler
def appear(row: Row) -> None:  # in the transaction that makes the changes
    due, late = row.due_at.astimezone(ZoneInfo(row["zone"])), row.lateness.total_seconds() / SPEED
    print(f"{row.id} appears, due {due:%a %H:%M %Z}, {late * 1000:.0f} ms late")


def morning(zone: str, hour: int = 8) -> str:
    """Tomorrow at that hour of the author's wall clock, whatever daylight saving does in between."""
    tomorrow = app.now().astimezone(ZoneInfo(zone)) + timedelta(days=1)
    return text(tomorrow.replace(hour=hour, minute=0, second=0, microsecond=0))


def text(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="milliseconds")


def change(slug: str, column: str, value: object) -> bool:
    """Whether it was not too late."""
    update = f"UPDATE posts SET {column} = ? WHERE slug = ? AND status = {SCHEDULED}"
    return blog.execute(update, (value, slug)).rowcount == 1


async def main() -> None:
    print(f"1 hour = {3600 / SPEED:g} s")
    zones = {"bees": "Asia/Shanghai", "news": "Europe/Paris", "bread": "Asia/Tokyo", "rant": "America/New_York"}
    async with app, app.worker() as worker:
        for slug, zone in zones.items():
            blog.execute("INSERT INTO posts VALUES (?, ?, ?, ?, NULL, 0)", (slug, zone, SCHEDULED, morning(zone)))
        print(f"publish news now, two clicks: {[change('news', 'due', text(app.now())) for _ in range(2)]}")
        print(f"bread at 18:00 instead: {change('bread', 'due', morning('Asia/Tokyo', 18))}")
        print(f"rant back to draft: {change('rant', 'status', DRAFT)}")
        await worker.until_empty()
        print(f"rant, bees back to draft: {[change(slug, 'status', DRAFT) for slug in ('rant', 'bees')]}, too late")
    outcome = {slug: (status, times) for slug, status, times in blog.execute("SELECT slug, status, times FROM posts")}
    assert outcome == {"bees": (3, 1), "news": (3, 1), "bread": (3, 1), "rant": (1, 0)}, outcome


asyncio.run(main())
