"""Which strategy to pick: what is asked for, held against what strategies say of themselves and what was measured.

There is no table of opinions. A rule looks at a strategy's class (its servers, verbs, precision, flaws) and at its
figures, and says why it is out, or nothing. What kind a flaw is of, its own function tells: it is asked about figures
in which tasks are lost, done twice, or late. Of those that are left, the first by `_order` is picked.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from bide_lab.figures import SHARES, Figures
from bide_lab.report.findings import NOT_WAITED_FOR, Findings, Row
from bide_lab.report.measures import BY_NAME, figure
from bide_lab.strategy import Flaw, Strategy
from bide_lab.workloads import WORKLOADS

DOWN = frozenset({"killed", "cut", "away", "restarted", "failover", "deaf", "writer"})
"""Workloads in which a process dies, or is away, or is cut off."""


class Twice(StrEnum):
    """Whether a task may be done twice."""

    YES = "yes"
    CRASH = "crash"
    """Only after something has died."""
    NO = "no"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What is asked of a strategy."""

    tasks: int = 100_000
    """That wait at the same time."""
    late: float = 1.0
    """Seconds by which 99 of 100 may be late at most."""
    servers: frozenset[str] = frozenset()
    """The kinds that there are."""
    several: bool = False
    """Whether processes on several machines take part."""
    cancel: bool = True
    move: bool = True
    survive: bool = True
    """Whether tasks must outlive a process that dies."""
    twice: Twice = Twice.CRASH
    memory: int = 1 << 30
    """Bytes that its own processes may take for what waits."""


class Reason(str):
    """Why a strategy is out, in words; `measured` tells whether a figure says so, or only the strategy itself."""

    __slots__ = ("measured",)

    def __new__(cls, text: str, *, measured: bool = False) -> Reason:
        made = super().__new__(cls, text)
        made.measured = measured
        return made

    measured: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A strategy, and what speaks against it and for it."""

    strategy: type[Strategy]
    row: Row
    against: Sequence[Reason] = ()
    merits: Sequence[str] = ()
    """What it fulfils, with figures where there are any."""
    minds: Sequence[str] = ()
    """What it is known for and what does not speak against it here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The answer."""

    fitting: Sequence[Candidate]
    """The best first; the first is the one to pick."""
    excluded: Sequence[Candidate]
    """In the order of the catalogue, but for the case that none fits: then those with the fewest reasons first."""
    measured: bool
    """Whether there were any figures to go by."""


def choose(wishes: Wishes, found: Findings, strategies: Iterable[type[Strategy]]) -> Choice:
    """Hold all strategies against the wishes."""
    rows = {row.name: row for row in found.rows}
    every = [_candidate(wishes, one, rows[one.name]) for one in strategies]
    fitting = sorted((one for one in every if not one.against), key=_order)
    excluded = [one for one in every if one.against]
    if not fitting:
        excluded.sort(key=lambda one: (len(one.against), _order(one)))
    return Choice(fitting=fitting, excluded=excluded, measured=any(row.measured for row in found.rows))


def _candidate(wishes: Wishes, strategy: type[Strategy], row: Row) -> Candidate:
    against = [reason for rule in RULES if (reason := rule(wishes, strategy, row))]
    bare = Candidate(strategy=strategy, row=row, against=against)
    return (
        bare if against else replace(bare, merits=_merits(wishes, strategy, row), minds=_minds(wishes, strategy, row))
    )


def _servers(wishes: Wishes, strategy: type[Strategy], row: Row) -> Reason | None:
    missing = [kind for kind in strategy.needs if kind not in wishes.servers]
    return Reason(f"needs {' and '.join(missing)}, which you have not") if missing else None


def _machines(wishes: Wishes, strategy: type[Strategy], row: Row) -> Reason | None:
    if wishes.several and not strategy.needs:
        return Reason(f"what waits is in a {'process' if strategy.in_process else 'file'} of one machine")
    return None


def _verbs(wishes: Wishes, strategy: type[Strategy], row: Row) -> Reason | None:
    wanted = {"cancel": wishes.cancel, "reschedule": wishes.move}
    reasons = dict.fromkeys(strategy.cannot[verb] for verb, is_wanted in wanted.items()
                            if is_wanted and verb in strategy.cannot)  # fmt: skip
    return Reason("; ".join(reasons)) if reasons else None


def _fitness(wishes: Wishes, strategy: type[Strategy], row: Row) -> Reason | None:
    return Reason(strategy.unfit) if strategy.unfit else None


def _size(wishes: Wishes, strategy: type[Strategy], row: Row) -> Reason | None:
    if strategy.bears is not None and wishes.tasks > strategy.bears:
        return Reason(f"no machine should be asked to bear more than {strategy.bears:,} at once in this way")
    each = row.value(BY_NAME["bytes"])
    if each is not None and each * wishes.tasks > wishes.memory:
        return Reason(
            f"its own processes would take {bytes_words(each * wishes.tasks)} for {wishes.tasks:,} tasks "
            f"({figure(each)} bytes each)", measured=True,
        )  # fmt: skip
    return None


def _lateness(wishes: Wishes, strategy: type[Strategy], row: Row) -> Reason | None:
    seen = late_words(row)
    if (strategy.precision or 0.0) > wishes.late:
        return Reason(f"up to {span_words(strategy.precision or 0.0)} late by design{f' ({seen})' if seen else ''}")
    steady = row.figures("steady")
    if steady is not None and steady.p99 is not None and steady.p99 > wishes.late * 1000:
        return Reason(f"99 of 100 were late by up to {figure(steady.p99)} ms (steady)", measured=True)
    for flaw in strategy.flaws:
        figures = row.figures(flaw.workload)
        if flaw.workload in DOWN or flaw.workload in NOT_WAITED_FOR or LATE not in kinds_of(flaw):
            continue
        if figures is None:
            return Reason(flaw.text)
        if flaw.seen(figures) and (figures.p99 or 0) > wishes.late * 1000:
            return Reason(f"{flaw.text}: {flaw.seen(figures)} ({flaw.workload})", measured=True)
    return None


def _early(wishes: Wishes, strategy: type[Strategy], row: Row) -> Reason | None:
    for name, result in row.measured.items():
        if result.figures is not None and result.figures.early:
            return Reason(f"fired {result.figures.early:,} of {result.figures.expected:,} before their time ({name})",
                          measured=True)  # fmt: skip
    return None


def _losses(wishes: Wishes, strategy: type[Strategy], row: Row) -> Reason | None:
    matters = [name for name in WORKLOADS if name not in NOT_WAITED_FOR and (wishes.survive or name not in DOWN)]
    for name in matters:
        seen = row.figures(name)
        if seen is not None and seen.lost:
            return Reason(f"lost {seen.lost:,} of {seen.expected:,} ({name}: {WORKLOADS[name].about})", measured=True)
    if known := _known(strategy, row, matters, LOST):
        return known
    if wishes.survive and strategy.loses:
        return Reason(f"loses {strategy.loses}")
    if wishes.survive and strategy.in_process and row.figures("restarted") is None:
        return Reason("what waits is in the memory of one process, and gone with it")
    return None


def _repeats(wishes: Wishes, strategy: type[Strategy], row: Row) -> Reason | None:
    if wishes.twice is Twice.YES:
        return None
    matters = [name for name in WORKLOADS
               if name not in NOT_WAITED_FOR and (wishes.twice is Twice.NO or name not in DOWN)]  # fmt: skip
    for name in matters:
        seen = row.figures(name)
        if seen is not None and seen.duplicated:
            return Reason(f"did {seen.duplicated:,} of {seen.expected:,} twice ({name}: {WORKLOADS[name].about})",
                          measured=True)  # fmt: skip
    if wishes.twice is Twice.NO and strategy.hold and not strategy.in_process and row.figures("killed") is None:
        return Reason("what a dead consumer held is given to another, who may do it a second time")
    return _known(strategy, row, matters, DOUBLED)


def _known(strategy: type[Strategy], row: Row, matters: Sequence[str], kind: Figures) -> Reason | None:
    """A flaw of this kind that the strategy tells of and that was not looked for."""
    for flaw in strategy.flaws:
        if flaw.workload in matters and row.figures(flaw.workload) is None and kind in kinds_of(flaw):
            return Reason(flaw.text)
    return None


Rule = Callable[[Wishes, type[Strategy], Row], Reason | None]
RULES: Sequence[Rule] = (_servers, _fitness, _machines, _verbs, _lateness, _early, _losses, _repeats, _size)


def _made(**figures: int | float) -> Figures:
    """Figures in which one thing is wrong. Counts that nobody made are 0."""
    late = figures.pop("late", 0.1)
    whole = {"scheduled": 100, "expected": 100, "fired": 100, "lost": 0, "duplicated": 0, "early": 0, "revived": 0}
    made = Figures(**{**whole, **figures}, late=[late] * len(SHARES))  # type: ignore[arg-type]
    made.counts = defaultdict(float)
    return made


LOST = _made(fired=40, lost=60)
DOUBLED = _made(duplicated=60)
LATE = _made(late=1e7)
"""What the kind of a flaw is found out with."""


def kinds_of(flaw: Flaw) -> list[Figures]:
    """Which of `LOST`, `DOUBLED` and `LATE` show the flaw: none of them if it shows in something else."""
    return [kind for kind in (LOST, DOUBLED, LATE) if flaw.seen(kind)]


def _order(one: Candidate) -> tuple[float, ...]:
    """What comes first: measured, fewer things to mind, fewer servers, closer to the time, cheaper while idle."""
    steady, idle = one.row.figures("steady"), one.row.figures("idle")
    p99 = steady.p99 if steady is not None else None
    spent = (idle.client_cpu_pct or 0.0) + (idle.server_cpu_pct or 0.0) if idle is not None else math.inf
    near = math.ceil(math.log10(max(p99, 1.0))) if p99 is not None else math.inf
    return not one.row.measured, len(one.minds), len(one.strategy.needs), near, spent


def _merits(wishes: Wishes, strategy: type[Strategy], row: Row) -> list[str]:
    told = [f"needs {' and '.join(strategy.needs)}, which you have" if strategy.needs else "needs no server"]
    has = [word for word, wanted, verb in (("cancelled", wishes.cancel, "cancel"), ("moved", wishes.move, "reschedule"))
           if wanted and verb not in strategy.cannot]  # fmt: skip
    told += [f"what waits can be {' and '.join(has)}"] if has else []
    told.append(late_words(row) or _unmeasured_lateness(strategy))
    for name in sorted(DOWN) if wishes.survive else []:
        seen = row.figures(name)
        if seen is not None and seen.expected and not seen.lost:
            twice = f", {seen.duplicated:,} done twice" if seen.duplicated else ""
            told.append(f"lost none of {seen.expected:,}{twice} ({name}: {WORKLOADS[name].about})")
    if (each := row.value(BY_NAME["bytes"])) is not None:
        servers = row.value(BY_NAME["server-bytes"])
        beside = f", {bytes_words(servers * wishes.tasks)} on the servers" if servers else ""
        told.append(f"{wishes.tasks:,} tasks take {bytes_words(each * wishes.tasks)} of its own memory{beside}")
    if (rate := row.value(BY_NAME["completed"])) is not None:
        told.append(f"fired {figure(rate)} a second in a burst")
    idle = row.figures("idle")
    if idle is not None and idle.client_cpu_pct is not None:
        told.append(f"{figure(idle.client_cpu_pct)} % of a processor while nothing is due")
    return told


def _minds(wishes: Wishes, strategy: type[Strategy], row: Row) -> list[str]:
    """What nobody has looked at, and its flaws, but for those that were not seen and those that the wishes allow."""
    told = []
    if wishes.survive and not _tried(strategy, row, DOWN):
        told.append("whether anything is lost when something dies was not measured")
    if wishes.twice is not Twice.YES and not _tried(strategy, row, {"two"} if wishes.twice is Twice.CRASH else DOWN):
        when = "two of each consumer run" if wishes.twice is Twice.CRASH else "something dies"
        told.append(f"whether a task is done twice when {when} was not measured")
    for flaw in strategy.flaws:
        figures = row.figures(flaw.workload)
        seen = flaw.seen(figures) if figures is not None else ""
        kinds = kinds_of(flaw)
        allowed = (LOST in kinds and not wishes.survive and flaw.workload in DOWN) or (
            DOUBLED in kinds and wishes.twice is Twice.YES
        )
        if (seen or figures is None) and not allowed:
            told.append(f"{flaw.text}{f': {seen}' if seen else ' (not measured)'}")
    return told


def _tried(strategy: type[Strategy], row: Row, names: Iterable[str]) -> bool:
    """Whether any of these workloads was played, or none of them makes sense here."""
    sensible = [name for name in names if not WORKLOADS[name].why_not(strategy)]
    return not sensible or any(row.figures(name) is not None for name in sensible)


def late_words(row: Row) -> str:
    """What was seen of its lateness; empty if nothing was."""
    steady = row.figures("steady")
    if steady is None or steady.p50 is None or steady.p99 is None:
        return ""
    result = row.results["steady"]
    how = ["steady", *(["quick"] if result.quick else [])]
    how += [f"a minute run as {figure(result.minute)} s"] if row.precision and result.minute != 60 else []
    return f"late p50 {figure(steady.p50)} ms, p99 {figure(steady.p99)} ms ({', '.join(how)})"


def _unmeasured_lateness(strategy: type[Strategy]) -> str:
    precision = strategy.precision
    return f"up to {span_words(precision)} late by design" if precision else "its lateness was not measured"


def span_words(seconds: float) -> str:
    """
    >>> span_words(0.1), span_words(60), span_words(3600)
    ('0.1 s', '1 min', '1 h')
    """
    for size, name in ((3600, "h"), (60, "min")):
        if seconds >= size and seconds % size == 0:
            return f"{figure(seconds / size)} {name}"
    return f"{figure(seconds)} s"


def bytes_words(value: float) -> str:
    """
    >>> bytes_words(512), bytes_words(48_500_000), bytes_words(4.7e9)
    ('512 B', '48.5 MB', '4.7 GB')
    """
    for size, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= size:
            return f"{figure(value / size)} {name}"
    return f"{figure(value)} B"
