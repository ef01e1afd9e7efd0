"""How late everything was that has been fired: the number that we are judged by."""

from __future__ import annotations

from statistics import median

from rich.text import Text

from bide.cli.demo.ledger import Line
from bide.core.instants import Millis


class Lateness:
    """Of each firing. What fell due while the demo was stopped is left out: it says how long nobody was there."""

    def __init__(self, running_since: Millis) -> None:
        self._running_since = running_since
        self._late: list[float] = []
        self.fired = 0

    def add(self, line: Line) -> None:
        if line.late is not None and line.due_at is not None:
            self.fired += 1
            if not self.was_stopped(line):
                self._late.append(line.late)

    def was_stopped(self, line: Line) -> bool:
        """Whether nobody was there when it fell due. A line of an earlier start is known by its lateness."""
        assert line.due_at is not None
        if line.at >= self._running_since:
            return line.due_at < self._running_since
        return (line.late or 0) > 1_000

    @property
    def words(self) -> str:
        """ "fired 12 times, late by 0.7 ms at the median, 2.1 ms at most"."""
        if not self._late:
            return f"{self.fired} fired"
        early = sum(late < 0 for late in self._late)
        never = "never early" if not early else f"{early} EARLY"
        return f"{self.fired} fired, {never}, late {median(self._late):.1f} ms (worst {max(self._late):.1f})"

    def text(self, line: Line, narrow: bool) -> Text:
        """How late one was."""
        assert line.late is not None
        if self.was_stopped(line):
            return Text("was stopped" if narrow else f"{line.late / 1000:.0f} s, was stopped", "dim")
        words = f"{line.late:.1f} ms late" if line.late < 1_000 else f"{line.late / 1000:.1f} s late"
        return Text(words, "green" if line.late < 20 else "red")
