"""The command `bide bench`: one workload against one store, as a table for people or one JSON object for programs."""

from __future__ import annotations

import asyncio
import os
import platform
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click
import msgspec

from bide._version import __version__
from bide.cli.bench.change import change
from bide.cli.bench.churn import churn
from bide.cli.bench.crew import BenchFault
from bide.cli.bench.deliver import burst, crash, throughput
from bide.cli.bench.idle import idle
from bide.cli.bench.lateness import AHEAD, lateness
from bide.cli.bench.place import place_of
from bide.cli.bench.plan import Plan, Progress, Report, silent
from bide.cli.bench.scale import scale
from bide.cli.bench.schedule import schedule
from bide.cli.bench.timers import timers
from bide.cli.bench.worker import loop_factory
from bide.core.errors import MissingExtra

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

Workload = Callable[[Plan], Awaitable[Report]]

WORKLOADS: Mapping[str, Workload] = {
    "schedule": schedule,
    "lateness": lateness,
    "burst": burst,
    "throughput": throughput,
    "change": change,
    "idle": idle,
    "scale": scale,
    "crash": crash,
    "timers": timers,
    "churn": churn,
}


@click.command(name="bench")
@click.argument("store", metavar="STORE_URL", default="sqlite:")
@click.option(
    "--workload", type=click.Choice([*WORKLOADS, "all"]), default="all", show_default=True,
    help="What to measure; all of them but churn, one after another, take some five minutes.",
)  # fmt: skip
@click.option("--n", type=click.IntRange(1, 100_000_000), help="How many tasks, or the largest size.")
@click.option("--rate", type=click.FloatRange(0.1, 100_000), default=200.0, show_default=True,
              help="lateness, churn: tasks a second.")  # fmt: skip
@click.option("--processes", type=click.IntRange(1, 64), default=1, show_default=True, help="Worker processes.")
@click.option("--ahead", type=click.Choice([*AHEAD, "all"]), default="2s", show_default=True,
              help="lateness: how long before it is due a task is scheduled; fire: far off, then fired.")  # fmt: skip
@click.option(
    "--pending", type=click.IntRange(0, 100_000_000), default=0, help="lateness: tasks due in an hour beside."
)
@click.option("--flood", type=click.IntRange(0, 10_000_000), default=0,
              help="lateness: due tasks beside, of a topic whose only worker is busy.")  # fmt: skip
@click.option(
    "--seconds", type=click.FloatRange(1, 864_000), default=60.0, show_default=True, help="churn: for so long."
)
@click.option("--snapshot", is_flag=True,
              help="churn: somebody holds a snapshot of the database open for the middle third.")  # fmt: skip
@click.option("--limit", is_flag=True, help="Measure the plain driver in the same run, and give ratios to it.")
@click.option("--loop", type=click.Choice(["asyncio", "uvloop"]), default="asyncio", show_default=True,
              help="The event loop of this process and of the workers.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="One JSON object, and no progress.")
def bench(
    store: str,
    workload: str,
    n: int | None,
    rate: float,
    processes: int,
    ahead: str,
    pending: int,
    flood: int,
    seconds: float,
    snapshot: bool,
    limit: bool,
    loop: str,
    as_json: bool,
) -> None:
    """Measure this machine, with bide's shipped defaults.

    STORE_URL is `memory:`, `sqlite:` (a file of its own in the temporary directory), `sqlite:///path`, one of Redis
    (`redis://`, `rediss://`, `unix://`, `redis+cluster://`, `redis+sentinel://`), where a namespace of its own is used
    unless the URL names one, or `postgresql://` or `mysql://`, where a schema of its own is made and dropped unless the
    URL names one (`?schema=`). In what is there already only the topics "bench.*" are touched, and emptied.
    Each run counts for itself what was lost, delivered twice or early, and exits 1 if that is anything but nothing.
    Run one at a time, on a quiet machine, and against a server that has nothing else to do.
    """
    names = [workload]
    if workload == "all":
        names = [name for name in WORKLOADS if name != "churn" and (store != "memory:" or name != "crash")]
    good = True
    for name in names:
        with place_of(store) as place, _progress(name, as_json) as progress:
            plan = Plan(
                place=place, n=n, rate=rate, processes=processes, ahead=ahead, pending=pending, flood=flood,
                seconds=seconds, snapshot=snapshot, limit=limit, loop=loop, progress=progress, tell=_tell,
            )  # fmt: skip
            report = _run(name, plan)
        good = _show(name, plan, report, as_json) and good
    if not good:
        raise SystemExit(1)


def _tell(figures: Mapping[str, Any]) -> None:
    """A line of a run that takes long, at once."""
    click.echo(msgspec.json.encode(figures).decode())
    sys.stdout.flush()


def _run(name: str, plan: Plan) -> Report:
    try:
        factory = loop_factory(plan.loop)
    except ImportError:
        raise MissingExtra("uvloop", "--loop uvloop") from None
    if name == "timers":  # bare data structures, and the loop that they are compared with is asyncio's
        factory, plan = None, replace(plan, loop="asyncio")

    async def run() -> Report:
        return await WORKLOADS[name](plan)

    try:
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(run())
    except BenchFault as fault:
        raise click.ClickException(str(fault)) from None


def surroundings(plan: Plan) -> dict[str, Any]:
    """What every object of figures says about where it was measured."""
    return {
        "store": plan.place.kind,
        "version": __version__,
        "python": platform.python_version(),
        "loop": plan.loop,
        "cpus": os.cpu_count() or 1,
    }


def _show(name: str, plan: Plan, report: Report, as_json: bool) -> bool:
    """Print the figures; whether they may be believed."""
    faults = report.all_faults
    if as_json:
        click.echo(msgspec.json.encode({**report.fields, **surroundings(plan)}).decode())
    else:
        _show_table(name, {**report.fields, **surroundings(plan)})
    for fault in faults:
        click.echo(f"bide: {name}: {fault}", err=True)
    return not faults


def _show_table(name: str, fields: Mapping[str, Any]) -> None:
    from rich.table import Table

    console = _console()
    flat = Table("figure", "", title=f"bide bench: {name}", title_justify="left")
    flat.columns[1].justify = "right"
    for field, value in fields.items():
        if not isinstance(value, dict):
            flat.add_row(field, _text(value))
    for field, value in fields.items():
        if isinstance(value, dict):
            console.print(_matrix(field, _rows(value)))
    console.print(flat)


def _rows(nested: Mapping[str, Any], above: str = "") -> dict[str, Mapping[str, float]]:
    """Nested figures as rows: the innermost level becomes the columns."""
    if not any(isinstance(value, dict) for value in nested.values()):
        return {above.strip(): nested}
    rows: dict[str, Mapping[str, float]] = {}
    for name, value in nested.items():
        rows |= _rows(value, f"{above} {name}")
    return rows


def _matrix(title: str, rows: Mapping[str, Mapping[str, float]]) -> Any:
    from rich.table import Table

    columns = list(next(iter(rows.values())))
    table = Table("", *columns, title=title, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, row in rows.items():
        table.add_row(name, *(_text(row[column]) for column in columns))
    return table


def _text(value: object) -> str:
    return (
        f"{value:,.4g}"
        if isinstance(value, float) and value < 1000
        else f"{value:,.0f}"
        if isinstance(value, int | float)
        else str(value)
    )


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False)


def _progress(name: str, as_json: bool) -> AbstractContextManager[Progress]:
    """A bar on a terminal; nothing for programs and files."""
    if as_json or not sys.stderr.isatty():
        return nullcontext(silent)
    return _bar(name)


@contextmanager
def _bar(name: str) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import Progress as Bar

    # twice a second: a bar must not take part in what is measured
    with Bar(console=Console(stderr=True), transient=True, refresh_per_second=2) as bar:
        task = bar.add_task(name, total=1)

        def told(what: str, done: int, total: int) -> None:
            bar.update(task, description=f"{name}: {what}", completed=done, total=total)

        yield told
