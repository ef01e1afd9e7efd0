"""Measures cells, and writes each into the results file as soon as it is over."""

from __future__ import annotations

import asyncio
import os
import platform
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import msgspec

from bide._version import __version__
from bide.core.errors import BadInput, BideError
from bide_lab.figures import Figures, Result
from bide_lab.processes import LabFault
from bide_lab.strategy import Setting, Strategy
from bide_lab.workload import Trial, Workload
from bide_lab.workloads import WORKLOADS

_AT_ONCE = 3
"""Cells that are played at the same time, of those that need not be alone."""
FAILED = "failed"
"""The first word of the reason of a cell that should have been played and could not."""


class Cell(NamedTuple):
    """One strategy under one workload."""

    strategy: type[Strategy]
    workload: Workload


class Run(NamedTuple):
    """The same for all cells of a run."""

    urls: Mapping[str, str]
    """By the kind of server: those that there are."""
    quick: bool
    minute: float


def cells_of(strategies: Sequence[type[Strategy]], workloads: Sequence[str], *, quick: bool) -> list[Cell]:
    """Without `workloads`, those that a strategy names and, unless quick, those that are for all."""
    cells = []
    for strategy in strategies:
        needed = strategy.known_by()
        for name, workload in WORKLOADS.items():
            if name in workloads if workloads else name in needed or (workload.for_all and not quick):
                cells.append(Cell(strategy, workload))
    return cells


def why_not(cell: Cell, run: Run) -> str:
    """Why a cell cannot be measured, or makes no sense; empty if it can."""
    if missing := [kind for kind in cell.strategy.needs if kind not in run.urls]:
        return f"not measured here: no {' and no '.join(missing)} server was given"
    return cell.workload.why_not(cell.strategy)


async def measure(cell: Cell, run: Run) -> Result:
    """Play it; a cell that could not be played says why."""
    began, at = time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds")
    figures: Figures | None = None
    reason = why_not(cell, run)
    if not reason:
        try:
            figures = await _played(cell, run)
        except (LabFault, BideError) as error:
            reason = f"{FAILED}: {error}"
        except Exception as error:  # noqa: BLE001 - a driver's, or a strategy's own: the others are played all the same
            reason = f"{FAILED}: {type(error).__name__}: {error}"
    return Result(
        strategy=cell.strategy.name, workload=cell.workload.name, quick=run.quick, minute=run.minute,
        version=__version__, at=at, seconds=round(time.monotonic() - began, 2), figures=figures, why_not=reason,
        machine={"cpus": os.cpu_count() or 1, "python": platform.python_version(), "system": platform.system()},
    )  # fmt: skip


async def _played(cell: Cell, run: Run) -> Figures:
    with tempfile.TemporaryDirectory(prefix="bide-lab-") as folder:
        setting = Setting(
            urls={kind: run.urls[kind] for kind in cell.strategy.needs}, prefix=f"lab_{uuid4().hex[:10]}",
            folder=Path(folder), minute=run.minute,
        )  # fmt: skip
        async with Trial.of(cell.strategy, setting, relayed=cell.workload.relayed) as trial:
            return await cell.workload.play(trial, quick=run.quick)


class ResultsFile:
    """JSON lines, one for each cell; a later line of a cell replaces an earlier one."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[Result]:
        """The newest of each cell, in the order in which they were first written. A last line cut off is passed over.

        Raises BadInput where a line is not a result.
        """
        found: dict[tuple[str, str], Result] = {}
        if self.path.exists():
            for number, line in enumerate(self.path.read_bytes().splitlines(keepends=True), start=1):
                if line.endswith(b"\n"):
                    try:
                        result = msgspec.json.decode(line, type=Result)
                    except msgspec.MsgspecError as error:
                        said = f"lines that `bide lab run` wrote; this one is in {self.path}: {error}"
                        raise BadInput(f"results, line {number}", line.decode(errors="replace"), said) from None
                    found[result.cell] = result
        return list(found.values())

    def add(self, result: Result) -> None:
        """At the end, in the place of a line that was cut off when an earlier run was ended."""
        with self.path.open("ab+") as file:
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
            file.write(msgspec.json.encode(result) + b"\n")


async def measure_all(
    cells: Sequence[Cell], run: Run, results: ResultsFile, *, progress: Callable[[int, Cell, Result | None], None],
    again: bool = False,
) -> list[Result]:  # fmt: skip
    """All cells of which the results have no figures yet that were taken in the same way, or `again` all of them.

    `progress` is called when one begins (None) and when it is over.

    First those that measure time, one after another; then those that only count, which mostly wait, some at a time.
    """
    played: list[Result] = []
    same_way = ((run.quick, run.minute), __version__)
    known = {one.cell for one in results.read() if one.figures is not None and (one.scale, one.version) == same_way}
    missing = [(number, cell) for number, cell in enumerate(cells)
               if again or (cell.strategy.name, cell.workload.name) not in known]  # fmt: skip
    places = asyncio.Semaphore(_AT_ONCE)
    # strategies of one file may share more than that, such as a setting of the server
    files: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def play_one(number: int, cell: Cell) -> None:
        async with files[cell.strategy.__module__], places:
            progress(number, cell, None)
            result = await measure(cell, run)
            results.add(result)
            progress(number, cell, result)
            played.append(result)

    for number, cell in missing:
        if cell.workload.alone:
            await play_one(number, cell)
    async with asyncio.TaskGroup() as together:
        for number, cell in missing:
            if not cell.workload.alone:
                together.create_task(play_one(number, cell))
    return played
