"""The tables of docs/reliability.md, drawn from what the trials wrote: torture.jsonl and soak.jsonl.

Each line is one run, a JSON object, written by whoever ran it; the newest line of each store counts. A field
that a line does not have is shown as unknown, and a store without a line as one that was not tried yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from bide.core.errors import BadInput

Run: TypeAlias = Mapping[str, Any]

_STORES: Mapping[str, tuple[str, ...]] = {
    "SQLite": ("sqlite",),
    "Redis": ("redis",),
    "Redis Cluster": ("cluster", "redis+cluster", "redis-cluster", "redis_cluster"),
    "Redis Sentinel": ("sentinel", "redis+sentinel", "redis-sentinel", "redis_sentinel"),
    "PostgreSQL": ("postgres", "postgresql"),
    "MariaDB": ("mysql", "mariadb"),
    "HTTP": ("http", "service", "serve"),
}
"""By what they are called on the page: what a line may call them."""
_SOAKED = ("SQLite", "Redis", "PostgreSQL", "MariaDB", "HTTP")
_WRONG = (
    ("lost", "P2"), ("duplicated", "delivered_again"), ("early", "P1"),
    ("after_cancel", "delivered after cancelled", "P4"), ("stale_accepted", "stale token accepted", "P3"),
)  # fmt: skip
"""Counted of a run under faults, by the names that a line may have for it, at its top or in `wrong`; by now the number
of the promise that the checker found broken."""
_UNKNOWN = "?"
_NOT_YET = "not run yet"
_KIB, _MIB = 1024, 1024 * 1024

_FIGURES: Mapping[str, tuple[str, str]] = {
    "resident": ("resident memory", "bytes"), "private": ("memory of its own", "bytes"),
    "used_bytes": ("memory used", "bytes"), "blocks": ("objects of Python's allocator", ""),
    "descriptors": ("open files", ""), "threads": ("threads", ""), "processes": ("processes", ""),
    "file_bytes": ("file", "bytes"), "wal_bytes": ("write-ahead log", "bytes"), "table_bytes": ("table", "bytes"),
    "index_bytes": ("indexes", "bytes"), "bytes": ("files", "bytes"), "live_rows": ("rows", ""),
    "dead_rows": ("dead rows", ""), "history": ("transactions not purged", ""), "live": ("tasks alive", ""),
    "remembered": ("ended tasks remembered", ""), "late_p50_ms": ("lateness p50", "ms"),
    "late_p99_ms": ("lateness p99", "ms"),
}  # fmt: skip
"""What a soak looks at, by the end of its name: in words, and its unit."""


class Results:
    """What is in the results files of one folder. Raises BadInput for a line that is not a JSON object."""

    def __init__(self, folder: Path) -> None:
        self._torture = _newest(folder / "torture.jsonl")
        self._soak = _newest(folder / "soak.jsonl")

    # --- real faults

    def torture(self) -> str:
        """Two tables: what each store went through and what was wrong; and each kind of fault, and the way back."""
        rows, faults = [], []
        for name, run in _in_order(self._torture, _STORES):
            if run is None:
                rows.append([name, _NOT_YET, *[""] * 11])
                continue
            late = _inner(run, "lateness_ms")
            rows.append(
                [
                    name, _text(_version(run)), _minutes(run), _processes(run),
                    _load(run), _number(_deliveries(run)), *(_number(_counted(run, *names)) for names in _WRONG),
                    _number(_broken(run)), _number(late.get("most")),
                ]
            )  # fmt: skip
            recovery = _recovery(run)
            kinds = _inner(run, "faults")
            for kind in dict.fromkeys([*kinds, *recovery]):
                way_back = recovery.get(kind, {})
                times = (_number(way_back.get(part)) if way_back else "" for part in ("p50", "most"))
                faults.append([name, kind, _number(kinds.get(kind)), *times])
        heads = ["store", "version", "minutes", "processes", "load", "deliveries", "lost", "delivered again", "early",
                 "delivered after cancelled", "stale tokens accepted", "all that was wrong",
                 "worst lateness, ms"]  # fmt: skip
        parts = [_table(heads, rows, right=set(range(2, 13)) - {3, 4})]
        if faults:
            heads = ["store", "fault", "injected", "recovery p50, ms", "worst recovery, ms"]
            parts.append(_table(heads, faults, right={2, 3, 4}))
        return "\n\n".join(parts) + "\n"

    def cannot(self) -> str:
        """What could not be done where it was run, and why."""
        stores: dict[tuple[str, str], list[str]] = {}
        for name, run in _in_order(self._torture, _STORES):
            for what, why in _inner(run or {}, "cannot").items():
                stores.setdefault((what, _text(why)), []).append(name)
        if not stores:
            return "Nothing was noted so far.\n"
        return "".join(f"- {what} ({', '.join(names)}): {why}\n" for (what, why), names in stores.items())

    # --- long use

    def soak(self) -> str:
        """A table of all stores, and for each one of its figures and their slopes."""
        rows, parts = [], []
        for name, run in _in_order(self._soak, dict.fromkeys(_SOAKED, ())):
            if run is None:
                rows.append([name, _NOT_YET, *[""] * 11])
                continue
            late = _inner(run, "lateness_ms")
            rows.append(
                [
                    name, _minutes(run), _number(run.get("maximum_per_s")), _number(run.get("rate")),
                    _number(sum(_inner(_inner(run, "load"), "schedule").values())), _number(_deliveries(run)),
                    *(_number(run.get(one)) for one in ("lost", "duplicated", "early")),
                    _number(_inner(run, "wrong").get("left")),
                    *(_number(late.get(one)) for one in ("p50", "p99", "most")),
                ]
            )  # fmt: skip
            if _inner(run, "slopes"):
                parts.append(f"### {name}\n\n{_judgement(run)}\n\n{_slopes(run)}")
        heads = ["store", "minutes", "maximum/s", "tasks/s", "scheduled", "deliveries", "lost", "duplicated", "early",
                 "left behind", "late p50, ms", "late p99, ms", "worst, ms"]  # fmt: skip
        return "\n\n".join([_table(heads, rows, right=set(range(1, 13))), *parts]) + "\n"


def _newest(path: Path) -> dict[str, Run]:
    """The last line of each store, in the order in which they first came. One cut off is passed over."""
    found: dict[str, Run] = {}
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    for number, line in enumerate(lines, start=1):
        if not line.endswith(b"\n") or not line.strip():
            continue
        try:
            run = msgspec.json.decode(line, type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise BadInput(
                f"{path.name}, line {number}", line.decode(errors="replace"), f"a JSON object: {error}"
            ) from None
        name = str(run.get("store", _UNKNOWN))
        name = next((shown for shown, names in _STORES.items() if name.lower() in names), name)
        found[name] = run
    return found


def _in_order(runs: Mapping[str, Run], names: Iterable[str]) -> list[tuple[str, Run | None]]:
    """Those that are expected first, whether they are there or not; then any others."""
    return [(name, runs.get(name)) for name in dict.fromkeys([*names, *runs])]


def _judgement(run: Run) -> str:
    """What the slopes say together."""
    if run.get("judged") is False:
        return "The run was too short for its slopes to count."
    grow = [
        _figure(name)[0]
        for name, one in _inner(run, "slopes").items()
        if _inner({"": one}, "").get("verdict") == "grows"
    ]
    return f"Growing: {', '.join(grow)}." if grow else "Nothing grows."


def _slopes(run: Run) -> str:
    rows = []
    for name, one in _inner(run, "slopes").items():
        slope = one if isinstance(one, Mapping) else {}
        words, unit = _figure(name)
        shown = {part: _in_unit(slope.get(part), unit) for part in ("mean", "per_minute", "low", "high", "allowed")}
        rows.append(
            [words, shown["mean"], shown["per_minute"], f"{shown['low']} to {shown['high']}",
             _number(slope.get("percent_per_hour")), shown["allowed"], _text(slope.get("verdict"))]
        )  # fmt: skip
    heads = [
        "figure",
        "mean",
        "slope per minute",
        "99 % certain",
        "% of the mean per hour",
        "allowed over the run",
        "verdict",
    ]
    return _table(heads, rows, right={1, 2, 3, 4, 5})


def _figure(name: str) -> tuple[str, str]:
    """In words, and the unit.

    >>> _figure("worker-1_resident"), _figure("late_p99_ms")
    (('worker 1: resident memory', 'bytes'), ('lateness p99', 'ms'))
    """
    end = max((one for one in _FIGURES if name == one or name.endswith(f"_{one}")), key=len, default=None)
    if end is None:
        return name, ""
    words, unit = _FIGURES[end]
    whose = name.removesuffix(end).rstrip("_").replace("-", " ")
    return (f"{whose}: {words}" if whose else words), unit


def _in_unit(value: object, unit: str) -> str:
    """
    >>> _in_unit(2097152, "bytes"), _in_unit(-512, "bytes"), _in_unit(1.25, "ms"), _in_unit(None, "ms")
    ('2 MiB', '-0.5 KiB', '1.25 ms', '?')
    """
    if not isinstance(value, int | float):
        return _UNKNOWN
    if unit != "bytes":
        return f"{_number(value)} {unit}".rstrip()
    size, named = (_MIB, "MiB") if abs(value) >= _MIB else (_KIB, "KiB")
    return f"{_number(value / size)} {named}" if value else "0"


def _number(value: object) -> str:
    """Four digits at the most behind a point, none behind larger numbers.

    >>> _number(1234567), _number(0.12345), _number(12.0), _number(True), _number("?")
    ('1,234,567', '0.123', '12', '?', '?')
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return _UNKNOWN
    return f"{value:,.0f}" if value == round(value) or abs(value) >= 100 else f"{value:.3g}"


def _text(value: object) -> str:
    return _UNKNOWN if value is None else str(value)


def _version(run: Mapping[str, Any]) -> Any:
    """Of the store: said by itself, or among what the run tells about it."""
    about = run.get("about")
    return run.get("version", about.get("version") if isinstance(about, Mapping) else about)


def _minutes(run: Run) -> str:
    seconds = run.get("seconds")
    return _number(round(seconds / 60, 1)) if isinstance(seconds, int | float) else _UNKNOWN


def _load(run: Run) -> str:
    """What was asked for, in words: nested figures are summed up."""
    words = [
        f"{_text(value) if isinstance(value, str) else _number(_sum(value))} {name.replace('_', ' ')}"
        for name, value in _inner(run, "load").items()
        if name != "deliveries"
    ]
    return ", ".join(words) or _UNKNOWN


def _processes(run: Run) -> str:
    """How many, or of each kind how many."""
    kinds = _inner(run, "processes")
    return ", ".join(f"{_number(number)} {kind}" for kind, number in kinds.items()) or _number(run.get("processes"))


def _deliveries(run: Run) -> object:
    return run.get("deliveries", _inner(run, "load").get("deliveries"))


def _counted(run: Run, *names: str) -> object:
    """The first that is there; None: it is not known."""
    places = (run, _inner(run, "wrong"), _inner(run, "violations"))
    return next((place[name] for place in places for name in names if name in place), None)


def _broken(run: Run) -> object:
    found = [_inner(run, one) for one in ("violations", "wrong") if one in run]
    return sum(_sum(one) for one in found) if found else None


def _recovery(run: Run) -> dict[str, Mapping[str, Any]]:
    """By kind of fault, in milliseconds; it may have been told in seconds."""
    found = {kind: times for kind, times in _inner(run, "recovery_ms").items() if isinstance(times, Mapping)}
    for kind, times in _inner(run, "recovery_seconds").items():
        if isinstance(times, Mapping):
            found[kind] = {part: value * 1000 for part, value in times.items() if isinstance(value, int | float)}
    return found


def _sum(value: object) -> float:
    """Of all numbers within, however deep."""
    if isinstance(value, Mapping):
        return sum(_sum(one) for one in value.values())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return sum(_sum(one) for one in value)
    return value if isinstance(value, int | float) else 0


def _inner(run: Run, name: str) -> Mapping[str, Any]:
    """An object within; empty where there is none."""
    value = run.get(name)
    return value if isinstance(value, Mapping) else {}


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, right: set[int]) -> str:
    """A Markdown table, some of its columns set to the right."""
    rules = ["---:" if number in right else "---" for number in range(len(heads))]
    lines = [f"| {' | '.join(heads)} |", f"|{'|'.join(rules)}|"]
    for row in rows:
        cells = [one.replace("|", "\\|").replace("\n", " ") for one in row]
        lines.append(f"| {' | '.join([f'**{cells[0]}**', *cells[1:]])} |")
    return "\n".join(lines)
