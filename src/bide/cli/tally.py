"""`bide tally`: how many tasks there are, what is due now, and what comes when."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from bide.app import Bide
from bide.cli.context import Context, shared_options
from bide.cli.exits import Exit
from bide.cli.format import local_words, printable
from bide.cli.output import print_json
from bide.cli.pause import pause_shape, paused_words
from bide.core.errors import BadInput
from bide.core.instants import LAST_INSTANT, Millis, as_datetime, duration, duration_text, instant_text
from bide.core.records import Count, Pause, State, Tally, Topic

_MOST_STEPS = 200


@click.command()
@click.option("--topic", help="Only of this topic.")
@click.option("--ahead", metavar="LENGTH", help='The forecast: how much comes due within this, such as "24h".')
@click.option("--step", metavar="LENGTH", help="In steps of this; a 24th of --ahead if not given.")
@shared_options()
@click.pass_obj
def tally(context: Context, topic: str | None, ahead: str | None, step: str | None) -> Exit:
    """Count tasks by topic and state; how many are due now; with --ahead, how many come due when."""
    edges = _edges(ahead, step)

    async def work(app: Bide) -> Exit:
        now = app.clock.now()
        asked = [0, now, *(now + edge for edge in edges if now + edge <= LAST_INSTANT)]
        found = _only(await app.tally([as_datetime(edge) for edge in asked]), topic)
        paused = {of: pause for of, pause in (await app.paused()).items() if topic in (None, of)}
        if context.json:
            print_json({**_shape(found, asked), "paused": [pause_shape(pause) for pause in paused.values()]})
        else:
            _print(found, asked, context.shown_store, paused)
        return Exit.DONE

    return context.open(work)


def _edges(ahead: str | None, step: str | None) -> list[Millis]:
    """How far from now each step of the forecast ends."""
    if ahead is None:
        if step is not None:
            raise BadInput("--step", step, "together with --ahead only")
        return []
    whole = duration(ahead, field="--ahead")
    part = max(1, -(-whole // 24)) if step is None else duration(step, field="--step")
    if not 0 < part <= whole or whole > part * _MOST_STEPS:
        accepted = f"a length above zero that goes into --ahead at most {_MOST_STEPS} times"
        raise BadInput("--ahead" if step is None else "--step", ahead if step is None else step, accepted)
    return [min(whole, part * place) for place in range(1, -(-whole // part) + 1)]


def _only(found: Tally, topic: str | None) -> Tally:
    if topic is None:
        return found
    return Tally(
        {(of, state): count for (of, state), count in found.counts.items() if of == topic},
        {of: counts for of, counts in found.forecast.items() if of == topic},
    )


def _shape(found: Tally, edges: list[Millis]) -> dict[str, Any]:
    def number(count: Count) -> dict[str, Any]:
        return {"number": count.number, "exact": count.exact}

    return {
        "at": instant_text(edges[1]),
        "counts": [
            {"topic": topic, "state": state.value, **number(count)}
            for (topic, state), count in sorted(found.counts.items())
        ],
        "due": [{"topic": topic, **number(counts[0])} for topic, counts in sorted(found.forecast.items())],
        "forecast": [
            {"topic": topic, "from": instant_text(edges[place]), "until": instant_text(edges[place + 1]), **number(one)}
            for topic, counts in sorted(found.forecast.items())
            for place, one in enumerate(counts)
            if place > 0
        ],
    }


def _print(found: Tally, edges: list[Millis], store: str, paused: Mapping[Topic, Pause]) -> None:
    from rich.text import Text

    from bide.cli.tables import STYLES, console, plain_table

    topics = sorted({topic for topic, _ in found.counts} | set(found.forecast) | paused.keys())
    if not topics:
        click.echo(f"no tasks in {store}")
        return
    states = list(State)
    table = plain_table("topic", "due now", *states, right=("due now", *states))
    for topic in topics:
        due = found.forecast.get(topic, [Count(0)])[0]
        cells = [Text(printable(topic)), Text(_number(due), "bold yellow" if due.number else "dim")]
        for state in states:
            count = found.counts.get((topic, state), Count(0))
            cells.append(Text(_number(count), STYLES[state.value] if count.number else "dim"))
        table.add_row(*cells)
    console().print(table)
    for topic, pause in paused.items():
        click.echo(f"{printable(topic)} is {paused_words(pause)}; to let it go on: bide resume {printable(topic)}")
    if len(edges) > 2:
        _print_forecast(found, edges)


def _print_forecast(found: Tally, edges: list[Millis]) -> None:
    """One bar per step, the longest as wide as the window allows."""
    from rich.text import Text

    from bide.cli.tables import console, plain_table

    printer = console()
    sums = [
        Count(
            sum(counts[place].number for counts in found.forecast.values() if place < len(counts)),
            all(counts[place].exact for counts in found.forecast.values() if place < len(counts)),
        )
        for place in range(1, len(edges) - 1)
    ]
    most = max((count.number for count in sums), default=0)
    widest = max(10, min(60, printer.width - 50))
    table = plain_table("comes due within", "until", "tasks", "", right=("tasks",))
    for place, count in enumerate(sums, 1):
        bar = "█" * max(1, round(count.number / most * widest)) if count.number else ""
        until = edges[place + 1]
        table.add_row(
            Text(duration_text(until - edges[1])), Text(local_words(until), "dim"), Text(_number(count)),
            Text(bar, "cyan"),
        )  # fmt: skip
    printer.print(table)


def _number(count: Count) -> str:
    """ "12", or "10,000+" where counting stopped."""
    return f"{count.number:,}" + ("" if count.exact else "+")
