"""S20 to S23, which follow a rule: the calendar, who takes over, and runs judged by their instants."""

from __future__ import annotations

import asyncio
from datetime import date, time
from pathlib import Path
from typing import Any

import pytest
from tests.lab.conftest import Plays
from tests.lab.playing import Effects, die, setting_of
from tests.waiting import forever, until

from bide_lab.journal import Firing
from bide_lab.strategies.recurring.s20_crontab import OneHost, runs_on
from bide_lab.strategies.recurring.s21_leader_lock import LeaderLock
from bide_lab.strategies.recurring.s22_job_store import AtMostOnce, RequestsRecovery
from bide_lab.strategy import now
from bide_lab.workload import Trial
from bide_lab.workloads.recurrence import by_instants, recurrence


class Runs(Effects):
    async def __call__(self, key: str, due: int) -> None:
        self.blocking(str(due), due)


@pytest.mark.parametrize(("day", "runs"), [((3, 28), 1), ((3, 29), 0), ((10, 24), 1), ((10, 25), 2)])
def test_a_rule_at_half_past_two_follows_the_wall_clock(day: tuple[int, int], runs: int) -> None:
    assert runs_on(date(2026, *day), time(2, 30)) == runs


@pytest.mark.parametrize("still", [False, True], ids=["dead", "standing still"])
async def test_a_lock_outlives_its_leader_or_ends_unnoticed(still: bool, playing: Plays) -> None:
    async with playing(LeaderLock, minute=0.2) as company:
        before, after, leader = Runs(), Runs(), await company.another()
        if still:
            leader._keep = forever  # type: ignore[method-assign]
        else:
            leader._lasts = 4 * leader.every / 1000
        [leading] = await company.start(before, one=leader)
        await until(lambda: before.at, "a leader")
        if not still:
            await die(leading)
        await company.start(after)
        await until(lambda: before.at.keys() & after.at.keys() if still else after.at, "the next leader")
        lost = min(map(int, after.at)) - max(map(int, before.at)) > leader.every
    assert lost is not still


async def is_taken_for_dead(node: AtMostOnce, by: AtMostOnce) -> None:
    await node.check_in()
    await node.pool.execute(f"UPDATE {node.states} SET checked_in = 0 WHERE node = $1", node.me)
    await by.check_in()


@pytest.mark.parametrize("strategy", [AtMostOnce, RequestsRecovery])
async def test_what_a_node_had_begun_is_lost(strategy: type[AtMostOnce], playing: Plays) -> None:
    async with playing(strategy, minute=600.0) as company:
        first: Any = company.client
        second: Any = await company.another()
        due = first.nominal(now())
        to = f"UPDATE {first.triggers} SET next = $1 WHERE name = 'rule'"
        await first.pool.execute(to, due - 5 * first.every)
        async with first.locked():
            waiting = asyncio.create_task(second.acquire())
            await until(lambda: second.counted["waits"], "the second node, at the one row")
        assert await waiting
        assert second.turn >= due, "a misfire is one run"
        await first.pool.execute(to, due)
        assert await first.acquire() is None
        await is_taken_for_dead(second, first)
        held = await first.acquire()
        assert held, "what was only acquired waits again"
        await is_taken_for_dead(first, second)
        taken = await second.acquire()
        assert await second.fire(*taken)
        assert not await first.fire(*held), "the next run is nobody's yet"
        await first.pool.execute(to, due)
        assert await second.acquire()
        assert await first.fire(*held), "it is acquired, if by another"
        await is_taken_for_dead(second, first)
        recovered = await first.pool.fetch(f"SELECT FROM {first.triggers} WHERE name <> 'rule'")
        assert bool(recovered) is strategy.recovers


def test_runs_are_judged_by_their_instants() -> None:
    firings = [Firing("rule", due, at * 1_000_000) for due, at in ((1000, 1001), (2000, 1999), (2000, 2004), (9000, 0))]
    figures, blamed = by_instants(firings, range(1000, 4000, 1000), [(3000, "killed_at")])
    assert (figures.expected, figures.lost, figures.duplicated, figures.early) == (3, 1, 1, 1)
    assert blamed == {"twice_when_undisturbed": 1, "lost_when_killed_at": 1}


async def test_every_run_is_done_or_lost(tmp_path: Path) -> None:
    async with Trial.of(OneHost, setting_of(OneHost, {}, tmp_path, minute=0.2)) as trial:
        figures = await recurrence.play(trial, quick=True)
    assert (figures.fired + (figures.lost or 0), figures.duplicated, figures.early) == (figures.expected, 0, 0)
