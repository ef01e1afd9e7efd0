"""`bide ls`, `show`, `events` and `tally`: they change nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from difflib import get_close_matches
from itertools import pairwise
from typing import Any

import click
from msgspec.structs import replace

from bide.app import Bide
from bide.cli.context import Context, WholeNumber, takes_context
from bide.cli.exits import Exit
from bide.cli.output import (
    WORDS,
    count_words,
    current_millis,
    local_words,
    pause_shape,
    paused_words,
    print_json,
    printable,
)
from bide.core.errors import BadInput
from bide.core.instants import LAST_INSTANT, Millis, as_datetime, due_of, duration, duration_text, instant_text
from bide.core.records import Count, Pause, Record, Result, State, Tally, Topic, summed
from bide.insight.recurring import coming_of, recurring_tasks
from bide.insight.task_history import Attempt, TaskHistory, task_history
from bide.service.schemas import detail_shape, event_shape, task_shape

_LIVE, _ALL = "live", "all"
_MOST = 1_000_000_000
_MOST_STEPS = 200
_PAGE = 500
"""Tasks of one table: a large list begins at once, and is not held in memory."""


@click.command()
@click.option("--topic", help="Only of this topic.")
@click.option(
    "--state",
    type=click.Choice([_LIVE, _ALL, *(state.value for state in State)]),
    default=_LIVE,
    show_default=True,
    help="Only in this state; live is waiting or leased.",
)
@click.option("--group", help="Only of this group.")
@click.option("--before", metavar="WHEN", help="Only tasks that wake before this instant, or this duration from now.")
@click.option("--limit", type=WholeNumber(1, _MOST), default=50, show_default=True, help="The most to print.")
@click.option("--all", "everything", is_flag=True, help="Print all of them.")
@takes_context()
def ls(
    context: Context, topic: str | None, state: str, group: str | None, before: str | None, limit: int,
    everything: bool,
) -> Exit:  # fmt: skip
    """List tasks by topic, then by the time at which they wake or ended; those of a group by topic and key."""
    wake_before = None if before is None else as_datetime(_instant_or_length(before))
    if wake_before is not None and state not in (_LIVE, State.WAITING, State.LEASED):
        raise BadInput("--before", before, f"--state {_LIVE}, waiting or leased with it: finished tasks do not wake")
    most = _MOST if everything else limit

    if not context.json:
        from bide.cli.tables import print_tasks  # rich, which --json does not need

    async def work(app: Bide) -> Exit:
        found: list[Record] = []
        widths: Sequence[int] = ()
        more = False
        tasks = app.find(
            topic=topic,
            state=None if state in (_LIVE, _ALL) else state,
            group=group,
            wake_from=as_datetime(0) if state == _LIVE else None,
            wake_before=wake_before,
            page=min(most + 1, _PAGE),
        )
        number = 0
        async for task in tasks:
            if more := number == most:
                break
            number += 1
            if context.json:
                print_json(task_shape(task.record))
                continue
            if len(found) == _PAGE:
                widths = print_tasks(found, widths, whole=False)
                found.clear()
            found.append(task.record)
        if not context.json:
            if found:
                print_tasks(found, widths, whole=not widths)
            await _print_hints(app, context, topic, state, group, nothing=not number)
        if more:
            click.echo(f"the first {most:,} are shown; --limit or --all shows more", err=True)
        return Exit.DONE

    return context.open(work)


async def _print_hints(
    app: Bide, context: Context, topic: str | None, state: str, group: str | None, *, nothing: bool
) -> None:
    """Say that there is no task, with similar names of topics; or say how many tasks are dead."""
    asks_dead = state == _LIVE and group is None
    found = await app.tally() if asks_dead or (nothing and topic is not None) else Tally({}, {})
    if nothing:
        of = "" if topic is None else f" of topic {printable(topic)}"
        which = {_LIVE: f"no task{of} waits", _ALL: f"no task{of}"}.get(state, f"no task{of} is {state}")
        topics = {of for of, _ in found.counts}
        near = [] if topic is None or topic in topics else get_close_matches(topic, topics)
        meant = f"; did you mean {' or '.join(map(printable, near))}?" if near else ""
        click.echo(f"{which} in {context.shown_store}{meant}")
    if asks_dead and (dead := found.number(topic, State.DEAD)):
        click.echo(f"{dead:,} dead: `bide ls --state dead` shows them, `bide redrive` sends them again")


@click.command()
@click.argument("topic")
@click.argument("key")
@takes_context()
def show(context: Context, topic: str, key: str) -> Exit:
    """Show one task: its times, its payload, and its events: who changed it, and why it failed."""

    async def work(app: Bide) -> Exit:
        task = await app.get(topic, key)
        events = await app.events(topic, key)
        life = await task_history(app, topic, key)
        last = None if life is None else life.last
        why = [] if life is None else _reasons(life, (await app.paused()).get(topic))
        if context.json:
            shape = {
                "task": None if task is None else task_shape(task.record, alone=True),
                "details": None if task is None else detail_shape(task.record),
                "delivery": None if last is None else _delivery_shape(last, why),
                "events": [event_shape(event) for event in events],
            }
            print_json(shape)
        elif task is None and not events:
            click.echo(f"{topic}/{key}: {WORDS[Result.NOT_FOUND]}")
        else:
            from bide.cli.tables import print_events, print_task

            if task is None:
                click.echo(f"{topic}/{key}: finished and forgotten; its events are still there:")
            else:
                print_task(task.record, last, why)
            print_events(events, of_one=True)
        return Exit.NOT_DONE if task is None else Exit.DONE

    return context.open(work)


_ISOLATES = dict.fromkeys((0x2068, 0x2069))
"""The characters around names in the console's sentences; a terminal shows them as escapes."""


def _reasons(life: TaskHistory, pause: Pause | None) -> list[str]:
    """The reasons for its lateness, in the console's sentences."""
    from bide.service.console.i18n import Locale
    from bide.service.console.sentences import reasons

    zone = datetime.now().astimezone().tzinfo or UTC
    found = reasons(Locale("en", "", zone, current_millis()), life, pause)
    return [printable(why.translate(_ISOLATES)) for why in found]


def _delivery_shape(last: Attempt, why: Sequence[str]) -> dict[str, Any]:
    began = None if last.began is None else instant_text(last.began)
    return {"number": last.number, "began_at": began, "late_ms": last.late, "took_ms": last.took, "why": why}


@click.command()
@click.argument("topic", required=False)
@click.argument("key", required=False)
@click.option("--limit", type=WholeNumber(1, 100_000), default=50, show_default=True, help="The most to print.")
@takes_context()
def events(context: Context, topic: str | None, key: str | None, limit: int) -> Exit:
    """List the unusual events, the newest first: of TOPIC KEY, or of all tasks.

    Failed deliveries, deaths, lost leases, and every change by a person; not the happy path. The log is capped.
    """
    if topic is not None and key is None:
        raise BadInput("KEY", None, "both TOPIC and KEY, or neither")

    async def work(app: Bide) -> Exit:
        found = await app.events(topic, key, limit=limit)
        if context.json:
            for event in found:
                print_json(event_shape(event))
        else:
            from bide.cli.tables import print_events

            print_events(found, of_one=key is not None)
        return Exit.DONE

    return context.open(work)


def _instant_or_length(text: str) -> int:
    try:
        return due_of(text, now=current_millis).resolve(current_millis())
    except BadInput as error:
        accepted = f'a duration from now such as "15m", or {error.accepted}'
        raise BadInput("--before", text, accepted) from None


@click.command()
@click.option("--topic", help="Only of this topic.")
@click.option("--ahead", metavar="LENGTH", help='Forecast how many tasks come due within this, such as "24h".')
@click.option("--step", metavar="LENGTH", help="The step of the forecast; a 24th of --ahead by default.")
@takes_context()
def tally(context: Context, topic: str | None, ahead: str | None, step: str | None) -> Exit:
    """Count tasks by topic and state, and the due ones; with --ahead, forecast how many come due when."""
    edges = _edges(ahead, step)

    async def work(app: Bide) -> Exit:
        now = app.clock.now()
        asked = [0, now, *(now + edge for edge in edges if now + edge <= LAST_INSTANT)]
        edges_at = [as_datetime(edge) for edge in asked]
        found = await app.tally(edges_at, topics=None if topic is None else [topic])
        if edges:
            found = await _with_coming(app, found, asked)
        paused = {of: pause for of, pause in (await app.paused()).items() if topic in (None, of)}
        if context.json:
            print_json({**_tally_shape(found, asked), "paused": [pause_shape(pause) for pause in paused.values()]})
        else:
            _print_tally(found, asked, context.shown_store, paused)
        return Exit.DONE

    return context.open(work)


async def _with_coming(app: Bide, found: Tally, edges: list[Millis]) -> Tally:
    """The forecast with the later occurrences of recurring tasks, each of which waits only for its next one."""
    rules, all_rules = await recurring_tasks(app, found.counts)
    coming = await coming_of(rules, edges[1], edges[-1] - 1, edges[1])
    later = [coming.between(low, high) for low, high in pairwise(edges[1:])]
    forecast = dict(found.forecast)
    for topic in coming.instants:
        due, *waiting = forecast.get(topic, [Count(0)] * (len(edges) - 1))
        forecast[topic] = [
            due,
            *(summed([one, of.get(topic, Count(0))]) for one, of in zip(waiting, later, strict=True)),
        ]
    if not all_rules:
        click.echo("bide: note: too many tasks to look for all recurring ones: more may come due", err=True)
    return replace(found, forecast=forecast)


def _edges(ahead: str | None, step: str | None) -> list[Millis]:
    """The end of each step of the forecast, in milliseconds from now."""
    if ahead is None:
        if step is not None:
            raise BadInput("--step", step, "only together with --ahead")
        return []
    whole = duration(ahead, field="--ahead")
    part = max(1, -(-whole // 24)) if step is None else duration(step, field="--step")
    if not 0 < part <= whole or whole > part * _MOST_STEPS:
        accepted = f"a length above zero that goes into --ahead at most {_MOST_STEPS} times"
        raise BadInput("--ahead" if step is None else "--step", ahead if step is None else step, accepted)
    return [min(whole, part * place) for place in range(1, -(-whole // part) + 1)]


def _tally_shape(found: Tally, edges: list[Millis]) -> dict[str, Any]:
    return {
        "at": instant_text(edges[1]),
        "counts": [
            {"topic": topic, "state": state.value, **count._asdict()}
            for (topic, state), count in sorted(found.counts.items())
        ],
        "due": [{"topic": topic, **counts[0]._asdict()} for topic, counts in sorted(found.forecast.items())],
        "forecast": [
            {"topic": topic, "from": instant_text(since), "until": instant_text(until), **count._asdict()}
            for topic, counts in sorted(found.forecast.items())
            for since, until, count in zip(edges[1:], edges[2:], counts[1:], strict=False)
        ],
    }


def _print_tally(found: Tally, edges: list[Millis], store: str, paused: Mapping[Topic, Pause]) -> None:
    from bide.cli.tables import STYLES, cells, console, plain_table

    topics = sorted({topic for topic, _ in found.counts} | set(found.forecast) | paused.keys())
    if not topics:
        click.echo(f"no tasks in {store}")
        return
    states = list(State)
    table = plain_table("topic", "due now", *states, right=("due now", *states))
    for topic in topics:
        due = found.forecast.get(topic, [Count(0)])[0]
        counts = [(STYLES["due"], due), *((STYLES[of], found.counts.get((topic, of), Count(0))) for of in states)]
        numbers = [(count_words(count), style if count.number else "dim") for style, count in counts]
        table.add_row(*cells(topic, *numbers))
    console().print(table)
    for topic, pause in paused.items():
        click.echo(f"{printable(topic)}: {paused_words(pause)}; resume it with: bide resume {printable(topic)}")
    if len(edges) > 2:
        _print_forecast(found, edges)


def _print_forecast(found: Tally, edges: list[Millis]) -> None:
    """Print a bar for each step, the longest as wide as the window allows."""
    from bide.cli.tables import cells, console, plain_table

    printer = console()
    sums = [
        summed(counts[place] for counts in found.forecast.values() if place < len(counts))
        for place in range(1, len(edges) - 1)
    ]
    most = max((count.number for count in sums), default=0)
    block = "█" if printer.encoding.startswith("utf") else "#"
    widest = max(10, min(60, printer.width - 50))
    table = plain_table("comes due within", "until", "tasks", "", right=("tasks",))
    for place, count in enumerate(sums, 1):
        bar = block * max(1, round(count.number / most * widest)) if count.number else ""
        until = edges[place + 1]
        within = duration_text(until - edges[1])
        table.add_row(*cells(within, (local_words(until), "dim"), count_words(count), (bar, "cyan")))
    printer.print(table)
