"""The journals of a cell, which its processes write and the judge reads: calls, and effects.

Each line is written at once by an append of its own, so that it survives the end of its process by any signal: a
system call, of half a microsecond.

    > 17 schedule k1 1763800000000 1763799998000000000      a call was begun: number, verb, key, due, at
    < 17 ok 1763799998001000000                             and answered: ok, late (too late) or failed
    ! k1 1763800000000 1763800000002000000                  an effect is done: key, due, and when it began

Times of `at` are nanoseconds, `due` milliseconds; `-` stands for no due time. An effect whose process dies before it is
done has not been.

The figures of one cell, which the results file holds, and the measures by which strategies are compared.
"""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from bide.cli.bench.worker import percentile

SHARES = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999, 1.0)
"""The points of a lateness curve."""


class Figures(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Times in milliseconds unless they say otherwise. A figure that was not taken is None, never 0."""

    scheduled: int = 0
    """Tasks whose schedule was answered."""
    expected: int = 0
    """Firings that had to be: what was scheduled and not cancelled, each at its last time, within the cell's length."""
    fired: int = 0
    """Of those, how many there were."""
    lost: int | None = None
    """Of those, how many there were not."""
    duplicated: int | None = None
    """Firings beyond the first."""
    early: int | None = None
    """Firings before the time that was then in force."""
    revived: int | None = None
    """Firings after a cancel that was answered."""
    late: Sequence[float] = ()
    """Lateness at each of `SHARES`."""
    schedules_per_s: float | None = None
    client_cpu_pct: float | None = None
    """Of one processor, all of the strategy's own processes."""
    server_cpu_pct: float | None = None
    client_bytes_per_task: float | None = None
    """Growth of the resident memory of the strategy's own processes."""
    server_bytes_per_task: float | None = None
    threads: int | None = None
    """Of the strategy's own processes, at most."""
    trips_per_task: float | None = None
    """Messages to the servers from first to last, less those sent while nothing is due."""
    idle_trips_per_s: float | None = None
    """Messages to the servers while nothing is due."""
    verbs: Mapping[str, float | str] = {}
    """By verb: microseconds of a lone call (median), or why there is none."""
    counts: dict[str, float] = {}
    """Further counts of the strategy and the workload."""
    curve: Mapping[str, Mapping[str, float]] = {}
    """By operation, by how many wait: nanoseconds or bytes, as the name of the operation says."""

    def late_at(self, share: float) -> float | None:
        """Lateness at one of `SHARES`; None if nothing fired."""
        return self.late[SHARES.index(share)] if self.late else None

    @property
    def p50(self) -> float | None:
        return self.late_at(0.5)

    @property
    def p99(self) -> float | None:
        return self.late_at(0.99)

    @property
    def most(self) -> float | None:
        return self.late_at(1.0)


class Result(msgspec.Struct, kw_only=True, frozen=True):
    """One line of the results file: one cell, measured or not."""

    strategy: str
    workload: str
    quick: bool
    minute: float
    version: str
    """bide's, and with it the lab's."""
    at: str
    """When, RFC 3339."""
    seconds: float
    figures: Figures | None = None
    why_not: str = ""
    """Why it was not measured."""
    machine: Mapping[str, Any] = {}

    @property
    def cell(self) -> tuple[str, str]:
        return self.strategy, self.workload


class Measure(NamedTuple):
    """One figure of one workload, by which strategies are compared."""

    name: str
    workload: str
    unit: str
    head: str
    """The heading of its column."""
    title: str
    """Its words within a sentence: "lateness of half of the tasks"."""
    of: Callable[[Figures], float | None]
    more: bool = False
    """More is better."""
    counts_harm: bool = False
    """It counts things that went wrong."""

    @property
    def whose(self) -> str:
        """The processes that the cost is of."""
        return "servers" if "server" in self.name else "its processes"

    def better(self, one: float, other: float) -> bool:
        return one > other if self.more else one < other

    def words(self, value: float) -> str:
        return f"{figure(value)}{' ' if self.unit[:1].isalpha() else ''}{self.unit}"


def _verb(verb: str) -> Measure:
    def cost(seen: Figures) -> float | None:
        value = seen.verbs.get(verb)
        return None if isinstance(value, str) else value

    return Measure(f"verb-{verb}", "verbs", "µs", verb, f"time that a lone {verb} takes", cost)


def _harm(workload: str, when: str) -> tuple[Measure, Measure]:
    """Tasks lost, and done twice."""
    return (
        Measure(f"lost-{workload}", workload, "", f"lost, {workload}", f"tasks lost when {when}",
                lambda seen: seen.lost, counts_harm=True),
        Measure(f"twice-{workload}", workload, "", f"done twice, {workload}", f"tasks done twice when {when}",
                lambda seen: seen.duplicated, counts_harm=True),
    )  # fmt: skip


MEASURES = (
    Measure("late-p50", "steady", "ms", "late p50", "median lateness under a steady load", lambda seen: seen.p50),
    Measure("late-p99", "steady", "ms", "late p99", "p99 lateness under a steady load", lambda seen: seen.p99),
    # from the time at which all are due, since some strategies take all out before they fire the first
    Measure("completed", "burst", "/s", "fired/s", "tasks fired a second in a burst, from its time on",
            lambda seen: seen.fired / seen.most * 1000 if seen.most else None, more=True),
    Measure("burst-p99", "burst", "ms", "burst p99", "p99 lateness in a burst", lambda seen: seen.p99),
    Measure("scheduled", "burst", "/s", "scheduled/s", "schedules a second", lambda seen: seen.schedules_per_s, True),
    Measure("steady-cpu", "steady", "%", "CPU", "processor time of its own processes under a steady load",
            lambda seen: seen.client_cpu_pct),
    Measure("idle-cpu", "idle", "%", "idle CPU", "processor time of its own processes while nothing is due",
            lambda seen: seen.client_cpu_pct),
    Measure("idle-server-cpu", "idle", "%", "idle CPU, servers", "processor time of the servers while nothing is due",
            lambda seen: seen.server_cpu_pct),
    Measure("idle-trips", "idle", "/s", "asked/s, idle", "messages to the servers a second while nothing is due",
            lambda seen: seen.idle_trips_per_s),
    Measure("bytes", "idle", "B", "bytes/task", "memory of its own processes for each task that waits",
            lambda seen: seen.client_bytes_per_task),
    Measure("server-bytes", "idle", "B", "bytes/task, servers", "memory of the servers for each task that waits",
            lambda seen: seen.server_bytes_per_task),
    Measure("trips", "trips", "", "messages/task", "messages to the servers for one task, from schedule to done",
            lambda seen: seen.trips_per_task),
    *(_verb(verb) for verb in ("schedule", "reschedule", "cancel", "fire_now")),
    *_harm("killed", "every consumer is killed"),
    *_harm("cut", "every connection is cut"),
    *_harm("two", "two of each consumer run"),
    *_harm("away", "no consumer runs for six strategy-minutes"),
)  # fmt: skip
"""In the order in which they are reported."""
BY_NAME = {one.name: one for one in MEASURES}


def figure(value: float) -> str:
    """Three digits that count, in groups of three.

    >>> figure(0.0012), figure(3.14159), figure(27182.8), figure(12.0), figure(0)
    ('0.0012', '3.14', '27,200', '12', '0')
    """
    if value == 0:
        return "0"
    if abs(value) >= 100:
        digits = len(str(int(abs(value))))
        return f"{round(value, min(0, 3 - digits)):,.0f}" if value != int(value) or digits > 4 else f"{value:,.0f}"
    text = f"{value:.3g}"
    return f"{value:.4f}".rstrip("0").rstrip(".") if "e" in text else text


_MS = 1_000_000
"""Nanoseconds."""


class Call(NamedTuple):
    """One verb of one key, as its caller saw it."""

    verb: str
    key: str
    due: int | None
    begun: int
    answered: int | None
    """None: it never was, or with an error."""
    done: bool
    """True if the answer says that it was done."""

    @property
    def sets(self) -> int | None:
        """The time in force from it on, in nanoseconds; None: it shall not happen."""
        return None if self.verb == "cancel" else self.begun if self.verb == "fire_now" else (self.due or 0) * _MS


class Firing(NamedTuple):
    """One effect that was done."""

    key: str
    due: int
    at: int
    """When it began."""


class Journal:
    """One process's file. Any thread may write: what is appended in one call stays together."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        self._number = 0

    def begun(self, verb: str, keys: Iterable[tuple[str, int | None]]) -> list[int]:
        """A call for several keys is begun; the numbers to answer by."""
        at, first = time.time_ns(), self._number + 1
        lines = [f"> {number} {verb} {key} {'-' if due is None else due} {at}\n"
                 for number, (key, due) in enumerate(keys, start=first)]  # fmt: skip
        self._number += len(lines)
        os.write(self._file, "".join(lines).encode())
        return list(range(first, self._number + 1))

    def answered(self, numbers: Iterable[int], word: str) -> None:
        at = time.time_ns()
        os.write(self._file, "".join(f"< {number} {word} {at}\n" for number in numbers).encode())

    def effect(self, key: str, due: int, at: int) -> None:
        os.write(self._file, b"! %b %d %d\n" % (key.encode(), due, at))

    def close(self) -> None:
        os.close(self._file)


def whole_lines(path: Path, *, since: int = 0) -> bytes:
    """The journal from the byte `since` on, up to its last line that is whole."""
    with path.open("rb") as file:
        file.seek(since)
        new = file.read()
    return new[: new.rfind(b"\n") + 1]


def read(paths: Iterable[Path]) -> tuple[list[Call], list[Firing]]:
    """All calls by their beginning and all firings by their time. A line that was cut off is passed over."""
    calls: list[Call] = []
    firings: list[Firing] = []
    for path in paths:
        begun: dict[str, Call] = {}
        for line in whole_lines(path).decode().splitlines():
            kind, *words = line.split()
            if kind == "!":
                firings.append(Firing(words[0], int(words[1]), int(words[2])))
            elif kind == ">":
                due = None if words[3] == "-" else int(words[3])
                begun[words[0]] = Call(words[1], words[2], due, int(words[4]), None, False)
            elif words[1] != "failed":
                begun[words[0]] = begun[words[0]]._replace(answered=int(words[2]), done=words[1] == "ok")
        calls += begun.values()
    return sorted(calls, key=lambda call: call.begun), sorted(firings, key=lambda firing: firing.at)


def judge(calls: Iterable[Call], firings: Iterable[Firing], *, until: int) -> Figures:
    """The firings that had to be, those that there were, and those that should not have been.

    `until`, in nanoseconds: what is due later need not have fired. `calls` in the order in which they began. A call
    that was never answered may have been done or not, so that nothing is held against a strategy for it.
    """
    by_key: dict[str, list[Call]] = defaultdict(list)
    for one in calls:
        if one.answered is None or one.done:  # else nothing was done, as the answer says
            by_key[one.key].append(one)
    fired: Counter[Call] = Counter()
    early = revived = 0
    late: list[float] = []
    for firing in sorted(firings, key=lambda one: one.at):
        call = _in_force(by_key.get(firing.key, ()), firing.at, fired)
        if call is None or call.sets is None:
            revived += 1
            continue
        early += firing.at < call.sets
        if call not in fired:
            late.append((firing.at - call.sets) / _MS)
        fired[call] += 1
    owed = [
        one for *_, one in by_key.values() if one.answered is not None and one.sets is not None and one.sets <= until
    ]
    done = sum(one in fired for one in owed)
    return Figures(
        scheduled=sum(1 for ones in by_key.values() if ones[0].answered is not None),
        expected=len(owed), fired=done, lost=len(owed) - done,
        duplicated=fired.total() - len(fired), early=early, revived=revived, late=curve(late),
    )  # fmt: skip


def _in_force(calls: Sequence[Call], at: int, fired: Container[Call]) -> Call | None:
    """The call whose time a firing belongs to; None if there was none yet.

    While a call is under way the one before it may count as well: the one that the firing fits.
    """
    chosen: Call | None = None
    for one in calls:
        if one.begun > at:
            break
        settled = one.answered is not None and one.answered <= at
        if settled or chosen is None or chosen in fired or chosen.sets is None or at < chosen.sets:
            chosen = one
    return chosen


def curve(late: Sequence[float]) -> Sequence[float]:
    """The lateness at each of `SHARES`, to the microsecond."""
    ordered = sorted(late)
    return [round(percentile(ordered, share), 3) for share in SHARES] if ordered else ()
