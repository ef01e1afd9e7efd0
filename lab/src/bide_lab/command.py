"""The command `bide lab`: the classic strategies, explained and measured on this machine."""

from __future__ import annotations

import asyncio
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from bide.cli.context import Context, WholeNumber, shared_options
from bide.cli.output import print_json
from bide.cli.tables import console, plain_table
from bide.core.errors import BadInput
from bide.core.instants import duration
from bide_lab.choose import Choice, Twice, Wishes, choose
from bide_lab.figures import MEASURES, Result, grouped
from bide_lab.findings import NOT_WAITED_FOR, findings
from bide_lab.report.page import write_report
from bide_lab.running import FAILED, Cell, ResultsFile, Run, cells_of, measure_all
from bide_lab.strategies import PARTS, Card, card_of, catalogue, chosen
from bide_lab.strategy import Strategy
from bide_lab.workloads import WORKLOADS

KINDS: Mapping[str, str] = {
    "redis": "redis://127.0.0.1:6379/0",
    "postgres": "postgresql://user@127.0.0.1:5432/database",
    "mysql": "mysql://user@127.0.0.1:3306/database",
    "mysql_replica": "mysql://user@127.0.0.1:3306/database?replica=127.0.0.1:3307",
    "rabbitmq": "amqp://guest:guest@127.0.0.1:5672/",
    "rocketmq": "rocketmq://127.0.0.1:8081",
}
"""The kinds of server that strategies need, each with a URL as it is given."""
RESULTS = "lab-results.jsonl"
_SHIPPED = Path(__file__).with_name("results.jsonl")
"""The results that docs/strategies.md shows: of another machine, for where there are none of this one."""

_quiet = shared_options(store=False)
results_option = click.option(
    "--results", type=click.Path(dir_okay=False, path_type=Path), default=RESULTS, show_default=True,
    help="The results file, JSON lines.",
)  # fmt: skip
own_option = click.option(
    "--strategies", "words", multiple=True, metavar="FILE", help="Files of your own strategies in the results."
)  # fmt: skip


@click.group(name="lab")
def lab() -> None:
    """Run the classic designs for delayed tasks, measured on this machine beside bide.

    Servers are given by URL, each with an option or in the environment; strategies whose servers are missing are
    listed as not measured. What a strategy creates on a server has separate names, and is deleted afterwards.
    """


@lab.command(name="list")
@_quiet
@click.pass_obj
def list_(surroundings: Context) -> None:
    """The strategies and the workloads."""
    if surroundings.json:
        for strategy in catalogue().values():
            print_json(_strategy_shape(strategy))
        for name, workload in WORKLOADS.items():
            print_json({"workload": name, "about": workload.about})
        return
    table = plain_table("strategy", "what it is", "needs")
    for name, strategy in catalogue().items():
        table.add_row(name, strategy.title, ", ".join(strategy.needs) or "nothing")
    console().print(table)
    table = plain_table("workload", "what is asked, or done to it")
    for name, workload in WORKLOADS.items():
        table.add_row(name, workload.about)
    console().print(table)


@lab.command()
@click.argument("strategies", nargs=-1, required=True, metavar="STRATEGY...")
@_quiet
@click.pass_obj
def explain(surroundings: Context, strategies: tuple[str, ...]) -> None:
    """Explain a strategy: how it works, its cost, its known flaws: `bide lab explain S9`."""
    by_module = grouped((strategy.__module__, strategy) for strategy in chosen(strategies))
    for number, variants in enumerate(by_module.values()):
        card = card_of(variants[0])
        if surroundings.json:
            for one in variants:
                print_json(_strategy_shape(one) | {"parts": card.parts, "drawing": card.drawing})
        else:
            click.echo("\n" * bool(number), nl=False)
            _print_card(card, variants)


def _strategy_shape(strategy: type[Strategy]) -> dict[str, Any]:
    return {
        "strategy": strategy.name, "title": strategy.title, "needs": list(strategy.needs),
        "roles": list(strategy.roles), "in_process": strategy.in_process, "cannot": dict(strategy.cannot),
        "precision": strategy.precision,
        "flaws": [{"text": flaw.text, "workload": flaw.workload} for flaw in strategy.flaws],
    }  # fmt: skip


def _print_card(card: Card, variants: Sequence[type[Strategy]]) -> None:
    width = min(shutil.get_terminal_size().columns, 100) - 2
    click.secho(f"{card.title}\n", bold=True)
    for one in variants:
        click.echo(f"  {one.name}  {one.title}")
    # a drawing is never folded: better no margin than a broken line
    margin = "  " if max(map(len, card.drawing.splitlines()), default=0) <= width else ""
    click.echo(f"\n{textwrap.indent(card.drawing, margin)}")
    for part in PARTS:
        click.secho(f"\n{part}", bold=True)
        click.echo(click.wrap_text(card.parts[part], width, "  ", "  "))
    for one in variants:
        for verb, reason in one.cannot.items():
            click.echo(click.wrap_text(f"{one.name} has no {verb}: {reason}", width, "\n  ", "    "))


def server_options(command: click.decorators.FC) -> click.decorators.FC:
    """One option for each kind of server."""
    for kind, example in reversed(list(KINDS.items())):
        variables = [f"LAB_{kind.upper()}_URL", f"TEST_{kind.upper()}_URL"]
        option = click.option(f"--{kind.replace('_', '-')}", metavar="URL", envvar=variables, help=f"Such as {example}")
        command = option(command)
    return command


@lab.command()
@click.option("--strategies", "words", multiple=True, metavar="NAME",
              help="S4, S4-A or the path of a file; by default all.")  # fmt: skip
@click.option("--workloads", "only", multiple=True, metavar="NAME",
              help="By default those that a strategy names, and those for all.")  # fmt: skip
@click.option("--quick", is_flag=True, help="Only the workloads for which each strategy is known, with few tasks.")
@click.option("--minute", type=click.FloatRange(0.1, 60), default=1.0, show_default=True,
              help="Seconds for one minute of a strategy's own periods.")  # fmt: skip
@click.option("--again", is_flag=True, help="Also run those already in the results file.")
@results_option
@server_options
@_quiet
@click.pass_obj
def run(
    surroundings: Context, /, words: tuple[str, ...], only: tuple[str, ...], quick: bool, minute: float,
    again: bool, results: Path, **urls: str | None,
) -> None:  # fmt: skip
    """Measure strategies. Results already in the file are skipped, so that an interrupted run continues."""
    for name in only:
        if name not in WORKLOADS:
            raise BadInput("workloads", name, f"one of {', '.join(WORKLOADS)}")
    cells = cells_of(chosen(words), only, quick=quick)
    whole = Run({kind: url for kind, url in urls.items() if url}, quick, minute)
    file = ResultsFile(results)

    def progress(number: int, cell: Cell, result: Result | None) -> None:
        name = f"[{number + 1}/{len(cells)}] {cell.strategy.name} {cell.workload.name}"
        if surroundings.json:
            if result is not None:
                print_json(result)
        elif result is not None:
            click.echo(f"{name}: {_in_short(result)}")
        elif sys.stderr.isatty():
            click.echo(f"{name} ...\r", err=True, nl=False)

    played = asyncio.run(measure_all(cells, whole, file, progress=progress, again=again))
    failed = [one for one in played if one.why_not.startswith(FAILED)]
    if not surroundings.json:
        measured = sum(one.figures is not None for one in played)
        click.echo(f"{measured} cells measured, {len(failed)} failed: {results}")
    if failed:
        raise SystemExit(1)


def _in_short(result: Result) -> str:
    seen = result.figures
    if seen is None:
        return result.why_not
    if result.workload in NOT_WAITED_FOR:
        taken = [(one, value) for one in MEASURES.values()
                 if one.workload == result.workload and (value := one.of(seen)) is not None]  # fmt: skip
        return ", ".join(f"{one.head} {one.words(value)}" for one, value in taken) or "measured"
    fired = f"{seen.fired} of {seen.expected} fired, {seen.lost} lost, {seen.duplicated} twice, {seen.early} early"
    return f"late p50 {seen.p50:,.1f} ms, p99 {seen.p99:,.1f} ms; {fired}" if seen.late else fired


@lab.command()
@results_option
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default="lab-report", show_default=True,
              help="The folder of the report.")  # fmt: skip
@own_option
@_quiet
@click.pass_obj
def report(surroundings: Context, results: Path, out: Path, words: tuple[str, ...]) -> None:
    """Make a report of a results file: one self-contained HTML page, the tables in Markdown, the pictures as SVG."""
    if not results.is_file():
        raise BadInput("results", str(results), "a file that `bide lab run` has written")
    found = findings(ResultsFile(results).read(), chosen(words) if words else ())
    written = write_report(found, out)
    measured = sum(bool(row.measured) for row in found.rows)
    if surroundings.json:
        paths = {"tables": str(written.tables), "pictures": [str(one) for one in written.pictures]}
        print_json({"page": str(written.page), **paths, "strategies": len(found.rows), "measured": measured})
        return
    click.echo(f"{measured} of {len(found.rows)} strategies measured")
    click.echo(f"{written.page}\n{written.tables}")


class Asked(click.Option):
    """An option that is asked for in a terminal where it is not given; elsewhere its default counts."""

    def prompt_for_value(self, ctx: click.Context) -> Any:
        surroundings = ctx.find_object(Context)
        asks = sys.stdin.isatty() and surroundings is not None and not surroundings.json
        return super().prompt_for_value(ctx) if asks else self.get_default(ctx)


def asked(name: str, question: str, default: Any, **more: Any) -> Callable[[click.decorators.FC], click.decorators.FC]:
    """An option whose help is its question."""
    more = {"help": f"{question}?", "show_default": True, **more}
    return click.option(name, cls=Asked, prompt=question, default=default, **more)


@lab.command(name="choose")
@asked("--tasks", "How many tasks wait at the same time", 100_000, type=WholeNumber(1, 10**12), metavar="N")
@asked("--late", "By how much may 99 of 100 be late (50ms, 1s, 1h)", "1s", metavar="LENGTH")
@asked("--servers", f"Which servers do you have ({', '.join(KINDS)}, or none)", "none", metavar="KINDS")
@asked("--several/--one-machine", "Do processes on several machines take part",
       lambda: bool(_kinds(click.get_current_context().params["servers"])),
       show_default="yes, if there are servers")  # fmt: skip
@asked("--cancel/--no-cancel", "May a task be cancelled until its time", True)
@asked("--move/--no-move", "May it be moved to another time", True)
@asked("--survive/--no-survive", "Must it survive a process that dies", True)
@asked("--twice", "May it be done twice (crash: only after a crash)", "crash",
       type=click.Choice([one.value for one in Twice]))  # fmt: skip
@results_option
@own_option
@_quiet
@click.pass_obj
def choose_(
    surroundings: Context, /, results: Path, words: tuple[str, ...], late: str, servers: str, twice: str, **given: Any
) -> None:
    """Recommend a strategy, and say why: a few questions, compared with the figures of this machine, or else with ours.

    Without an option, a terminal is asked; elsewhere the default counts.
    """
    seconds = duration(late, field="late") / 1000
    wishes = Wishes(late=seconds, servers=_kinds(servers), twice=Twice(twice), **given)
    here = results.exists()
    choice = choose(wishes, findings(ResultsFile(results if here else _SHIPPED).read(), chosen(words) if words else ()))
    if not surroundings.json:
        _print_choice(choice, results, here=here)
        return
    print_json({
        "measured": choice.measured,
        "measured_here": choice.measured and here,
        "fitting": [
            {"strategy": one.row.name, "why": list(one.merits), "mind": list(one.minds)} for one in choice.fitting
        ],
        "excluded": [
            {"strategy": one.row.name,
             "why": [{"reason": why.words, "measured": why.measured} for why in one.against]}
            for one in choice.excluded
        ],
    })  # fmt: skip


def _kinds(given: str) -> frozenset[str]:
    """The kinds of server in a list with commas. Raises BadInput."""
    servers = frozenset(word.strip() for word in given.split(",")) - {"", "none"}
    for one in sorted(servers - set(KINDS)):
        raise BadInput("servers", one, f"some of {', '.join(KINDS)}, with commas between them, or none")
    return servers


def _print_choice(choice: Choice, results: Path, *, here: bool) -> None:
    width = min(shutil.get_terminal_size().columns, 100)

    def tell(text: str, mark: str = "") -> None:
        click.echo(click.wrap_text(text, width, f"  {mark}", " " * (2 + len(mark))))

    if not choice.measured:
        tell(f"Nothing was measured: there are no figures in {results}. What follows is what the strategies say of "
             "themselves; `bide lab run --quick` measures them.\n")  # fmt: skip
    elif not here:
        tell(f"There are no figures of this machine in {results}: these are those of docs/strategies.md. "
             "`bide lab run --quick` measures here.\n")  # fmt: skip
    for number, one in enumerate(choice.fitting[:4]):
        click.secho(f"{'Pick' if number == 0 else 'Or'} {one.row.name}: {one.row.strategy.title}", bold=True)
        for text in one.merits:
            tell(text, "+ ")
        for text in one.minds:
            tell(f"mind: {text}", "- ")
    if len(choice.fitting) > 4:
        tell(f"Also: {', '.join(one.row.name for one in choice.fitting[4:])}")
    if not choice.fitting:
        click.secho("None fits. The nearest:", bold=True)
        for one in choice.excluded[:3]:
            tell(f"{one.row.name}: {'; '.join(why.words for why in one.against)}", "- ")
    elif choice.fitting[0].row.card is not None:
        tell(f"What to know of it: {choice.fitting[0].row.card.parts['Flaw']}")
    click.secho("\nNot these", bold=True)
    for why, names in grouped((one.against[0].words, one.row.name) for one in choice.excluded).items():
        tell(f"{', '.join(names)}: {why}", "- ")
