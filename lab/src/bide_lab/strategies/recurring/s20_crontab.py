"""S20: a line in the crontab of each host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, time, timedelta
from typing import ClassVar
from zoneinfo import ZoneInfo

from bide_lab.strategy import RUN_LOST, RUN_TWICE, Effect, Flaw, Harm, Recurrent, when


def runs_on(day: date, at: time, zone: str = "Europe/Berlin") -> int:
    """The runs of a rule for this time on that day: one in each minute in which the wall clock shows it."""
    begin = datetime.combine(day, time(), ZoneInfo(zone)).astimezone(UTC)
    shown = ((begin + timedelta(minutes=minute)).astimezone(ZoneInfo(zone)) for minute in range(25 * 60))
    return sum((one.date(), one.hour, one.minute) == (day, at.hour, at.minute) for one in shown)


class OneHost(Recurrent):
    """A host that is down at the minute leaves it out."""

    name = "S20-one"
    title = "crontab on one host"
    nodes = 1
    loses = "every run whose minute came while the host was down"
    flaws: ClassVar[Sequence[Flaw]] = (
        Flaw("a run whose minute comes while the host is down is lost", "recurrence", RUN_LOST, Harm.LOST),
        Flaw("a rule at an hour that the clocks skip or repeat runs never or twice on that day", "recurrence",
             when("long_day", "30 2 * * *: {short_day:.0f} runs in a day of 23 h, {long_day:.0f} in 25 h", over=1)),
    )  # fmt: skip

    async def run(self, role: str, effect: Effect) -> None:
        async for due in self.instants():
            await effect("rule", due)

    async def left(self) -> Mapping[str, float]:
        short, long = (runs_on(date(2026, *day), time(2, 30)) for day in ((3, 29), (10, 25)))
        return {"short_day": short, "long_day": long}


class EveryHost(OneHost):
    """Two hosts with the same crontab, so that one may be down."""

    name = "S20-every"
    title = "crontab on every host (two)"
    nodes = 2
    loses = ""
    flaws = (Flaw("each host does every run", "recurrence", RUN_TWICE, Harm.TWICE),)
