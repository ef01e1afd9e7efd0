"""Scheduled publishing on the blog's own table, on the author's clock."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
import pytest_asyncio

from bide import Bide, Row, Sql, TableSource
from bide.stores.sqlite import SqliteStore
from bide.testing.time_machine import TimeMachine

BERLIN = ZoneInfo("Europe/Berlin")
SCHEDULED, PUBLISHED = 2, 3
EIGHT = datetime(2027, 1, 16, 8, tzinfo=BERLIN)


class Blog:
    """One post in a table of its own, and what its author does with it."""

    def __init__(self, app: Bide, database: sqlite3.Connection) -> None:
        self.database = database
        database.execute(
            "CREATE TABLE posts (id INTEGER PRIMARY KEY, status INTEGER, due TEXT, published TEXT, times INT DEFAULT 0)"
        )
        database.execute("CREATE INDEX posts_by_due ON posts (due) WHERE status = 2")
        database.execute("INSERT INTO posts (id, status) VALUES (1, 1)")
        database.commit()
        changes = {"status": PUBLISHED, "published": Sql(":now"), "times": Sql("times + 1")}
        watch = app.watch(TableSource(table="posts", due="due", where="status = 2", changes=changes))
        self.appeared: list[datetime] = []

        @watch.handler
        async def appear(row: Row) -> None:
            self.appeared.append(app.now())

    def schedule(self, at: datetime) -> bool:
        with self.database:
            update = "UPDATE posts SET status = 2, due = ? WHERE status = 1"
            return self.database.execute(update, [at.astimezone(UTC).isoformat()]).rowcount == 1

    @property
    def post(self) -> tuple[int, int]:
        status, times = self.database.execute("SELECT status, times FROM posts").fetchone()
        return status, times


@pytest.fixture
def blog(bide_app: Bide, database: sqlite3.Connection) -> Blog:
    return Blog(bide_app, database)


@pytest_asyncio.fixture
async def passing(blog: Blog, bide_app: Bide, path: Path) -> AsyncIterator[TimeMachine]:
    start = datetime(2027, 1, 15, 20, tzinfo=BERLIN)
    async with TimeMachine(bide_app, store=SqliteStore(path), start=start) as machine:
        yield machine


async def test_it_appears_at_its_time_and_not_before(blog: Blog, passing: TimeMachine) -> None:
    assert blog.schedule(EIGHT)
    await passing.advance_to("2027-01-16T07:59:59.999+01:00")
    assert blog.post == (SCHEDULED, 0)
    await passing.advance("1ms")
    assert blog.post == (PUBLISHED, 1)
    assert blog.appeared == [EIGHT]
    assert blog.database.execute("SELECT published FROM posts").fetchone() == ("2027-01-16T07:00:00.000+00:00",)


@pytest.mark.parametrize(
    ("evening", "hours"), [(datetime(2027, 3, 27, 20), "11h"), (datetime(2027, 10, 30, 20), "13h")],
    ids=["spring", "autumn"],
)  # fmt: skip
async def test_eight_is_eight_on_the_author_s_clock_when_it_changes_overnight(
    blog: Blog, bide_app: Bide, path: Path, evening: datetime, hours: str
) -> None:
    morning = (evening + timedelta(hours=12)).replace(tzinfo=BERLIN)
    async with TimeMachine(bide_app, store=SqliteStore(path), start=evening.replace(tzinfo=BERLIN)) as machine:
        blog.schedule(morning)
        await machine.advance(hours)
        assert blog.appeared == [morning]


async def test_what_was_due_while_nobody_worked_appears_as_soon_as_somebody_does(
    blog: Blog, passing: TimeMachine
) -> None:
    blog.schedule(EIGHT)
    await passing.pass_unattended("30d")
    await passing.advance("0s")
    assert blog.post == (PUBLISHED, 1)
