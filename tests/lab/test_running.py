"""Cells, the processes that play them, and the results file: with strategies that are right, wrong and broken."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.lab.playing import setting_of

from bide.core.errors import BadInput
from bide_lab.figures import Result
from bide_lab.processes import LabFault, Step
from bide_lab.running import FAILED, Cell, ResultsFile, Run, cells_of, measure, measure_all, why_not
from bide_lab.strategies import catalogue, chosen, source_of
from bide_lab.strategy import Strategy, now
from bide_lab.workload import Trial, keys_of
from bide_lab.workloads import WORKLOADS

NOTHING = Run(urls={}, quick=True, minute=1.0)

SLEEPERS = '''
"""Strategies for tests: one task of the event loop for each task, right and wrong."""

import asyncio

from bide_lab.strategy import Strategy, now


class Right(Strategy):
    name = "right"
    title = "one sleep a task"
    in_process = True
    shows = ("burst",)
    cannot = {"reschedule": "it sleeps", "fire_now": "it sleeps"}

    def __init__(self, setting):
        super().__init__(setting)
        self.sleeping = {}
        self.effect = None

    async def schedule(self, items):
        for item in items:
            self.sleeping[item.key] = asyncio.create_task(self.wait(item))

    async def wait(self, item):
        while (left := item.due - now()) > 0:
            await asyncio.sleep(left / 1000)
        await self.fire(item)

    async def fire(self, item):
        await self.effect(item.key, item.due)

    async def cancel(self, key):
        return self.sleeping[key].cancel()

    async def run(self, role, effect):
        self.effect = effect
        await asyncio.Event().wait()


class Twice(Right):
    name = "twice"

    async def fire(self, item):
        await self.effect(item.key, item.due)
        await self.effect(item.key, item.due)


class Broken(Right):
    name = "broken"

    async def schedule(self, items):
        raise OSError("the disk is full")


class Failing(Right):
    name = "failing"

    async def run(self, role, effect):
        self.effect = effect
        raise ValueError("no such table")


class Gone(Right):
    name = "gone"

    async def schedule(self, items):
        import os
        os._exit(3)
'''


@pytest.fixture
def sleepers(tmp_path: Path) -> dict[str, type[Strategy]]:
    """By name."""
    path = tmp_path / "sleepers.py"
    path.write_text(SLEEPERS, encoding="utf-8")
    return {one.name: one for one in chosen([str(path)])}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("broken", "2 calls failed, the first with OSError: the disk is full"),
        ("failing", "failing worker failed: ValueError: no such table"),
        ("gone", "the process gone worker ended"),
    ],
)
async def test_a_cell_that_could_not_be_played_says_why(
    name: str, says: str, sleepers: dict[str, type[Strategy]]
) -> None:
    result = await measure(Cell(sleepers[name], WORKLOADS["burst"]), NOTHING)
    assert result.figures is None
    assert result.why_not.startswith(FAILED)
    assert says in result.why_not


@pytest.mark.parametrize(("strategy", "workload"), [("S7", "deaf"), ("S4-A", "idle"), ("S16-lazy", "touch")])
async def test_a_workload_is_played_and_has_figures(strategy: str, workload: str, redis_url: str) -> None:
    """The figures themselves depend on the machine."""
    run = Run(urls={"redis": redis_url}, quick=True, minute=0.3)
    result = await measure(Cell(catalogue()[strategy], WORKLOADS[workload]), run)
    assert result.figures is not None, result.why_not
    assert result.figures.scheduled > 0
    assert workload != "idle" or result.figures.server_cpu_pct is not None


async def test_a_server_that_is_missing_and_a_workload_that_makes_no_sense_are_said() -> None:
    missing = await measure(Cell(catalogue()["S4-A"], WORKLOADS["steady"]), NOTHING)
    assert missing.why_not == "not measured here: no redis server was given"
    senseless = await measure(Cell(catalogue()["bide-memory"], WORKLOADS["killed"]), NOTHING)
    assert senseless.why_not == "it is one process with its client: see restarted"
    assert missing.figures is senseless.figures is None


async def test_a_run_is_taken_up_where_it_ended(sleepers: dict[str, type[Strategy]], tmp_path: Path) -> None:
    results = ResultsFile(tmp_path / "results.jsonl")
    cells = [Cell(sleepers[name], WORKLOADS["burst"]) for name in ("right", "broken", "twice")]
    told: list[tuple[int, bool]] = []

    def tell(number: int, cell: Cell, result: Result | None) -> None:
        told.append((number, result is not None))

    await measure_all(cells[:2], NOTHING, results, progress=tell)
    with results.path.open("ab") as file:
        file.write(b'{"strategy":"twice","workl')  # it was ended while it wrote
    played = await measure_all(cells, NOTHING, results, progress=tell)
    assert [one.strategy for one in played] == ["broken", "twice"]
    assert told == [(0, False), (0, True), (1, False), (1, True), (1, False), (1, True), (2, False), (2, True)]
    found = {one.strategy: one.figures for one in ResultsFile(results.path).read()}
    assert found["broken"] is None
    assert found["twice"] is not None
    assert found["twice"].duplicated == found["twice"].fired
    # another scale is another measurement
    again = await measure_all(cells[:1], Run(urls={}, quick=True, minute=2.0), results, progress=tell)
    assert [one.strategy for one in again] == ["right"]
    # and so it is if it was asked for; what is known of the others stays
    again = await measure_all(cells[:1], NOTHING, results, progress=tell, again=True)
    assert [one.strategy for one in again] == ["right"]
    assert {one.strategy for one in results.read()} == {"right", "broken", "twice"}


def test_a_results_file_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text('{"strategy": "S1"}\n', encoding="utf-8")
    with pytest.raises(BadInput, match=r"results, line 1: .* this one is in .*results\.jsonl: .*workload"):
        ResultsFile(path).read()


def test_a_quick_run_has_only_what_must_be_seen(sleepers: dict[str, type[Strategy]]) -> None:
    right = sleepers["right"]
    assert [cell.workload.name for cell in cells_of([right], [], quick=True)] == ["burst"]
    for_all = [name for name, workload in WORKLOADS.items() if workload.for_all]
    assert "steady" in for_all
    assert "relay" not in for_all
    assert [cell.workload.name for cell in cells_of([right], [], quick=False)] == for_all
    assert [cell.workload.name for cell in cells_of([right], ["idle"], quick=True)] == ["idle"]
    assert why_not(Cell(right, WORKLOADS["churn"]), NOTHING) == "it sleeps"


async def test_a_killed_process_leaves_what_it_wrote_and_another_takes_its_place(
    sleepers: dict[str, type[Strategy]], tmp_path: Path
) -> None:
    """One that cannot begin says why."""
    strategy = sleepers["right"]
    async with Trial.of(strategy, setting_of(strategy, {}, tmp_path)) as trial:
        [process] = await trial.start(seconds=0.001)
        await process.play(now(), [Step(0, "schedule", [(key, 0)]) for key in keys_of(30)])
        assert await trial.until_fired(30, by=now() / 1000 + 60)
        process.kill()
        assert await process.usage() == {}
        await trial.start()
        figures = trial.judged()
        os.unlink(source_of(strategy))
        with pytest.raises(LabFault, match="give a file that is there"):
            await trial.start()
    assert (figures.fired, figures.lost, figures.duplicated) == (30, 0, 0)
