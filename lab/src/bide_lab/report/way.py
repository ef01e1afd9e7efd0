"""How a results file was measured: in which version, at which scale, on which machine, when."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from bide_lab.figures import Result
from bide_lab.report.measures import figure


def ways(results: Sequence[Result]) -> list[str]:
    """A paragraph for each way in which cells were measured; more than one if the file was filled by several runs."""
    found: dict[tuple[bool, float, str, str], list[Result]] = {}
    for one in results:
        found.setdefault((one.quick, one.minute, one.version, machine_words(one)), []).append(one)
    if not found:
        return ["The results file is empty: `bide lab run` fills it."]
    return [_way(key, some) for key, some in found.items()]


def _way(key: tuple[bool, float, str, str], some: Sequence[Result]) -> str:
    quick, minute, version, machine = key
    measured = [one for one in some if one.figures is not None]
    length = "A quick run" if quick else "A full run"
    return (
        f"{length} of bide {version} on {machine}: {len(measured)} cells measured, {len(some) - len(measured)} not, "
        f"{_span(sum(one.seconds for one in some))} of playing, some at a time, {_days(some)}. {scale_words(minute)}"
    )


def scale_words(minute: float) -> str:
    if minute == 60:
        return "Nothing is scaled: a minute of a strategy's own periods and levels took a minute."
    return (
        f"One minute of a strategy's own periods and levels took {figure(minute)} s; the delays of tasks are not "
        "scaled."
    )


def machine_words(result: Result) -> str:
    machine = result.machine
    cpus = machine.get("cpus", 0)
    parts = [f"{cpus} processor{'' if cpus == 1 else 's'}"] if cpus else []
    parts += [str(machine[name]) for name in ("processor", "system") if machine.get(name)]
    parts += [f"Python {machine['python']}"] if machine.get("python") else []
    return ", ".join(parts) or "a machine that was not noted"


def _span(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _days(some: Sequence[Result]) -> str:
    days = sorted({datetime.fromisoformat(one.at).date().isoformat() for one in some})
    return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
