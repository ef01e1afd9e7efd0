"""`bide recurring` lists, adds and steers recurring tasks; `bide next` shows when a rule runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, get_args

import click

from bide.app import Bide
from bide.cli.context import Context, NamedCommands, WholeNumber, shared_options, takes_context
from bide.cli.exits import Exit
from bide.cli.output import answer_words, current_millis, local_words, print_json, relative_words, totals_words
from bide.cli.schedule import read_payload
from bide.core.answers import Answer
from bide.core.errors import BadInput
from bide.core.instants import LAST_INSTANT, Millis, as_datetime, instant, instant_text
from bide.core.records import Result
from bide.core.recurrence.plan import CatchUp, Overlap
from bide.core.recurrence.rules import Bounds, CronRule, RRuleRule, rule_of
from bide.core.recurrence.zones import OnGap, OnRepeat, zone_info
from bide.core.retry import PRESETS
from bide.core.tasks import Task
from bide.engine.recurring import default_key, planned
from bide.service.schemas import answer_shape, recurring_shape

_NONE = "there is no such recurring task"
_CATCH_UP, _OVERLAP = (click.Choice([*map(str, of)]) for of in (CatchUp, Overlap))


@click.group(cls=NamedCommands, no_args_is_help=False, subcommand_metavar="ls|add|pause|... ...")
@shared_options()
def recurring() -> None:
    """List, add and steer recurring tasks. KEY is by default the topic's name."""


@recurring.command(short_help="List recurring tasks, with their next instants.")
@click.argument("topic", required=False)
@click.argument("key", required=False)
@click.option("--group", help="Only those of this group.")
@click.option("-n", "number", type=WholeNumber(1, 100), default=1, help="How many next instants of each.")
@takes_context()
def ls(context: Context, topic: str | None, key: str | None, group: str | None, number: int) -> Exit:
    """List the recurring tasks of all topics, of TOPIC, or the one with KEY: rules in words and next instants."""

    async def work(app: Bide) -> tuple[list[Task[Any]], Millis]:
        found = [task async for task in app.recurring.find(topic, group=group) if key in (None, task.key)]
        return found, app.clock.now()  # the store's clock, by which they run

    found, now = context.open(work, noted=False)
    if context.json:
        for task in found:
            print_json(recurring_shape(task.record, now, number))
    elif found:
        _print(found, now, number)
    else:
        click.echo(f"no {'such ' if topic or group else ''}recurring tasks in {context.shown_store}")
    return Exit.DONE


def _print(found: list[Task[Any]], now: Millis, number: int) -> None:
    from bide.cli.tables import cells, console, plain_table

    table = plain_table("topic", "key", "rule", "next", "local time")
    for task in found:
        assert task.recurrence is not None
        instants = planned(task.record, now, number)
        first, style = relative_words(instants[0] if instants else task.record.wake_at, now), ""
        if task.recurrence.paused:
            first, style = "paused", "yellow"
        elif task.attempt and not instants:
            first = "running"
        at = "\n".join(map(local_words, instants))
        table.add_row(*cells(task.topic, task.key, task.recurrence.rule.words, (first, style), (at, "dim")))
    console().print(table)


@recurring.command(short_help="Make a task recur by a rule, or change its rule.")
@click.argument("topic")
@click.argument("rule")
@click.argument("payload", required=False)
@click.option("--key", help="A name for it, unique within the topic; the topic's name by default.")
@click.option("--zone", default="UTC", show_default=True, help="The time zone of the rule, such as Asia/Shanghai.")
@click.option("--start", metavar="INSTANT", help="The first instant at which it may run.")
@click.option("--until", metavar="INSTANT", help="The last instant at which it may run.")
@click.option("--times", type=WholeNumber(1, 100_000), help="How often it runs in all, from --start on.")
@click.option("--jitter", metavar="LENGTH", help="Delay each key by its own fixed time, at most this long.")
@click.option("--except-on", metavar="DATE", multiple=True, help="Not on this date; may be given several times.")
@click.option("--on-gap", type=click.Choice(get_args(OnGap)), help="For times that the clocks skip.")
@click.option("--on-repeat", type=click.Choice(get_args(OnRepeat)), help="For times that the clocks repeat.")
@click.option("--group", help="Tasks of one group are shifted and cancelled together.")
@click.option("--catch-up", type=_CATCH_UP, default="latest", show_default=True, help="After an outage.")
@click.option("--overlap", type=_OVERLAP, default="skip", show_default=True, help="While one runs.")
@click.option("--window", metavar="LENGTH", help="Run no occurrence that is later than this.")
@click.option("--most", type=WholeNumber(1, 10_000), default=100, help="With all or queue: at most this many.")
@click.option("--deadline", metavar="LENGTH", help="Deliver no occurrence later than this after it was due.")
@click.option("--end-when-dead", is_flag=True, help="End the rule with the first occurrence that dies.")
@click.option("--retry", type=click.Choice(list(PRESETS)), help="The retry policy of each occurrence.")
@takes_context()
def add(context: Context, /, topic: str, rule: str, payload: str | None, key: str | None, **options: Any) -> Exit:
    """Make a task of TOPIC recur by RULE: "0 8 * * mon-fri", "@daily", "every 15m", or "FREQ=MONTHLY;BYDAY=-1FR".

    PAYLOAD is as in `bide schedule`. Run again with another RULE, it changes the rule and moves the next occurrence.
    """
    bounds = {name: options.pop(name) for name in ("zone", *Bounds.__annotations__)}
    made, data = rule_of(rule, **bounds), read_payload(payload, raw=False)
    return _one(context, topic, key, lambda app: app.recurring.add(topic, made, data, key=key, **options), make=True)


def _verb(name: str, about: str, done: str | None = None) -> None:
    """Add the command of a verb that takes nothing but the task; `done`: its answer in one word, if it took effect."""

    @recurring.command(name.replace("_", "-"), short_help=about, help=about)
    @click.argument("topic")
    @click.argument("key", required=False)
    @takes_context()
    def command(context: Context, topic: str, key: str | None) -> Exit:
        return _one(context, topic, key, lambda app: getattr(app.recurring, name)(topic, key), done=done)


def _one(
    context: Context, topic: str, key: str | None, verb: Callable[[Bide], Coroutine[Any, Any, Answer]], *,
    make: bool = False, done: str | None = None,
) -> Exit:  # fmt: skip
    answer, key = context.open(verb, make=make), default_key(topic) if key is None else key
    words = f"{topic}/{key}: {_NONE}" if answer.result is Result.NOT_FOUND else answer_words(answer, topic, key)
    if done is not None and answer.ok:
        words = f"{topic}/{key}: {done if answer.result is Result.REPLACED else f'{done} already'}"
    context.say(answer_shape(answer), words)
    return Exit.DONE if answer.ok else Exit.NOT_DONE


_verb("pause", "Hold its occurrences back until it is resumed.", "paused")
_verb("resume", "Let it recur again, from its next instant on.", "resumed")
_verb("skip_next", "Skip the next occurrence.")
_verb("run_now", "Run it once now, in addition to the plan.")
_verb("replan", "Compute its next instant again, as after a change of the zone database.")
_verb("remove", "End it: no occurrence follows.")


@recurring.command(short_help="Run the occurrences of a past or future time.")
@click.argument("topic")
@click.argument("key", required=False)
@click.option("--since", metavar="INSTANT", required=True, help="The first instant.")
@click.option("--until", metavar="INSTANT", required=True, help="The last instant.")
@takes_context()
def backfill(context: Context, topic: str, key: str | None, since: str, until: str) -> Exit:
    """Run each occurrence of the rule from --since to --until once, as a separate task."""
    answers = context.open(lambda app: app.recurring.backfill(topic, key, since=since, until=until))
    totals = Counter(answer.result for answer in answers)
    words = _NONE if Result.NOT_FOUND in totals else totals_words(totals) or "nothing to run"
    context.say({word.value: count for word, count in totals.items()}, words)
    return Exit.NOT_DONE if Result.NOT_FOUND in totals else Exit.DONE


# --- next


@click.command("next")
@click.argument("rule", metavar="RULE")
@click.option("--zone", metavar="ZONE", help="The time zone of the rule, such as Europe/Rome; UTC by default.")
@click.option("-n", "count", default="5", metavar="N", type=WholeNumber(1, 10_000), help="How many; 5 by default.")
@click.option("--after", metavar="INSTANT", help="Start after this instant, such as 2030-01-31T08:00Z; now by default.")
@click.option("--start", metavar="INSTANT", help="The start of the rule, from which an RRULE counts.")
@takes_context(store=False)
def next_runs(context: Context, rule: str, zone: str | None, count: int, after: str | None, start: str | None) -> Exit:
    """Show when a recurring rule runs next. RULE is "0 8 * * mon-fri", "@daily", "every 15m" or "FREQ=DAILY".

    Exit code 1: it never runs again.
    """
    recurring = rule_of(rule, zone=zone or "UTC", start=start)
    first = current_millis() if after is None else _instant_of(after, zone)
    found = recurring.upto(first + 1, LAST_INSTANT, count)
    if not context.json:
        click.echo(recurring.words)
    for at in found:
        shifted, local = recurring.is_shifted(at), as_datetime(at)
        with suppress(OverflowError):  # year 9999 east of Greenwich
            local = local.astimezone(zone_info(recurring.zone))
        shape = {"at": instant_text(at), "local": local.isoformat(), "zone": recurring.zone, "shifted": shifted}
        mark = "  shifted: the clocks are set forward over its time" if shifted else ""
        context.say(shape, f"{local.strftime('%a %Y-%m-%d %H:%M:%S %z')}  {instant_text(at)}{mark}")
    if len(found) < count:
        click.echo("bide: note: the rule ends here", err=True)
    if not context.json and isinstance(recurring, CronRule | RRuleRule) and recurring.gap == "skip":
        click.echo("note: times that do not exist, since the clocks are set forward over them, do not run")
    return Exit.DONE if found else Exit.NOT_DONE


def _instant_of(text: str, zone: str | None) -> Millis:
    """The instant of --after, in its own zone or else that of the rule. Raises BadInput."""
    with suppress(BadInput):
        return instant(text, field="--after", now=current_millis)
    return instant(text, field="--after", now=current_millis, zone=zone)
