"""The command `bide lab`: the classic strategies, explained and measured on this machine."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path

import click

from bide.core.errors import BadInput
from bide.lab.card import PARTS, card_of
from bide.lab.catalogue import catalogue, chosen
from bide.lab.figures import Result
from bide.lab.running import Cell, ResultsFile, Run, cells_of, play_all
from bide.lab.workloads import WORKLOADS

KINDS: Mapping[str, str] = {
    "redis": "redis://127.0.0.1:6379/0",
    "postgres": "postgresql://user@127.0.0.1:5432/database",
    "mysql": "mysql://user@127.0.0.1:3306/database",
    "rabbitmq": "amqp://guest:guest@127.0.0.1:5672/",
    "rocketmq": "rocketmq://127.0.0.1:8081",
}
"""The kinds of server that strategies need, each with a URL as it is given."""
RESULTS = "lab-results.jsonl"

results_option = click.option(
    "--results", type=click.Path(dir_okay=False, path_type=Path), default=RESULTS, show_default=True,
    help="The results file, JSON lines.",
)  # fmt: skip


@click.group(name="lab")
def lab() -> None:
    """See the classic ways of doing something later at work, measured on this machine beside bide.

    Servers are given by URL, each with an option or in the environment; strategies whose servers are missing are
    listed as not measured. What a strategy makes on a server has names of its own, and is taken away afterwards.
    """


@lab.command(name="list")
def list_() -> None:
    """The strategies and the workloads."""
    for name, strategy in catalogue().items():
        needs = ", ".join(strategy.needs) or "nothing: one process"
        click.echo(f"{name:<14}{strategy.title:<58}needs {needs}")
    click.echo()
    for name, workload in WORKLOADS.items():
        click.echo(f"{name:<14}{workload.about}")


@lab.command()
@click.argument("strategies", nargs=-1, required=True, metavar="STRATEGY...")
def explain(strategies: tuple[str, ...]) -> None:
    """How a strategy works, what it costs, what it is known for: `bide lab explain S9`."""
    told: set[str] = set()
    for strategy in chosen(strategies):
        if strategy.__module__ in told:
            continue
        told.add(strategy.__module__)
        card = card_of(strategy)
        variants = [one for one in chosen(strategies) if one.__module__ == strategy.__module__]
        click.secho(card.title, bold=True)
        for one in variants:
            click.echo(f"  {one.name}  {one.title}")
        click.echo(f"\n{card.drawing}\n")
        for part in PARTS:
            click.secho(part, bold=True)
            click.echo(click.wrap_text(card.parts[part], 100, "  ", "  "))


def server_options(command: click.decorators.FC) -> click.decorators.FC:
    """One option for each kind of server."""
    for kind, example in reversed(list(KINDS.items())):
        variable = f"TEST_{kind.upper()}_URL"
        command = click.option(
            f"--{kind}", metavar="URL", envvar=[f"LAB_{kind.upper()}_URL", variable], help=f"Such as {example}"
        )(command)
    return command


@lab.command()
@click.option(
    "--strategies", "words", multiple=True, metavar="NAME", help="S4, S4-A or a path of a file; all without it."
)
@click.option("--workloads", "only", multiple=True, metavar="NAME", help="All that make sense without it.")
@click.option("--quick", is_flag=True, help="Only what each strategy is known for, with few tasks.")
@click.option("--minute", type=click.FloatRange(0.1, 60), default=1.0, show_default=True,
              help="Seconds that one minute of a strategy's own periods takes.")  # fmt: skip
@click.option("--again", is_flag=True, help="Also what the results file has already.")
@results_option
@server_options
def run(
    words: tuple[str, ...], only: tuple[str, ...], quick: bool, minute: float, again: bool, results: Path,
    **urls: str | None,
) -> None:  # fmt: skip
    """Measure strategies. What the results file has already is passed over, so that a run can be taken up again."""
    for name in only:
        if name not in WORKLOADS:
            raise BadInput("workloads", name, f"one of {', '.join(WORKLOADS)}")
    cells = cells_of(chosen(words), only, quick=quick)
    whole = Run(urls={kind: url for kind, url in urls.items() if url}, quick=quick, minute=minute)
    file = ResultsFile(results)
    if again:
        file.path.unlink(missing_ok=True)

    def told(number: int, cell: Cell, result: Result | None) -> None:
        name = f"[{number + 1}/{len(cells)}] {cell.strategy.name} {cell.workload.name}"
        if result is None:
            if sys.stderr.isatty():
                click.echo(f"{name} ...\r", err=True, nl=False)
        else:
            click.echo(f"{name}: {_in_short(result)}")

    played = list(asyncio.run(play_all(cells, whole, file, told=told)))
    failed = [one for one in played if one.why_not.startswith("failed")]
    click.echo(f"{sum(one.figures is not None for one in played)} cells measured, {len(failed)} failed: {results}")
    if failed:
        raise SystemExit(1)


def _in_short(result: Result) -> str:
    seen = result.figures
    if seen is None:
        return result.why_not
    late = (
        f"late p50 {seen.p50:,.1f} ms, p99 {seen.p99:,.1f} ms; "
        if seen.p50 is not None and seen.p99 is not None
        else ""
    )
    return f"{late}{seen.fired} of {seen.expected} fired, {seen.lost} lost, {seen.duplicated} twice, {seen.early} early"
