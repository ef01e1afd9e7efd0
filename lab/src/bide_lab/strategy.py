"""The seam of the lab: what a strategy is, so that every one can be asked the same and judged the same.

A strategy is a class; all its variants are in one module, with a card beside it (see `strategies`). The class names
itself, the servers it needs, the processes that have to run, and the verbs that it does not have, with the reason in
one sentence.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, NoReturn, Protocol

import msgspec

from bide_lab.figures import Figures

VERBS = ("schedule", "reschedule", "cancel", "fire_now")
"""The calls that a client may make, in the order in which reports show them."""


class Item(NamedTuple):
    """Something to be done later."""

    key: str
    due: int
    """Milliseconds since the epoch."""


class Effect(Protocol):
    """The work itself, which a strategy calls when it fires and the lab writes down."""

    async def __call__(self, key: str, due: int) -> None:
        """Do it. `due` is the time that this firing was meant for, as the strategy knows it.

        Takes as long as the workload says (see `Trial.start`), and is written down when it is done.
        """
        ...

    def blocking(self, key: str, due: int) -> None:
        """The same for a strategy that fires from threads."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Where one cell is played. The same in each of its processes."""

    urls: Mapping[str, str]
    """By the kind of server: those that the strategy needs."""
    prefix: str
    """The beginning of the names of everything that it makes: letters, digits and underscores."""
    folder: Path
    """For files of its own."""
    minute: float = 1.0
    """Seconds that one minute of the strategy's own periods and levels takes; delays of tasks are never scaled."""
    options: Mapping[str, float] = field(default_factory=dict)
    """Requests of a workload to some strategies: each documents those that it reads."""

    def span(self, seconds: float) -> float:
        """Seconds that `seconds` of the strategy's own periods take here."""
        return seconds * self.minute / 60


class Harm(StrEnum):
    """The kinds of harm that a flaw may do to tasks."""

    LOST = "lost"
    TWICE = "twice"
    LATE = "late"


class Flaw(NamedTuple):
    """A known weakness of the strategy, and where it is to be seen."""

    text: str
    """One sentence in the present tense: "two pollers fire the same task"."""
    workload: str
    seen: Callable[[Figures], str]
    """Its trace in these figures, in words with numbers; empty if there is none."""
    harm: Harm | None = None
    """Done to tasks, whatever these are. None: it costs something else, or it depends on the tasks."""


def when(name: str, words: str, *, over: float = 0) -> Callable[[Figures], str]:
    """The `seen` of a flaw that shows where a figure, or else a count, of this name is `over` so much.

    `words` are a format of all figures and counts, and `p50`, `most` and `done`; one that was not taken is 0.

    >>> when("lost", "{lost} of {expected} gone")(Figures(lost=3, expected=9))
    '3 of 9 gone'
    """

    def seen(figures: Figures) -> str:
        taken = figures.counts | msgspec.structs.asdict(figures)
        taken |= {"p50": figures.p50, "most": figures.most, "done": figures.done}
        values: dict[str, Any] = defaultdict(int, {one: value for one, value in taken.items() if value is not None})
        return words.format_map(values) if values[name] > over else ""

    return seen


def held_up(seen: Figures) -> str:
    """How late the quick tasks were behind slow ones; empty if that was no more than a machine is slow at times."""
    slow, late, many = seen.counts.get("slow_ms", 0), seen.p50 or 0, seen.counts.get("slow", 0)
    if not slow or late < slow / 4:
        return ""
    tasks = f"{many:.0f} tasks" if many else "one task"
    return f"behind {tasks} of {slow / 1000:g} s half of the others were {late:,.0f} ms late"


NEVER_DONE = when("lost", "{lost} of {expected} tasks never done")
DONE_TWICE = when("duplicated", "{duplicated} of {expected} tasks done twice")
GONE = Flaw(
    "what waits in memory is gone when the process ends, however it does", "restarted",
    when("lost", "{lost} of {expected} tasks gone with the process"), Harm.LOST,
)  # fmt: skip
"""The flaw of all that is in one process's memory; each module shows it with one of its variants."""


class Strategy:
    """One way of doing something later. Each process of a cell makes one, opens it, and uses one side of it.

    A client calls the verbs, concurrently. A consumer calls `run` with one of the `roles`. Where `in_process` is true
    there is one process for both, and no other could take part.
    """

    name: ClassVar[str] = ""
    """As `S4-A`: the strategy's number, and the variant's letter or word where there are several."""
    title: ClassVar[str] = ""
    needs: ClassVar[Sequence[str]] = ()
    """The kinds of server: "redis", "postgres", "mysql", "rabbitmq", "rocketmq"."""
    roles: ClassVar[Sequence[str]] = ("worker",)
    """The processes that have to run, one of each at least, in the order in which they are started."""
    in_process: ClassVar[bool] = False
    cannot: ClassVar[Mapping[str, str]] = {}
    """By verb: why there is none."""
    precision: ClassVar[float] = 0.0
    """Seconds by which it is late by design, where that is more than a moment: of strategy time, so it is scaled."""
    hold: ClassVar[float] = 0.0
    """Seconds, not scaled, after which the tasks of a dead consumer are given to another."""
    time_out: ClassVar[float] = 0.0
    """Seconds of strategy time that have to pass besides, where it waits for a time-out of its own."""
    period: ClassVar[float] = 0.0
    """Seconds, not scaled, between two looks at what is due, where that is more than a moment."""
    again: ClassVar[float] = 0.0
    """Seconds of strategy time within which it meets what it has done once more, if it does at all."""
    direct: ClassVar[bool] = False
    """Its clients go to the server itself whatever stands between, so that nothing there counts or cuts."""
    shows: ClassVar[Sequence[str]] = ("steady",)
    """The workloads that a quick run plays besides those of its flaws."""
    skips: ClassVar[Mapping[str, str]] = {}
    """By workload: why that makes no sense here."""
    flaws: ClassVar[Sequence[Flaw]] = ()
    loses: ClassVar[str] = ""
    """The tasks that are lost when a process dies or is away, in words; empty if none are."""
    unfit: ClassVar[str] = ""
    """Why no workloads but those that it shows, and those of its flaws, make sense; empty if others do."""
    bears: ClassVar[int] = sys.maxsize
    """Tasks that it is asked to hold at most, where a machine does not bear any number of them."""

    @classmethod
    def known_by(cls) -> set[str]:
        """The workloads that it names."""
        return {*cls.shows, *(flaw.workload for flaw in cls.flaws)}

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.counted: Counter[str] = Counter()
        """Counts of this process, such as hops or messages passed on."""
        self.closing = AsyncExitStack()
        """All that `close` has to do."""

    async def prepare(self) -> None:
        """Make what all its processes need: tables, queues. Called once, before any other process opens it."""

    async def clear(self) -> None:
        """Take away whatever it made. Called once, after all processes have ended, however they did."""

    async def open(self) -> None:
        """Connect."""

    async def close(self) -> None:
        """Disconnect. Also called after `open` failed half way."""
        await self.closing.aclose()

    async def schedule(self, items: Sequence[Item]) -> None:
        """It answers when the tasks are as safe as they will be. Of one key there is one schedule in a cell."""
        raise NotImplementedError

    async def reschedule(self, item: Item) -> bool:
        """Move it to another time; False: it is too late for that."""
        raise NotImplementedError(self.cannot["reschedule"])

    async def cancel(self, key: str) -> bool:
        """It shall not happen; False: it is too late for that."""
        raise NotImplementedError(self.cannot["cancel"])

    async def fire_now(self, key: str) -> bool:
        """Let it happen at once; False: it has happened. Where nothing else is said, by moving it to now."""
        return await self.reschedule(Item(key, now()))

    async def run(self, role: str, effect: Effect) -> None:
        """Do the part of `role` until cancelled."""
        raise NotImplementedError

    def counts(self) -> Mapping[str, float]:
        """The counts of this process, which are added up over all of them."""
        return self.counted

    async def left(self) -> Mapping[str, float]:
        """Counts of what is on the servers now, such as bytes of a table: asked once, by the owner of the cell."""
        return {}

    async def committed(self) -> Mapping[str, int]:
        """By key: the due time of all that the caller's own data promise, whether or not the call was ever answered.

        For a strategy that keeps the business row apart from the timer; others owe what they have answered.
        """
        return {}


RUN_LOST = when("lost", "{lost} of {expected} runs never done")
RUN_TWICE = when("duplicated", "{duplicated} runs too many at {expected} instants")


class Recurrent(Strategy):
    """One way of doing something again and again, by a rule: a run for each minute of strategy time.

    The rule is part of what is deployed. An effect is told its nominal instant, a multiple of `every`, and any key.
    """

    cannot = dict.fromkeys(VERBS[1:], "a rule is deployed: there is no task to move or cancel")
    shows: ClassVar[Sequence[str]] = ("recurrence",)
    unfit = "it follows a rule, and takes no tasks"
    nodes: ClassVar[int] = 2
    """Processes of its first role, one of which is killed; there is one of each other role."""
    turn = 0
    """The last instant whose run this process took for its own."""

    @property
    def every(self) -> int:
        """Milliseconds."""
        return round(self.setting.span(60) * 1000)

    async def schedule(self, items: Sequence[Item]) -> None:
        """The rule is there already."""

    def nominal(self, at: int) -> int:
        """The last instant by then."""
        return at - at % self.every

    async def instants(self) -> AsyncIterator[int]:
        """Each instant when it has come, computed from now: one that passes meanwhile is left out."""
        while True:
            self.turn = self.nominal(max(self.turn, now())) + self.every
            while (left := self.turn / 1000 - time.time()) > 0:  # noqa: ASYNC110 - a time tells nobody
                await asyncio.sleep(left)
            yield self.turn


def now() -> int:
    """Milliseconds since the epoch, by this machine's clock: all of the lab runs on one."""
    return time.time_ns() // 1_000_000


async def together(*parts: Coroutine[Any, Any, object]) -> None:
    """All of them at once; when one fails the others are cancelled."""
    async with asyncio.TaskGroup() as group:
        for part in parts:
            group.create_task(part)


async def poll(seconds: float, look: Callable[[], Awaitable[object]]) -> NoReturn:
    """Call `look` again and again, with a pause unless it answers that there is more."""
    while True:
        if not await look():
            await asyncio.sleep(seconds)


async def each_period(seconds: float, work: Callable[[], Awaitable[object]]) -> NoReturn:
    """Call `work` at every full period of the clock, as cron does; one that is missed is left out."""
    while True:
        await asyncio.sleep(seconds - time.time() % seconds)
        await work()


async def due_or_told(due: int | None, told: asyncio.Event) -> None:
    """Wait until `due` (None: for ever), or until `told` is set: of an earlier task, say."""
    told.clear()
    with suppress(TimeoutError):
        async with asyncio.timeout(None if due is None else (due - now()) / 1000):
            await told.wait()
