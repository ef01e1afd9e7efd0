"""S1, S2 and S3, the strategies within one database: what each claims, and what it is known for."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.lab.playing import keeps_its_word, named, setting_of, shows

from bide.lab.stage import Stage, keys_of
from bide.lab.strategies.s01_table_scan import Parallel, Replica, Serial, Tables
from bide.lab.strategies.s02_cron_batch import EveryMinute, Hourly
from bide.lab.strategies.s03_skip_locked import SkipLocked
from bide.lab.strategy import Strategy, now
from bide.lab.workloads.load import batches

pytestmark = pytest.mark.real_time

MINUTE = 0.3
"""Seconds that a minute of theirs takes here."""


@pytest.mark.parametrize("strategy", [Serial, Parallel, Tables], ids=named)
async def test_a_scan_does_what_it_claims(strategy: type[Strategy], mysql_url: str, tmp_path: Path) -> None:
    verdict = await keeps_its_word(strategy, {"mysql": mysql_url}, tmp_path, minute=MINUTE)
    assert verdict.late[-1] < MINUTE * 1000 + 500


async def test_a_scan_of_a_replica_publishes_nothing_that_was_moved_or_cancelled_meanwhile(
    mysql_replica_url: str, tmp_path: Path
) -> None:
    await keeps_its_word(Replica, {"mysql_replica": mysql_replica_url}, tmp_path)


async def test_a_scan_of_a_replica_is_late_by_what_that_is_behind(mysql_replica_url: str, tmp_path: Path) -> None:
    seen, figures = await shows(Replica, Replica.flaws[0], {"mysql_replica": mysql_replica_url}, tmp_path)
    assert "posts met again" in seen
    assert (figures.lost, figures.duplicated, figures.early) == (0, 0, 0)
    assert figures.p50 is not None
    assert figures.p50 > 1_500


@pytest.mark.parametrize("strategy", [Hourly, EveryMinute], ids=named)
async def test_a_batch_does_what_it_claims(strategy: type[Strategy], tmp_path: Path) -> None:
    await keeps_its_word(strategy, {}, tmp_path, minute=MINUTE)


async def test_claims_do_what_they_claim(postgres_url: str, tmp_path: Path) -> None:
    await keeps_its_word(SkipLocked, {"postgres": postgres_url}, tmp_path)


async def test_what_is_older_than_the_window_is_never_published(mysql_url: str, tmp_path: Path) -> None:
    seen, figures = await shows(Serial, Serial.flaws[0], {"mysql": mysql_url}, tmp_path, minute=0.1)
    assert seen.startswith("100 of 100 posts never published")
    assert (figures.fired, figures.early, figures.duplicated) == (0, 0, 0)


async def test_an_hourly_batch_is_late_by_up_to_its_period(tmp_path: Path) -> None:
    seen, figures = await shows(Hourly, Hourly.flaws[0], {}, tmp_path, minute=MINUTE)
    assert seen
    assert figures.lost == 0
    assert figures.most is not None
    assert figures.most < 4 * MINUTE * 1000 + 500


async def test_two_scanners_look_at_the_same_posts_and_publish_each_once(mysql_url: str, tmp_path: Path) -> None:
    count = 300
    async with Stage(Serial, setting_of(Serial, {"mysql": mysql_url}, tmp_path, minute=MINUTE)) as stage:
        await stage.start()
        await stage.start()
        client = await stage.client()
        begin = now()
        stage.sound(await client.play(begin, batches([(key, 400) for key in keys_of(count)])))
        await stage.until_fired(count, by=(begin + 400) / 1000 + stage.patience)
        await stage.rest(2 * MINUTE)
        await stage.unharmed()
        verdict, counts = stage.verdict(), await stage.counts()
    assert (verdict.fired, verdict.duplicated) == (count, 0)
    assert counts["published"] == count
    assert counts["looked_at"] == count + counts["looked_at_in_vain"]
    assert counts["looked_at_in_vain"] > 0, "they begin at the same instant"


async def test_what_a_dead_worker_had_claimed_is_done_by_the_next(postgres_url: str, tmp_path: Path) -> None:
    count = 30
    async with Stage(SkipLocked, setting_of(SkipLocked, {"postgres": postgres_url}, tmp_path)) as stage:
        [first] = await stage.start(seconds=0.03)
        client = await stage.client()
        begin = now()
        stage.sound(await client.play(begin, batches([(key, 300) for key in keys_of(count)])))
        assert await stage.until_fired(3, by=begin / 1000 + 3)
        first.kill()
        await stage.start()
        await stage.until_fired(count, by=begin / 1000 + 5)
        await stage.rest()
        verdict, left = stage.verdict(), await stage.director.left()
    assert not verdict.lost
    assert 3 <= verdict.duplicated < count, "a page that is not committed is done again"
    assert left["live_rows"] == 0


class Unvacuumed(SkipLocked):
    """Autovacuum comes once a minute: in the middle of a test, or not."""

    async def prepare(self) -> None:
        await super().prepare()
        await self.pool.execute(f"ALTER TABLE {self.tasks} SET (autovacuum_enabled = off)")


async def test_what_is_done_leaves_dead_rows(postgres_url: str, tmp_path: Path) -> None:
    seen, figures = await shows(Unvacuumed, SkipLocked.flaws[0], {"postgres": postgres_url}, tmp_path)
    assert "dead rows beside 0 live ones" in seen
    assert figures.counts["dead_rows"] > figures.expected
    assert figures.counts["vacuums"] == 0
    assert (figures.lost, figures.duplicated, figures.revived) == (0, 0, 0)
