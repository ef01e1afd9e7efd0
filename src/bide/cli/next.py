"""`bide next`: the coming instants of a recurring rule, so that a person can check it before a program relies on it."""

from __future__ import annotations

from zoneinfo import ZoneInfo

import click

from bide.cli.context import Context, WholeNumber, shared_options
from bide.cli.exits import Exit
from bide.cli.output import current_millis, print_json
from bide.core.instants import Millis, as_datetime, instant, instant_text
from bide.core.recurrence import CronRule, RRuleRule, Rule, rule_of

_SKIPS = "note: times that do not exist, since the clocks are set forward over them, do not run"


@click.command("next")
@click.argument("rule", metavar="RULE")
@click.option("--zone", default="UTC", metavar="ZONE", help="The time zone of the rule, such as Europe/Rome.")
@click.option("-n", "count", default="5", metavar="N", type=WholeNumber(1, 10_000), help="How many; 5 by default.")
@click.option("--after", metavar="INSTANT", help="Start after this instant, such as 2030-01-31T08:00Z; now by default.")
@click.option("--start", metavar="INSTANT", help="The start of the rule, from which an RRULE counts.")
@shared_options(store=False)
@click.pass_obj
def next_runs(context: Context, rule: str, zone: str, count: int, after: str | None, start: str | None) -> Exit:
    """Show when a recurring rule runs next. RULE is "0 8 * * mon-fri", "@daily", "every 15m" or "FREQ=DAILY".

    Exit code 1: it never runs again.
    """
    recurring = rule_of(rule, zone=zone, start=start)
    first = current_millis() if after is None else instant(after, field="--after", now=current_millis)
    at = recurring.after(first)
    if not context.json:
        click.echo(recurring.words)
    shown = 0
    while at is not None and shown < count:
        _show(context, recurring, at)
        at, shown = recurring.after(at), shown + 1
    if shown < count:
        click.echo("bide: note: the rule ends here", err=True)
    if not context.json and isinstance(recurring, CronRule | RRuleRule) and recurring.gap == "skip":
        click.echo(_SKIPS)
    return Exit.DONE if shown else Exit.NOT_DONE


def _show(context: Context, rule: Rule, at: Millis) -> None:
    """Print one line: the local time with its offset, and whether it replaces a time that does not exist."""
    shifted = rule.is_shifted(at)
    try:
        local = as_datetime(at).astimezone(ZoneInfo(rule.zone))
    except OverflowError:  # year 9999 east of Greenwich
        local = as_datetime(at)
    if context.json:
        print_json({"at": instant_text(at), "local": local.isoformat(), "zone": rule.zone, "shifted": shifted})
    else:
        mark = "  shifted: the clocks are set forward over its time" if shifted else ""
        click.echo(f"{local.strftime('%a %Y-%m-%d %H:%M:%S %z')}  {instant_text(at)}{mark}")
