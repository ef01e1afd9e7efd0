"""The second seam of the lab: what a workload is."""

from __future__ import annotations

from typing import ClassVar

from bide_lab.figures import Figures
from bide_lab.stage import Stage
from bide_lab.strategy import Strategy


class Workload:
    """A few seconds on a stage. It starts the processes that it wants, and reports what they did."""

    name: ClassVar[str]
    """One word."""
    about: ClassVar[str]
    """One sentence."""
    relayed: ClassVar[bool] = False
    """Whether the strategy's connections go through a relay: that counts and can cut them, and costs time."""

    for_all: ClassVar[bool] = False
    """Whether every strategy is to be seen under it, unless that makes no sense; else those that name it."""
    alone: ClassVar[bool] = True
    """Whether nothing else may be played meanwhile: its figures are times, and not only counts."""

    def why_not(self, strategy: type[Strategy]) -> str:
        """Why it makes no sense for this strategy; empty if it does."""
        fit = {*strategy.shows, *(flaw.workload for flaw in strategy.flaws)}
        return strategy.skips.get(self.name) or ("" if self.name in fit else strategy.unfit)

    async def play(self, stage: Stage, *, quick: bool) -> Figures:
        """`quick`: a small one, in a few seconds. Raises `LabFault` if it could not be played."""
        raise NotImplementedError
