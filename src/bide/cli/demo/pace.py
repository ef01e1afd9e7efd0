"""Quickened time: where a story's hours are on the wall clock's seconds."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta, timezone, tzinfo
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from bide.core.instants import Millis, as_datetime, duration


@dataclass(frozen=True, slots=True)
class Scale:
    """How quickly a story is told: `Scale("1h", "1.5s")`. A second scale may follow after some story time."""

    story: str
    real: str
    after: str = "0s"
    then: Scale | None = None

    @property
    def words(self) -> str:
        """As it is printed: "1h = 1.5s"."""
        more = "" if self.then is None else f", after {self.then.after} {self.then.words}"
        return f"{self.story} = {self.real}{more}"

    @property
    def quickness(self) -> float:
        """Story milliseconds per real one."""
        return duration(self.story) / duration(self.real)

    def to_real(self, story: float) -> float:
        """Real milliseconds from the story's begin until its `story` milliseconds have passed."""
        change = self._change
        if self.then is None or story <= change:
            return story / self.quickness
        return change / self.quickness + (story - change) / self.then.quickness

    def to_story(self, real: float) -> float:
        """The inverse of `to_real`."""
        change = self._change
        if self.then is None or real <= change / self.quickness:
            return real * self.quickness
        return change + (real - change / self.quickness) * self.then.quickness

    @property
    def _change(self) -> Millis:
        return 0 if self.then is None else duration(self.then.after)


class Pace:
    """One story under way: it began at a real instant, and goes on while the demo is stopped."""

    def __init__(self, scale: Scale, *, begins: Millis, speed: float = 1.0, opens: datetime | None = None) -> None:
        self.scale = scale
        self.begins = begins
        self.speed = speed
        self.opens = opens
        """The story's own date and time at its begin, for stories that go by the clock on the wall."""

    @property
    def speed_words(self) -> str:
        """Nothing at the usual speed."""
        return "" if self.speed == 1 else f"{self.speed:g} times as quick"

    def real_at(self, story: Millis) -> Millis:
        """The real instant at which so much story time has passed."""
        return self.begins + round(self.scale.to_real(story) / self.speed)

    def story_at(self, real: Millis) -> Millis:
        """How much story time has passed at a real instant."""
        return round(self.scale.to_story(max(0, real - self.begins) * self.speed))

    def at(self, moment: datetime) -> datetime:
        """The real instant of a date and time in the story: what `schedule(at=...)` is given."""
        assert self.opens is not None, "this story has no dates"
        return as_datetime(self.real_at((moment - self.opens) // timedelta(milliseconds=1)))

    def after(self, length: str, *, since: str) -> datetime:
        """The real instant of `length` after the story time `since`."""
        return as_datetime(self.real_at(duration(since) + duration(length)))

    def length(self, length: str | Millis) -> timedelta:
        """How long a length of story time really takes."""
        millis = length if isinstance(length, int) else duration(length)
        return timedelta(milliseconds=self.scale.to_real(millis) / self.speed)

    def words(self, real: Millis) -> str:
        """The story time of a real instant: "Fri 08:00", or "2h 5m" since its begin."""
        story = self.story_at(real)
        if self.opens is not None:
            return (self.opens + timedelta(milliseconds=story, seconds=30)).strftime("%a %H:%M")
        seconds = round(story / 1000)
        if seconds < 60:
            return f"{seconds}s"
        minutes, seconds = divmod(seconds, 60)
        hours, minutes = divmod(minutes, 60)
        if hours == 0:
            return f"{minutes}m {seconds}s" if seconds and minutes < 10 else f"{minutes}m"
        return f"{hours}h {minutes}m" if minutes else f"{hours}h"


def zone_of(name: str, hours: int) -> tzinfo:
    """A time zone by name; by its hours from UTC on a machine that has no zone data."""
    try:
        return ZoneInfo(name)
    except ZoneInfoNotFoundError:
        return timezone(timedelta(hours=hours), name)
