"""`bide recurring`: list, add and steer recurring tasks."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import click

from bide.app import Bide
from bide.cli.context import Context, NamedCommands, WholeNumber, shared_options
from bide.cli.exits import Exit
from bide.cli.output import answer_words, local_words, print_json, printable, relative_words, totals_words
from bide.cli.schedule import read_payload
from bide.core.answers import Answer
from bide.core.records import Result
from bide.core.recurrence.plan import CatchUp, Overlap
from bide.core.recurrence.rules import rule_of
from bide.core.tasks import Task
from bide.engine.recurring import default_key, planned
from bide.service.schemas import answer_shape, recurring_shape


class _RecurringCommands(NamedCommands):
    noun = "recurring"


@click.group(cls=_RecurringCommands, no_args_is_help=False, subcommand_metavar="ls|add|pause|... ...")
@shared_options()
def recurring() -> None:
    """List, add and steer recurring tasks. KEY is by default the topic's name."""


@recurring.command(short_help="List recurring tasks, with their next instants.")
@click.argument("topic", required=False)
@click.argument("key", required=False)
@click.option("--group", help="Only those of this group.")
@click.option("-n", "number", type=WholeNumber(1, 100), default=1, help="How many next instants of each.")
@shared_options()
@click.pass_obj
def ls(context: Context, topic: str | None, key: str | None, group: str | None, number: int) -> Exit:
    """List the recurring tasks of all topics, of TOPIC, or the one with KEY: rules in words and next instants."""

    async def work(app: Bide) -> list[tuple[Task[Any], list[int]]]:
        now = app.clock.now()
        found = [task async for task in app.recurring.find(topic, group=group) if key in (None, task.key)]
        if context.json:
            for task in found:
                print_json(recurring_shape(task.record, now, number))
        return [(task, planned(task.record, now, number)) for task in found]

    found = context.open(work, noted=False)
    if not context.json:
        _print(found) if found else click.echo(f"no recurring tasks in {context.shown_store}")
    return Exit.DONE


def _print(found: list[tuple[Task[Any], list[int]]]) -> None:
    from rich.text import Text

    from bide.cli.output import current_millis
    from bide.cli.tables import console, plain_table

    table, now = plain_table("topic", "key", "rule", "next", "local time"), current_millis()
    for task, instants in found:
        assert task.recurrence is not None
        first = "paused" if task.recurrence.paused else relative_words(instants[0], now) if instants else "running"
        table.add_row(
            Text(printable(task.topic)), Text(printable(task.key)), Text(task.recurrence.rule.words),
            Text(first, "yellow" if task.recurrence.paused else ""), Text("\n".join(map(local_words, instants)), "dim"),
        )  # fmt: skip
    console().print(table)


@recurring.command(short_help="Let a task recur by a rule, or change its rule.")
@click.argument("topic")
@click.argument("rule")
@click.argument("payload", required=False)
@click.option("--key", help="A name for it, unique within the topic; the topic's name by default.")
@click.option("--zone", default="UTC", show_default=True, help="The time zone of the rule, such as Asia/Shanghai.")
@click.option("--start", metavar="INSTANT", help="The first instant at which it may run.")
@click.option("--until", metavar="INSTANT", help="The last instant at which it may run.")
@click.option("--jitter", metavar="LENGTH", help="Delay each key by its own fixed time, at most this long.")
@click.option("--group", help="Tasks of one group are shifted and cancelled together.")
@click.option("--catch-up", type=click.Choice([*CatchUp]), default="latest", show_default=True, help="After an outage.")
@click.option("--overlap", type=click.Choice([*Overlap]), default="skip", show_default=True, help="While one runs.")
@click.option("--deadline", metavar="LENGTH", help="Deliver no occurrence later than this after it was due.")
@shared_options()
@click.pass_obj
def add(
    context: Context,
    /,
    topic: str,
    rule: str,
    payload: str | None,
    key: str | None,
    zone: str,
    start: str | None,
    until: str | None,
    jitter: str | None,
    **options: Any,
) -> Exit:
    """Let a task of TOPIC recur by RULE: "0 8 * * mon-fri", "@daily", "every 15m", or "FREQ=MONTHLY;BYDAY=-1FR".

    PAYLOAD is as in `bide schedule`. Once more with another rule, it changes the rule and moves the next occurrence.
    """
    made = rule_of(rule, zone=zone, start=start, until=until, jitter=jitter or "0s")
    data = read_payload(payload, raw=False)
    return _one(context, topic, key, lambda app: app.recurring.add(topic, made, data, key=key, **options), make=True)


def _verb(name: str, about: str) -> None:
    """Add the command of a verb that takes nothing but the task."""

    @recurring.command(name.replace("_", "-"), short_help=about, help=about)
    @click.argument("topic")
    @click.argument("key", required=False)
    @shared_options()
    @click.pass_obj
    def command(context: Context, topic: str, key: str | None) -> Exit:
        return _one(context, topic, key, lambda app: getattr(app.recurring, name)(topic, key))


for _name, _about in (
    ("pause", "Hold its occurrences back until it is resumed."),
    ("resume", "Let it recur again, from its next instant on."),
    ("skip_next", "Leave out the next occurrence."),
    ("run_now", "Run it once now, beside the plan."),
    ("replan", "Compute its next instant anew, as after a change of the zone database."),
    ("remove", "End it: no occurrence follows."),
):
    _verb(_name, _about)


@recurring.command(short_help="Run the occurrences of a past or future time.")
@click.argument("topic")
@click.argument("key", required=False)
@click.option("--since", metavar="INSTANT", required=True, help="The first instant.")
@click.option("--until", metavar="INSTANT", required=True, help="The last instant.")
@shared_options()
@click.pass_obj
def backfill(context: Context, topic: str, key: str | None, since: str, until: str) -> Exit:
    """Run each occurrence of the rule from --since to --until once, as a task of its own."""
    from collections import Counter

    async def work(app: Bide) -> list[Answer]:
        return await app.recurring.backfill(topic, key, since=since, until=until)

    answers = context.open(work)
    totals = Counter(answer.result for answer in answers)
    context.say({word.value: count for word, count in totals.items()}, totals_words(totals) or "nothing to run")
    return Exit.NOT_DONE if Result.NOT_FOUND in totals else Exit.DONE


def _one(
    context: Context,
    topic: str,
    key: str | None,
    verb: Callable[[Bide], Coroutine[Any, Any, Answer]],
    *,
    make: bool = False,
) -> Exit:
    answer = context.open(verb, make=make)
    context.say(answer_shape(answer), answer_words(answer, topic, key or default_key(topic)))
    return Exit.DONE if answer.ok else Exit.NOT_DONE
