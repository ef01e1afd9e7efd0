"""The figures of a soak: the resources of processes and stores, their growth, and the remains in the end.

Memory, files and rows are as the system and the server report them; a figure that is not visible from here is omitted.

A figure that is sampled repeatedly is judged by a robust slope, its interval, and the allowed rise. The slope is Theil
and Sen's: the median of the slopes of all pairs of samples (H. Theil 1950, P. K. Sen 1968), which tolerates up to 29 %
of outliers. The interval is Sen's, from the spread of Kendall's rank statistic: of the sorted slopes of all pairs, as
many are left out at either end as chance would put there in one of a hundred series that do not grow. Both are computed
from the samples alone, without random numbers.

The memory of a process is not noise around a line: it rises in steps while caches fill and arenas are opened, and then
stays. So a figure *grows* only if three conditions hold after the warm-up:

- it rises, and not by chance: the whole interval lies above zero;
- it rises by more than is allowed, over the time that is judged;
- it goes on rising: over the second half alone by more than half of what is allowed.

If only the third fails, the figure has `settled`. A leak of one object for each task meets all three; see `BYTES`.

In the end the remaining rows and keys are counted, by table or kind, and compared with limits. Each bide process of the
run may leave a row of history for each minute (kept for a day), one for each handler that it announced, the last
answers to its calls, and its presence until that expires. The event log is capped, and the record of the namespace
stays. Nothing else may be left: no body, index entry, group, or entry of a task that should be forgotten.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import sqlite3
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import closing, suppress
from itertools import combinations
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple, TypeAlias

from msgspec import Struct
from msgspec.structs import asdict

from bide.core.names import RESERVED_TOPICS
from bide.engine.delivery.lease_extender import PURGE_EVERY
from bide_bench.plan import rounded
from bide_bench.processes import family, process_named
from bide_bench.redis_server import RedisServer
from bide_bench.sql_server import MysqlServer, PostgresServer
from bide_bench.target import SqliteTarget, Target

_PROC = Path("/proc")


def process(pid: int) -> dict[str, float]:
    """Resident bytes, open files and threads of a process; empty if the system does not show them."""
    place = _PROC / str(pid)
    try:
        status = _fields(place / "status")
        return {
            "resident": status["VmRSS"] * 1024,
            "descriptors": len(os.listdir(place / "fd")),
            "threads": status["Threads"],
        }
    except (OSError, KeyError):
        return {}


def _fields(path: Path) -> dict[str, int]:
    """The numbers of a file such as `/proc/7/status`, by name; sizes in kilobytes. Raises OSError."""
    found = {}
    for line in path.read_text(encoding="ascii", errors="replace").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            found[name] = int(words[0])
    return found


async def store(place: Target) -> dict[str, float]:
    """Figures of a store and its server, by name."""
    if isinstance(place, SqliteTarget):
        files = {"store_file_bytes": place.path, "store_wal_bytes": Path(f"{place.path}-wal")}
        return {name: float(path.stat().st_size) for name, path in files.items() if path.exists()}
    found: dict[str, float] = {f"store_{name}": value for name, value in (await place.health()).items()}
    if isinstance(place, PostgresServer):
        found |= _postgres(place.process)
    elif isinstance(place, MysqlServer):
        found |= await _mysql(place)
    elif isinstance(place, RedisServer) and not place.is_cluster:
        pid = int(place.client.info("server")["process_id"])
        found |= _of_server(process_named(pid, ("redis-server", "valkey-server")))
    return found


def _of_server(place: Path | None) -> dict[str, float]:
    """The server's process, if it runs here."""
    return {} if place is None else {f"server_{name}": value for name, value in process(int(place.name)).items()}


async def _mysql(server: MysqlServer) -> dict[str, float]:
    """The server's process, with the buffer pool apart: as configured, pages stay there until the pool is full."""
    found = _of_server(server.process)
    if "server_resident" in found:
        [[_, pool]] = await server.rows("SHOW GLOBAL STATUS LIKE 'Innodb_buffer_pool_bytes_data'")
        found |= {"server_private": found.pop("server_resident") - float(pool), "server_pool": float(pool)}
    return found


def _postgres(postmaster: Path | None) -> dict[str, float]:
    """The sums over all its processes: private memory, and apart the shared memory, which fills up once."""
    if postmaster is None:
        return {}
    private = shared = number = 0
    for one in family(postmaster):
        with suppress(OSError, KeyError):  # it ended a moment ago
            rollup = _fields(one / "smaps_rollup")
            private += rollup["Pss_Anon"] * 1024
            shared += rollup["Pss_Shmem"] * 1024
            number += 1
    return {"server_private": private, "server_shared": shared, "server_processes": number} if number else {}


FLAT, SETTLED, GROWS = "flat", "settled", "grows"
WARM_UP = 0.2
"""The fraction of the time that is not judged."""
_SURE = 2.576
"""Standard deviations on either side of a 99 % interval."""
_MOST = 120
"""The most points that are compared with each other: more are first grouped, each group by its median."""
_FEWEST = 4
MEBIBYTE = 1 << 20
LEAST = 300.0
"""The fewest seconds of a run whose slopes count."""


class Allowed(NamedTuple):
    """The allowed rise of a figure over the time that is judged: a fraction of its mean, and at least `least`."""

    part: float
    least: float

    def of(self, mean: float) -> float:
        """The allowed rise, in the unit of the figure."""
        return max(self.least, mean * self.part)


BYTES = Allowed(1 / 50, float(MEBIBYTE))
"""Memory; an allocator takes a mebibyte at a time. The smallest leak that a Python program can have for each task is an
object and the reference to it, 24 bytes. At 500 tasks a second that is more than 8 MB in the 12 minutes that are judged
of a quarter of an hour."""
BLOCKS = Allowed(1 / 50, 5_000.0)
"""Objects of Python's allocator: the number in use varies; one for each task would be hundreds of thousands."""
FILES = Allowed(1 / 10, 2.0 * MEBIBYTE)
"""Bytes on disk: they vary by megabytes when the store cleans up."""
FEW = Allowed(1 / 20, 2.0)
"""Threads and open files: connections vary with the load, a leak goes on."""
MANY = Allowed(1 / 4, 100.0)
"""Waiting tasks, retained tasks, dead rows."""
LATENESS = Allowed(1 / 2, 2.0)
"""Milliseconds."""


class Figure(NamedTuple):
    """A figure that must not grow: its name for people, its unit, and the allowed rise."""

    words: str
    unit: str
    allowed: Allowed


_FIGURES: Mapping[str, Figure] = {
    "resident": Figure("resident memory", "bytes", BYTES),
    "private": Figure("memory of its own", "bytes", BYTES),
    "used_bytes": Figure("memory used", "bytes", BYTES),
    "blocks": Figure("objects of Python's allocator", "", BLOCKS),
    "descriptors": Figure("open files", "", FEW),
    "threads": Figure("threads", "", FEW),
    "processes": Figure("processes", "", FEW),
    "file_bytes": Figure("file", "bytes", FILES),
    "wal_bytes": Figure("write-ahead log", "bytes", FILES),
    "table_bytes": Figure("table", "bytes", FILES),
    "index_bytes": Figure("indexes", "bytes", FILES),
    "bytes": Figure("files", "bytes", FILES),
    "live_rows": Figure("rows", "", MANY),
    "dead_rows": Figure("dead rows", "", MANY),
    "history": Figure("transactions not purged", "", MANY),
    "live": Figure("tasks alive", "", MANY),
    "remembered": Figure("ended tasks remembered", "", MANY),
    "late_p50_ms": Figure("lateness p50", "ms", LATENESS),
    "late_p99_ms": Figure("lateness p99", "ms", LATENESS),
}
"""Figures by the end of their names. All others are only recorded."""


def figure_of(name: str) -> tuple[str, Figure] | None:
    """The owner of a figure and its `Figure`, by the longest matching end of its name; None: it may grow.

    >>> whose, figure = figure_of("worker-1_resident")
    >>> whose, figure.words
    ('worker-1', 'resident memory')
    """
    end = max((one for one in _FIGURES if f"_{name}".endswith(f"_{one}")), key=len, default=None)
    return None if end is None else (name.removesuffix(end).rstrip("_"), _FIGURES[end])


class Slope(Struct, frozen=True, kw_only=True):
    """The course of one figure, in its own unit."""

    mean: float
    first: float
    """The median of the first tenth after the warm-up."""
    last: float
    """The median of the last tenth."""
    per_minute: float
    low: float
    high: float
    """The 99 % interval of the slope per minute, from `low` to `high`."""
    percent_per_hour: float
    """The slope as a percentage of the mean; 0 if the mean is 0."""
    allowed: float
    """The allowed rise over the time that is judged."""
    verdict: str

    def rounded(self) -> dict[str, Any]:
        """The fields, rounded for the report."""
        return {part: rounded(value) if isinstance(value, float) else value for part, value in asdict(self).items()}

    def __str__(self) -> str:
        return f"{rounded(self.per_minute)} a minute, from {rounded(self.first)} to {rounded(self.last)}"


def judge(points: Sequence[tuple[float, float]], allowed: float, *, period: float = 0.0) -> Slope | None:
    """Judge samples (seconds, value) in the order of time, without the first fifth. None: too few for a verdict.

    `allowed` is the allowed rise from the end of the warm-up to the last sample. For a figure that goes up and down
    within a `period` (seconds), the median of each whole period is taken. O(min(n, 120)^2).
    """
    if not points:
        return None
    begins = points[0][0] + WARM_UP * (points[-1][0] - points[0][0])
    after = [(at, value) for at, value in points if at >= begins]
    kept = [(at / 60, value) for at, value in _medians(after, period)]
    if len(kept) < _FEWEST or kept[-1][0] <= kept[0][0]:
        return None
    low, slope, high = interval(kept)
    span = kept[-1][0] - kept[0][0]
    mean = fmean(value for _, value in kept)
    tenth = max(1, len(kept) // 10)
    verdict = FLAT
    if low > 0 and slope * span > allowed:
        _, later, _ = interval(kept[len(kept) // 2 :])
        verdict = GROWS if later * span > allowed else SETTLED
    return Slope(
        mean=mean, first=median(value for _, value in kept[:tenth]), last=median(value for _, value in kept[-tenth:]),
        per_minute=slope, low=low, high=high, percent_per_hour=6000 * slope / mean if mean else 0.0,
        allowed=allowed, verdict=verdict,
    )  # fmt: skip


def interval(points: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """The lower end of the interval, the slope, and the upper end. One point gives an infinite interval. O(n^2 log n).

    >>> interval([(0, 1.0), (1, 2.0), (2, 3.0)])
    (1.0, 1.0, 1.0)
    """
    slopes = sorted((right[1] - left[1]) / (right[0] - left[0]) for left, right in combinations(points, 2)
                    if right[0] != left[0])  # fmt: skip
    if not slopes:
        return -math.inf, 0.0, math.inf
    number = len(points)
    spread = _SURE * math.sqrt(number * (number - 1) * (2 * number + 5) / 18)
    at = max(0, math.floor((len(slopes) - spread) / 2))
    return slopes[at], median(slopes), slopes[-1 - at]


def _medians(points: Sequence[tuple[float, float]], period: float) -> Sequence[tuple[float, float]]:
    """One point for each whole period, counted from the end, and at most `_MOST`; all points if there is no period."""
    span = points[-1][0] - points[0][0]
    length = max(period, span / _MOST) if period or len(points) > _MOST else 0.0
    if not length:
        return points
    groups: dict[int, list[tuple[float, float]]] = {}
    for at, value in reversed(points):
        groups.setdefault(int((points[-1][0] - at) / length), []).append((at, value))
    return [
        (median(at for at, _ in group), median(value for _, value in group))
        for number, group in reversed(groups.items())
        if number < int(span / length)
    ]


def judged(samples: Sequence[Mapping[str, Any]]) -> dict[str, Slope]:
    """The slope of every figure of the samples that must not grow, by its name."""
    found: dict[str, Slope] = {}
    long = bool(samples) and samples[-1]["at"] - samples[0]["at"] >= LEAST * 0.9
    for name in dict.fromkeys(name for sample in samples for name in sample):
        if (known := figure_of(name)) is None:
            continue
        points = [(float(one["at"]), float(one[name])) for one in samples if name in one]
        allowed = known[1].allowed.of(fmean(value for _, value in points))
        # ended tasks are forgotten once a minute, and databases clean up as often
        period = PURGE_EVERY if name.startswith(("store_", "server_", "remembered")) and long else 0.0
        slope = judge(points, allowed, period=period)
        if slope is not None:
            found[name] = slope
    return found


EVENTS = 10_000
"""The cap of the event log, which is trimmed when it is a tenth over."""
_HIDDEN = "hidden tasks"
_TASKS = "tasks"
_BY_KIND = re.compile(r"\{[^}]*\}:(layout|workers|events|event-refs)$|\{[^}]*:[0-9]+\}:([a-z])(?::(.*))?$", re.DOTALL)
_Ask: TypeAlias = Callable[[str], Awaitable[Sequence[Any]]]
"""The rows of a statement."""


async def remains(place: Target) -> dict[str, int]:
    """Count the remains by kind; the store is no longer open in this process. O(everything in the store)."""
    if isinstance(place, RedisServer):
        return await asyncio.to_thread(_redis_remains, place)
    if isinstance(place, PostgresServer):
        schema = place.address.schema
        tables = f"SELECT tablename FROM pg_tables WHERE schemaname = '{schema}'"
        return await _rows(place.rows, tables, f'"{schema}"."{{}}"')
    if isinstance(place, MysqlServer):
        schema = place.address.schema
        tables = f"SELECT table_name FROM information_schema.tables WHERE table_schema = '{schema}'"
        return await _rows(place.rows, tables, f"`{schema}`.`{{}}`", "CONVERT(topic USING utf8mb4)")
    assert isinstance(place, SqliteTarget)
    with closing(sqlite3.connect(place.path)) as database:

        async def ask(statement: str) -> Sequence[Any]:
            return database.execute(statement).fetchall()

        tables = "SELECT name FROM sqlite_master WHERE type = 'table' AND name LIKE 'bide\\_%' ESCAPE '\\'"
        return await _rows(ask, tables, "{}")


async def _rows(ask: _Ask, tables: str, named: str, topic: str = "topic") -> dict[str, int]:
    """Count rows by table; tasks and members of groups of bide's own topics are counted separately."""
    found: dict[str, int] = {}
    for [table] in await ask(tables):
        name, short = named.format(table), str(table).removeprefix("bide_")
        if short not in ("task", "grouped"):
            [[found[short]]] = await ask(f"SELECT count(*) FROM {name}")
            continue
        split = {_TASKS: 0, _HIDDEN: 0}
        for its, number in await ask(f"SELECT {topic}, count(*) FROM {name} GROUP BY topic"):
            split[_HIDDEN if its in RESERVED_TOPICS else _TASKS] += number
        found |= split if short == "task" else {"members of groups": split[_TASKS]}
    return found


def too_much(found: Mapping[str, int], *, minutes: float, processes: int) -> list[str]:
    """List the kinds of which more are left than allowed."""
    hidden = processes * (int(minutes) + 3) + 8
    calls = 12 * processes  # 12 kinds of call; on Redis for each shard
    allowed = {
        _HIDDEN: hidden, "event": EVENTS * 11 // 10, "events": 1, "event-refs": 1, "caller": calls + 1,
        "answers": 16 * calls, "layout": 1, "workers": 1, "worker": processes, "token": 1, "wake": 1_024, "meta": 8,
        "migration": 8,
    }  # fmt: skip
    wrong = []
    for name, number in found.items():
        most = allowed.get(name, 0)
        if number > most:
            wrong.append(f"{number} {name} are left, where {most} may be")
    return wrong


def _redis_remains(server: RedisServer) -> dict[str, int]:
    """Count keys by kind. For hidden tasks the bodies are counted; for other topics no key should be left."""
    found: Counter[str] = Counter({_TASKS: 0, _HIDDEN: 0})
    for client in server.masters():
        for key in client.scan_iter(match=f"{{{server.namespace}[:}}]*", count=1000):
            found.update(_kind_of(key.decode(errors="replace"), key, client))
    return dict(found)


def _kind_of(name: str, key: bytes, client: Any) -> dict[str, int]:
    match = _BY_KIND.match(name)
    if match is None:
        return {f"keys such as {name}": 1}
    common, letter, topic = match.groups()
    if common:
        return {common: 1}
    if letter == "t":
        others = [one for one in client.zrange(key, 0, -1) if one.decode(errors="replace") not in RESERVED_TOPICS]
        return {"names of topics": len(others)}
    if letter == "a":
        return {"answers": 1} if client.pttl(key) >= 0 else {"answers that do not end by themselves": 1}
    if topic is not None and topic in RESERVED_TOPICS:
        return {_HIDDEN: int(client.hlen(key))} if letter == "b" else {}
    if letter == "g":
        members = client.zrange(key, 0, -1)  # those of live tasks begin with NUL
        topics = (member.removeprefix(b"\0").split(b"\0")[1].decode(errors="replace") for member in members)
        return {"members of groups": sum(topic not in RESERVED_TOPICS for topic in topics)}
    if letter in "ni":
        return {}  # a counter, and counts, of each shard
    return {f"keys {letter}:{topic or ''}": 1}
