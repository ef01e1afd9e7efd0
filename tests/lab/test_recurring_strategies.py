"""S20 to S23, which follow a rule: the calendar, and runs judged by their instants."""

from __future__ import annotations

from datetime import date, time
from pathlib import Path

import pytest
from tests.lab.playing import setting_of

from bide_lab.journal import Firing
from bide_lab.strategies.recurring.s20_crontab import OneHost, runs_on
from bide_lab.workload import Trial
from bide_lab.workloads.recurrence import by_instants, recurrence


@pytest.mark.parametrize(("day", "runs"), [((3, 28), 1), ((3, 29), 0), ((10, 24), 1), ((10, 25), 2)])
def test_a_rule_at_half_past_two_follows_the_wall_clock(day: tuple[int, int], runs: int) -> None:
    assert runs_on(date(2026, *day), time(2, 30)) == runs


def test_runs_are_judged_by_their_instants() -> None:
    firings = [Firing("rule", due, at * 1_000_000) for due, at in ((1000, 1001), (2000, 1999), (2000, 2004), (9000, 0))]
    figures, blamed = by_instants(firings, range(1000, 4000, 1000), [(3000, "killed_at")])
    assert (figures.expected, figures.lost, figures.duplicated, figures.early) == (3, 1, 1, 1)
    assert blamed == {"twice_when_undisturbed": 1, "lost_when_killed_at": 1}


async def test_every_run_is_done_or_lost(tmp_path: Path) -> None:
    async with Trial.of(OneHost, setting_of(OneHost, {}, tmp_path, minute=0.2)) as trial:
        figures = await recurrence.play(trial, quick=True)
    assert (figures.fired + (figures.lost or 0), figures.duplicated, figures.early) == (figures.expected, 0, 0)
