"""The command `bide bench`: one workload against one store, as a table for people or one JSON object for programs."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import click
import msgspec

from bide_bench.deliver import AHEAD, burst, crash, lateness, recurring, throughput
from bide_bench.pending import idle, scale
from bide_bench.plan import Limit, Plan, Progress, Report, limit_of, machine, open_target, silent
from bide_bench.processes import BenchFault
from bide_bench.shapes import payload, topics, workers
from bide_bench.timers import timers
from bide_bench.verbs import change, churn, schedule
from bide_bench.worker import loop_factory

WORKLOADS: Mapping[str, Callable[[Plan, Limit], Coroutine[Any, Any, Report]]] = {
    workload.__name__: workload
    for workload in (
        schedule, lateness, burst, throughput, recurring, change, idle, scale, topics, workers, payload, crash, timers,
        churn,
    )
}  # fmt: skip


@click.command(name="bench")
@click.argument("store", metavar="[STORE_URL]", default="sqlite:")
@click.option(
    "--workload", type=click.Choice([*WORKLOADS, "all"]), default="all", show_default=True,
    help="What to measure; all except churn, one after another, take about ten minutes.",
)  # fmt: skip
@click.option(
    "--n",
    type=click.IntRange(1, 100_000_000),
    help="How many tasks, or the largest size; topics, workers: the number of them; payload: KiB.",
)
@click.option("--rate", type=click.FloatRange(0.1, 100_000), default=200.0, show_default=True,
              help="lateness, churn: tasks a second.")  # fmt: skip
@click.option("--processes", type=click.IntRange(1, 64), default=1, show_default=True, help="Worker processes.")
@click.option("--ahead", type=click.Choice([*AHEAD, "all"]), default="2s", show_default=True,
              help="lateness: how far ahead a task is scheduled; fire: far ahead, then fired.")  # fmt: skip
@click.option(
    "--pending", type=click.IntRange(0, 100_000_000), default=0, help="lateness: pending tasks, due in an hour."
)
@click.option("--flood", type=click.IntRange(0, 10_000_000), default=0,
              help="lateness: due tasks of a topic whose only worker is busy.")  # fmt: skip
@click.option("--seconds", type=click.FloatRange(1, 864_000), default=60.0, show_default=True, help="churn: how long.")
@click.option("--snapshot", is_flag=True,
              help="churn: hold a snapshot of the database open for the middle third.")  # fmt: skip
@click.option("--limit", is_flag=True, help="Measure the plain driver in the same run, and print ratios to it.")
@click.option("--loop", type=click.Choice(["asyncio", "uvloop"]), default="asyncio", show_default=True,
              help="The event loop of this process and of the workers.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="One JSON object, and no progress.")
def bench(store: str, workload: str, as_json: bool, **options: Any) -> None:
    """Measure this machine, with bide's shipped defaults.

    STORE_URL is `memory:`, `sqlite:` (the default: a file of its own in the temporary directory), `sqlite:///path`, one
    of Redis (`redis://`, `rediss://`, `unix://`, `redis+cluster://`, `redis+sentinel://`), with a namespace of its own
    unless the URL names one, or `postgresql://` or `mysql://`, with a schema of its own, dropped at the end, unless the
    URL names one (`?schema=`). In an existing store only the topics "bench.*" are touched, and emptied.
    Each run counts the tasks that were lost, delivered twice or early, and exits with 1 if there are any.
    Run one benchmark at a time, on a quiet machine, against a server that does nothing else.
    """
    names = [workload]
    if workload == "all":
        names = [
            name for name in WORKLOADS if name != "churn" and (store != "memory:" or name not in ("crash", "workers"))
        ]
    good = True
    for name in names:
        with _progress(name, as_json) as progress:
            report = _run(name, store, progress=progress, report_line=_report_line, **options)
        good = _show(name, report, as_json) and good
    if not good:
        raise SystemExit(1)


def _report_line(figures: Mapping[str, Any]) -> None:
    """Print a line of a long run at once."""
    click.echo(msgspec.json.encode(figures).decode())
    sys.stdout.flush()


def _run(name: str, store: str, **options: Any) -> Report:
    async def measured() -> Report:
        async with open_target(store) as target:
            plan = Plan(target=target, **options)
            async with limit_of(plan) as limit:
                report = await WORKLOADS[name](plan, limit)
                ratios = await limit.fields(report.fields)
        about = {"store": target.kind, "loop": plan.loop, **machine()}
        return replace(report, fields={**report.fields, **ratios, **about})

    if name == "timers":  # compares bare data structures with asyncio's loop
        options["loop"] = "asyncio"
    try:
        with asyncio.Runner(loop_factory=loop_factory(options["loop"])) as runner:
            return runner.run(measured())
    except BenchFault as fault:
        raise click.ClickException(str(fault)) from None


def _show(name: str, report: Report, as_json: bool) -> bool:
    """Print the figures and the faults; return True if there are no faults."""
    if as_json:
        click.echo(msgspec.json.encode(report.fields).decode())
    else:
        _show_tables(name, report.fields)
    for fault in report.all_faults:
        click.echo(f"bide: {name}: {fault}", err=True)
    return not report.all_faults


def _show_tables(name: str, fields: Mapping[str, Any]) -> None:
    """Print a table for each nested figure, with its innermost level as columns, and one for all others."""
    from rich.console import Console
    from rich.table import Table

    console, flat = Console(highlight=False), Table("figure", "", title=f"bide bench: {name}", title_justify="left")
    for field, value in fields.items():
        if not isinstance(value, dict):
            flat.add_row(field, _text(value))
            continue
        rows = _rows(value)
        table = Table("", *next(iter(rows.values())), title=field, title_justify="left")
        for of, row in rows.items():
            table.add_row(of, *map(_text, row.values()))
        for column in table.columns[1:]:
            column.justify = "right"
        console.print(table)
    flat.columns[1].justify = "right"
    console.print(flat)


def _rows(nested: Mapping[str, Any], above: str = "") -> dict[str, Mapping[str, Any]]:
    if not any(isinstance(value, dict) for value in nested.values()):
        return {above.strip(): nested}
    return {of: row for name, value in nested.items() for of, row in _rows(value, f"{above} {name}").items()}


def _text(value: object) -> str:
    if not isinstance(value, int | float):
        return str(value)
    return f"{value:,.4g}" if isinstance(value, float) and value < 1000 else f"{value:,.0f}"


@contextmanager
def _progress(name: str, as_json: bool) -> Iterator[Progress]:
    """A progress bar on a terminal; nothing for programs and files."""
    if as_json or not sys.stderr.isatty():
        yield silent
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    # twice a second: a bar must not disturb the measurement
    with Bar(console=Console(stderr=True), transient=True, refresh_per_second=2) as bar:
        task = bar.add_task(name, total=1)
        yield lambda what, done, total: bar.update(task, description=f"{name}: {what}", completed=done, total=total)
