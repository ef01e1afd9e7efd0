"""`bide move`, `fire`, `cancel` and `shift`: what waits is changed, and the answer says what happened."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import click

from bide.app import Bide
from bide.cli.context import Context, WholeNumber, shared_options
from bide.cli.exits import Exit
from bide.cli.format import answer_words, summary_words
from bide.cli.output import print_json
from bide.cli.pause import pauses_about
from bide.core.answers import Answer
from bide.core.errors import BadInput, PartlyFailed
from bide.core.records import Pause, Topic
from bide.service.schemas import answer_shape

if_token = click.option(
    "--if-token",
    metavar="TOKEN",
    type=WholeNumber(0, 2**63 - 1),
    help="Only if the task's token is still this one, as `show` told it.",
)
_SHOWN = 20
"""Lines that a person is shown of a whole group's answers."""


@click.command()
@click.argument("topic")
@click.argument("key")
@click.option("--delay", metavar="LENGTH", help='How long from now: "15m", "1h30m", "2d".')
@click.option("--at", metavar="INSTANT", help='Or when: "2030-01-31T08:00:00+01:00"; the offset is needed.')
@if_token
@shared_options()
@click.pass_obj
def move(context: Context, topic: str, key: str, delay: str | None, at: str | None, if_token: int | None) -> Exit:
    """Give a waiting task another time: `moved`, or `under_way` when it is being delivered and nothing changed."""
    return one(context, topic, key, lambda app: app.reschedule(topic, key, delay=delay, at=at, if_token=if_token))


@click.command()
@click.argument("topic")
@click.argument("key")
@if_token
@shared_options()
@click.pass_obj
def fire(context: Context, topic: str, key: str, if_token: int | None) -> Exit:
    """Let a waiting task happen now: `moved`, or `under_way` when it is happening already."""
    return one(context, topic, key, lambda app: app.fire_now(topic, key, if_token=if_token))


@click.command()
@click.argument("topic", required=False)
@click.argument("key", required=False)
@click.option("--group", help="Cancel every live task of this group instead.")
@click.option("--topic", "only", metavar="TOPIC", help="With --group: only those of this topic.")
@if_token
@shared_options()
@click.pass_obj
def cancel(
    context: Context,
    topic: str | None,
    key: str | None,
    group: str | None,
    only: str | None,
    if_token: int | None,
) -> Exit:
    """It shall not happen: TOPIC KEY, or a whole --group.

    `cancelled` means that no delivery starts afterwards; `cancelled_while_leased` that one is running, and no other
    follows.
    """
    if group is not None:
        if topic is not None or if_token is not None:
            field, value = ("TOPIC", topic) if topic is not None else ("--if-token", if_token)
            raise BadInput(field, value, "nothing beside --group but --topic")
        return _group(context, group, only, "cancel", lambda app: app.cancel_group(group, topic=only))
    if only is not None:
        raise BadInput("--topic", only, "together with --group only; a single task is cancelled by TOPIC KEY")
    if topic is None or key is None:
        raise BadInput("KEY" if topic else "TOPIC, KEY", None, "which task: TOPIC KEY, or --group GROUP")
    return one(context, topic, key, lambda app: app.cancel(topic, key, if_token=if_token))


@click.command()
@click.option("--group", required=True, help="Whose tasks.")
@click.option("--topic", help="Only those of this topic.")
@click.option("--by", required=True, metavar="LENGTH", help='"30m" makes them later, "-2h" earlier, at most to now.')
@shared_options()
@click.pass_obj
def shift(context: Context, group: str, topic: str | None, by: str) -> Exit:
    """Move the waiting tasks of a group, all by the same length."""
    return _group(context, group, topic, "shift", lambda app: app.shift(group=group, topic=topic, by=by))


def one(context: Context, topic: str, key: str, verb: Callable[[Bide], Coroutine[Any, Any, Answer]]) -> Exit:
    """Do `verb` to one task, and print what is answered."""

    async def work(app: Bide) -> Exit:
        answer = await verb(app)
        paused = await pauses_about(app, [answer])
        if context.json:
            print_json(answer_shape(answer, paused=paused))
        else:
            click.echo(answer_words(answer, topic, key, paused=paused))
        return Exit.DONE if answer.ok else Exit.NOT_DONE

    return context.open(work)


def _group(
    context: Context,
    group: str,
    topic: str | None,
    verb: str,
    ask: Callable[[Bide], Coroutine[Any, Any, Sequence[Answer]]],
) -> Exit:
    failed: PartlyFailed | None = None

    async def work(app: Bide) -> tuple[Sequence[Answer], Mapping[Topic, Pause]]:
        nonlocal failed
        try:
            answers = await ask(app)
        except PartlyFailed as error:
            failed = error
            answers = [answer for answer in error.answers if isinstance(answer, Answer)]
        return answers, await pauses_about(app, answers)

    answers, paused = context.open(work)
    if context.json:
        for answer in answers:
            print_json(answer_shape(answer, paused=paused))
    elif not answers:
        of = "" if topic is None else f" of topic {topic}"
        click.echo(f"{verb}: group {group} has no live task{of}")
    else:
        for answer in answers[:_SHOWN]:
            click.echo(answer_words(answer, topic or "", "", paused=paused))
        if len(answers) > _SHOWN:
            click.echo(f"... and {len(answers) - _SHOWN:,} more")
        click.echo(f"group {group}: {summary_words(answers)}")
    if failed is not None:
        raise failed
    return Exit.DONE if answers and all(answer.ok for answer in answers) else Exit.NOT_DONE
