"""`bide redrive`: dead tasks are sent again, one or all."""

from __future__ import annotations

import sys
from collections import Counter

import click

from bide.app import Bide
from bide.cli.change import if_token, one
from bide.cli.context import Context, shared_options
from bide.cli.exits import Exit, PartlyDone
from bide.cli.output import print_json, progress_bar
from bide.core.answers import Answer
from bide.core.errors import BadInput, BideError, PartlyFailed
from bide.core.records import Ref, Result, State
from bide.service.schemas import answer_shape

_PAGE = 500


@click.command()
@click.argument("topic", required=False)
@click.argument("key", required=False)
@click.option("--all-dead", is_flag=True, help="Send every dead task again instead.")
@click.option("--topic", "only", metavar="TOPIC", help="With --all-dead: only those of this topic.")
@click.option("--delay", metavar="LENGTH", default="0s", show_default=True, help="How long from now.")
@click.option("--yes", is_flag=True, help="With --all-dead: do not ask.")
@if_token
@shared_options()
@click.pass_obj
def redrive(
    context: Context,
    topic: str | None,
    key: str | None,
    all_dead: bool,
    only: str | None,
    delay: str,
    yes: bool,
    if_token: int | None,
) -> Exit:
    """Send a dead task again, as a new life: TOPIC KEY, or --all-dead."""
    if all_dead:
        if topic is not None or if_token is not None:
            field, value = ("TOPIC", topic) if topic is not None else ("--if-token", if_token)
            raise BadInput(field, value, "nothing beside --all-dead but --topic, --delay and --yes")
        return context.open(lambda app: _redrive_all(app, context, only, delay, yes))
    if only is not None:
        raise BadInput("--topic", only, "together with --all-dead only; a single task is redriven by TOPIC KEY")
    if topic is None or key is None:
        raise BadInput("KEY" if topic else "TOPIC, KEY", None, "which task: TOPIC KEY, or --all-dead")
    return one(context, topic, key, lambda app: app.redrive(topic, key, delay=delay, if_token=if_token))


async def _redrive_all(app: Bide, context: Context, topic: str | None, delay: str, yes: bool) -> Exit:
    """Page by page. What dies again while this runs is left alone, or a broken handler would keep it going for ever."""
    begun = app.clock.now()
    counts = (await app.tally()).counts
    dead = [count for (of, state), count in counts.items() if state is State.DEAD and topic in (None, of)]
    number = sum(count.number for count in dead)
    if not number:
        if not context.json:
            click.echo("nothing is dead" + ("" if topic is None else f" in topic {topic}"))
        return Exit.DONE
    if not yes:
        if not sys.stdin.isatty():
            raise BadInput("--yes", None, "--yes where nobody can be asked")
        least = "" if all(count.exact for count in dead) else "at least "
        if not click.confirm(f"Send {least}{number:,} dead tasks again?", err=True):
            return Exit.NOT_DONE
    totals: Counter[Result] = Counter()
    with progress_bar("redriving", number if all(count.exact for count in dead) else None) as progress:
        page: list[Ref] = []

        async def send() -> None:
            for answer in await app.redrive_many(page, delay=delay):
                totals[answer.result] += 1
                if context.json:
                    print_json(answer_shape(answer))
            progress(len(page))
            page.clear()

        try:
            async for task in app.find(state="dead", topic=topic, page=_PAGE):
                if (task.record.finished_at or 0) <= begun:
                    page.append(task.record.ref)
                if len(page) == _PAGE:
                    await send()
            if page:
                await send()
        except BideError as error:
            done = totals.total()
            if isinstance(error, PartlyFailed):
                done += sum(isinstance(one, Answer) for one in error.answers)
            if not done:
                raise
            raise PartlyDone(f"{error}. {done:,} tasks were sent; the same command goes on with the rest") from error
    if not context.json:
        click.echo(", ".join(f"{count:,} {result.value}" for result, count in totals.most_common()))
    return Exit.DONE if set(totals) <= {Result.REDRIVEN} else Exit.NOT_DONE
