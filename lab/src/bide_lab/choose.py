"""Which strategy to pick: what is asked for, held against what strategies say of themselves and what was measured.

There is no table of opinions. A rule looks at a strategy's class (its servers, verbs, precision, flaws) and at its
figures, and says why it is out, or nothing. Of those that are left, the first by `_order` is picked.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import NamedTuple

from rich.filesize import decimal

from bide.core.instants import duration_text
from bide_lab.figures import MEASURES, figure
from bide_lab.findings import NOT_WAITED_FOR, Findings, Row
from bide_lab.strategy import Harm, Strategy
from bide_lab.workloads import WORKLOADS

DOWN = frozenset({"killed", "cut", "away", "restarted", "failover", "deaf", "writer", "recurrence"})
"""Workloads in which a process dies, or is away, or is cut off."""


class Twice(StrEnum):
    """The cases in which a task may be done twice."""

    YES = "yes"
    CRASH = "crash"
    """Only after something has died."""
    NO = "no"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """The demands on a strategy."""

    tasks: int = 100_000
    """That wait at the same time."""
    late: float = 1.0
    """Seconds by which 99 of 100 may be late at most."""
    servers: frozenset[str] = frozenset()
    """The kinds that there are."""
    several: bool = False
    """Processes on several machines take part."""
    cancel: bool = True
    move: bool = True
    survive: bool = True
    """Tasks must outlive a process that dies."""
    twice: Twice = Twice.CRASH
    memory: int = 1 << 30
    """Bytes that its own processes may take for what waits."""


class Reason(NamedTuple):
    """Why a strategy is out."""

    words: str
    measured: bool = False
    """True if a figure says so, and not only the strategy itself."""


class Candidate(NamedTuple):
    """A strategy, and what speaks against it and for it."""

    row: Row
    against: Sequence[Reason]
    merits: Sequence[str] = ()
    """The wishes that it fulfils, with figures where there are any."""
    minds: Sequence[str] = ()
    """The flaws that do not speak against it here."""


class Choice(NamedTuple):
    """The answer."""

    fitting: Sequence[Candidate]
    """The best first; the first is the one to pick."""
    excluded: Sequence[Candidate]
    """In the order of the catalogue, but for the case that none fits: then those with the fewest reasons first."""
    measured: bool
    """True if there were any figures to go by."""


def choose(wishes: Wishes, found: Findings) -> Choice:
    """Hold all strategies against the wishes."""
    fitting, excluded = [], []
    for row in found.rows:
        if row.strategy is Strategy:  # only its results know it
            continue
        if against := list(_against(wishes, row)):
            excluded.append(Candidate(row, against))
        else:
            fitting.append(Candidate(row, (), list(_merits(wishes, row)), list(_minds(wishes, row))))
    if not fitting:
        excluded.sort(key=lambda one: (len(one.against), _order(one)))
    return Choice(sorted(fitting, key=_order), excluded, any(row.measured for row in found.rows))


def _against(wishes: Wishes, row: Row) -> Iterator[Reason]:
    """Everything that its class says, and of each further rule the first reason."""
    strategy = row.strategy
    if missing := [kind for kind in strategy.needs if kind not in wishes.servers]:
        yield Reason(f"needs {' and '.join(missing)}, which you have not")
    if strategy.unfit:
        yield Reason(strategy.unfit)
    if wishes.several and not strategy.needs:
        yield Reason(f"what waits is in a {'process' if strategy.in_process else 'file'} of one machine")
    wanted = [*(["cancel"] if wishes.cancel else []), *(["reschedule"] if wishes.move else [])]
    if reasons := dict.fromkeys(strategy.cannot[verb] for verb in wanted if verb in strategy.cannot):
        yield Reason("; ".join(reasons))
    for rule in (_lateness, _early, _losses, _repeats, _size):
        yield from islice(rule(wishes, row), 1)


def _lateness(wishes: Wishes, row: Row) -> Iterator[Reason]:
    by_design, seen, limit = row.strategy.precision, late_words(row), wishes.late * 1000
    if by_design > wishes.late:
        yield Reason(f"up to {duration_text(round(by_design * 1000))} late by design{f' ({seen})' if seen else ''}")
    steady = row.figures("steady")
    if steady is not None and steady.p99 is not None and steady.p99 > limit:
        yield Reason(f"99 of 100 were late by up to {figure(steady.p99)} ms (steady)", measured=True)
    for flaw in row.strategy.flaws:
        figures = row.figures(flaw.workload)
        if flaw.workload in DOWN or flaw.workload in NOT_WAITED_FOR or flaw.harm is not Harm.LATE:
            continue
        if figures is None:
            yield Reason(flaw.text)
        elif flaw.seen(figures) and (figures.p99 or 0) > limit:
            yield Reason(f"{flaw.text}: {flaw.seen(figures)} ({flaw.workload})", measured=True)


def _early(wishes: Wishes, row: Row) -> Iterator[Reason]:
    for name, seen in row.measured.items():
        if seen.early:
            yield Reason(f"fired {seen.early:,} of {seen.expected:,} before their time ({name})", measured=True)


def _losses(wishes: Wishes, row: Row) -> Iterator[Reason]:
    yield from _measured(row, wishes.survive, Harm.LOST)
    yield from _known(row, wishes.survive, Harm.LOST)
    if wishes.survive and row.strategy.loses:
        yield Reason(f"loses {row.strategy.loses}")
    if wishes.survive and row.strategy.in_process and row.figures("restarted") is None:
        yield Reason("what waits is in the memory of one process, and gone with it")


def _repeats(wishes: Wishes, row: Row) -> Iterator[Reason]:
    if wishes.twice is Twice.YES:
        return
    never = wishes.twice is Twice.NO
    yield from _measured(row, never, Harm.TWICE)
    if never and row.strategy.hold and not row.strategy.in_process and row.figures("killed") is None:
        yield Reason("what a dead consumer held is given to another, who may do it a second time")
    yield from _known(row, never, Harm.TWICE)


def _size(wishes: Wishes, row: Row) -> Iterator[Reason]:
    bears, each = row.strategy.bears, row.value(MEASURES["bytes"])
    if wishes.tasks > bears:
        yield Reason(f"no machine should be asked to bear more than {bears:,} at once in this way")
    if each is not None and each * wishes.tasks > wishes.memory:
        yield Reason(
            f"its own processes would take {decimal(round(each * wishes.tasks))} for {wishes.tasks:,} tasks "
            f"({figure(each)} bytes each)", measured=True,
        )  # fmt: skip


def _waited_for(down: bool) -> list[str]:
    """The workloads whose tasks have to fire; with those in which something dies, if that matters."""
    return [name for name in WORKLOADS if name not in NOT_WAITED_FOR and (down or name not in DOWN)]


def _measured(row: Row, down: bool, harm: Harm) -> Iterator[Reason]:
    """The harm of this kind that was seen."""
    words = "lost {:,} of {:,} ({}: {})" if harm is Harm.LOST else "did {:,} of {:,} twice ({}: {})"
    for name in _waited_for(down):
        lost, twice = row.harm(name)
        if count := lost if harm is Harm.LOST else twice:
            yield Reason(words.format(count, row.measured[name].expected, name, WORKLOADS[name].about), measured=True)


def _known(row: Row, down: bool, harm: Harm) -> Iterator[Reason]:
    """The flaws of this kind that the strategy tells of and that were not looked for."""
    for flaw in row.strategy.flaws:
        if flaw.workload in _waited_for(down) and row.figures(flaw.workload) is None and flaw.harm is harm:
            yield Reason(flaw.text)


def _order(one: Candidate) -> tuple[float, ...]:
    """Measured first, then fewer things to mind, fewer servers, closer to the time, cheaper while idle."""
    steady, idle = one.row.figures("steady"), one.row.figures("idle")
    p99 = steady.p99 if steady is not None else None
    spent = (idle.client_cpu_pct or 0.0) + (idle.server_cpu_pct or 0.0) if idle is not None else math.inf
    near = math.ceil(math.log10(max(p99, 1.0))) if p99 is not None else math.inf
    return not one.row.measured, len(one.minds), len(one.row.strategy.needs), near, spent


def _merits(wishes: Wishes, row: Row) -> Iterator[str]:
    strategy = row.strategy
    yield f"needs {' and '.join(strategy.needs)}, which you have" if strategy.needs else "needs no server"
    verbs = (("cancelled", wishes.cancel, "cancel"), ("moved", wishes.move, "reschedule"))
    if has := [word for word, wanted, verb in verbs if wanted and verb not in strategy.cannot]:
        yield f"what waits can be {' and '.join(has)}"
    by_design = f"up to {duration_text(round(strategy.precision * 1000))} late by design" if strategy.precision else ""
    yield late_words(row) or by_design or "its lateness was not measured"
    for name in sorted(DOWN) if wishes.survive else []:
        seen = row.figures(name)
        if seen is not None and seen.expected and not seen.lost:
            twice = f", {seen.duplicated:,} done twice" if seen.duplicated else ""
            yield f"lost none of {seen.expected:,}{twice} ({name}: {WORKLOADS[name].about})"
    if (each := row.value(MEASURES["bytes"])) is not None:
        servers = row.value(MEASURES["server-bytes"])
        beside = f", {decimal(round(servers * wishes.tasks))} on the servers" if servers else ""
        yield f"{wishes.tasks:,} tasks take {decimal(round(each * wishes.tasks))} of its own memory{beside}"
    if (rate := row.value(MEASURES["completed"])) is not None:
        yield f"fired {figure(rate)} a second in a burst"
    if (idle := row.value(MEASURES["idle-cpu"])) is not None:
        yield f"{figure(idle)} % of a processor while nothing is due"


def _minds(wishes: Wishes, row: Row) -> Iterator[str]:
    """Everything that nobody has looked at; and its flaws, but for those not seen and those that the wishes allow."""
    if wishes.survive and not _tried(row, DOWN):
        yield "whether anything is lost when something dies was not measured"
    if wishes.twice is Twice.CRASH and not _tried(row, {"two"}):
        yield "whether a task is done twice when two of each consumer run was not measured"
    if wishes.twice is Twice.NO and not _tried(row, DOWN):
        yield "whether a task is done twice when something dies was not measured"
    for flaw in row.strategy.flaws:
        figures = row.figures(flaw.workload)
        seen = flaw.seen(figures) if figures is not None else ""
        allowed = (flaw.harm is Harm.LOST and not wishes.survive and flaw.workload in DOWN) or (
            flaw.harm is Harm.TWICE and wishes.twice is Twice.YES
        )
        if (seen or figures is None) and not allowed:
            yield f"{flaw.text}{f': {seen}' if seen else ' (not measured)'}"


def _tried(row: Row, names: Iterable[str]) -> bool:
    """True if any of these workloads was played, or none of them makes sense here."""
    sensible = [name for name in names if not WORKLOADS[name].why_not(row.strategy)]
    return not sensible or any(row.figures(name) is not None for name in sensible)


def late_words(row: Row) -> str:
    """The lateness that was seen; empty if nothing was."""
    steady = row.figures("steady")
    if steady is None or steady.p50 is None or steady.p99 is None:
        return ""
    result = row.results["steady"]
    how = ["steady", *(["quick"] if result.quick else [])]
    how += [f"a minute run as {figure(result.minute)} s"] if row.strategy.precision and result.minute != 60 else []
    return f"late p50 {figure(steady.p50)} ms, p99 {figure(steady.p99)} ms ({', '.join(how)})"
