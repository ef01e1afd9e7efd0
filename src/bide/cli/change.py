"""`bide move`, `fire`, `cancel`, `shift`, `redrive`, `pause` and `resume`: the answer says what has changed."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import click

from bide.app import Bide
from bide.cli.context import Context, if_token_option, takes_context, zone_option
from bide.cli.exits import Exit, PartlyDone
from bide.cli.output import (
    answer_words,
    pause_shape,
    paused_words,
    pauses_about,
    print_json,
    printable,
    progress_bar,
    totals_words,
)
from bide.core.answers import Answer
from bide.core.errors import BadInput, BideError, PartlyFailed
from bide.core.names import check_topic
from bide.core.records import Pause, Ref, Result, State, Topic, summed
from bide.service.schemas import answer_shape

_SHOWN = 20
"""Most lines printed for the answers of a whole group."""
_PAGE = 500


@click.command()
@click.argument("topic")
@click.argument("key")
@click.option("--delay", metavar="LENGTH", help='Duration from now: "15m", "1h30m", "2d".')
@click.option("--at", metavar="INSTANT", help='Or an instant: "2030-01-31T08:00:00+01:00", "tomorrow 20:00".')
@zone_option
@if_token_option
@takes_context()
def move(context: Context, /, topic: str, key: str, **given: Any) -> Exit:
    """Move a waiting task to another time: `moved`, or `under_way` if it is being delivered and nothing changed."""
    return context.answer(topic, key, lambda app: app.reschedule(topic, key, **given))


@click.command()
@click.argument("topic")
@click.argument("key")
@if_token_option
@takes_context()
def fire(context: Context, topic: str, key: str, if_token: int | None) -> Exit:
    """Fire a waiting task now: `moved`, or `under_way` if it is already being delivered."""
    return context.answer(topic, key, lambda app: app.fire_now(topic, key, if_token=if_token))


def _refuse_with(option: str, others: str, topic: str | None, if_token: int | None) -> None:
    """Raises BadInput if a single task is named together with the option for many."""
    for field, value in (("TOPIC", topic), ("--if-token", if_token)):
        if value is not None:
            raise BadInput(field, value, f"only {others} together with {option}")


def _single(topic: str | None, key: str | None, only: str | None, *, option: str, whole: str) -> Ref:
    """The task that TOPIC KEY names. Raises BadInput if it is not named, or an option for many is given."""
    if only is not None:
        raise BadInput("--topic", only, f"together with {option} only; name a single task by TOPIC KEY")
    if topic is None or key is None:
        raise BadInput("KEY" if topic else "TOPIC, KEY", None, f"TOPIC KEY, or {whole}")
    return Ref(topic, key)


@click.command()
@click.argument("topic", required=False)
@click.argument("key", required=False)
@click.option("--group", help="Cancel every live task of this group instead.")
@click.option("--topic", "only", metavar="TOPIC", help="With --group: only those of this topic.")
@if_token_option
@takes_context()
def cancel(
    context: Context, topic: str | None, key: str | None, group: str | None, only: str | None, if_token: int | None
) -> Exit:
    """Cancel a live task: TOPIC KEY, or a whole --group.

    `cancelled` means that no delivery starts afterwards; `cancelled_while_leased`, that one is running and no other
    follows.
    """
    if group is not None:
        _refuse_with("--group", "--topic", topic, if_token)
        return _group(context, group, only, "cancel", lambda app: app.cancel_group(group, topic=only))
    ref = _single(topic, key, only, option="--group", whole="--group GROUP")
    return context.answer(*ref, lambda app: app.cancel(*ref, if_token=if_token))


@click.command()
@click.option("--group", required=True, help="The group whose tasks move.")
@click.option("--topic", help="Only those of this topic.")
@click.option("--by", required=True, metavar="LENGTH", help='"30m" moves them later, "-2h" earlier, never before now.')
@takes_context()
def shift(context: Context, group: str, topic: str | None, by: str) -> Exit:
    """Shift the waiting tasks of a group, all by the same duration."""
    return _group(context, group, topic, "shift", lambda app: app.shift(group=group, topic=topic, by=by))


@click.command()
@click.argument("topic", required=False)
@click.argument("key", required=False)
@click.option("--all-dead", is_flag=True, help="Redrive every dead task instead.")
@click.option("--topic", "only", metavar="TOPIC", help="With --all-dead: only those of this topic.")
@click.option("--delay", metavar="LENGTH", default="0s", show_default=True, help="Duration from now.")
@click.option("--yes", is_flag=True, help="With --all-dead: do not ask.")
@if_token_option
@takes_context()
def redrive(
    context: Context, topic: str | None, key: str | None, all_dead: bool, only: str | None, delay: str, yes: bool,
    if_token: int | None,
) -> Exit:  # fmt: skip
    """Redrive a dead task, as a new life: TOPIC KEY, or --all-dead."""
    if all_dead:
        _refuse_with("--all-dead", "--topic, --delay and --yes", topic, if_token)
        return context.open(lambda app: _redrive_all(app, context, only, delay, yes))
    ref = _single(topic, key, only, option="--all-dead", whole="--all-dead")
    return context.answer(*ref, lambda app: app.redrive(*ref, delay=delay, if_token=if_token))


def _group(
    context: Context, group: str, topic: str | None, verb: str,
    ask: Callable[[Bide], Coroutine[Any, Any, Sequence[Answer]]],
) -> Exit:  # fmt: skip
    async def work(app: Bide) -> tuple[Sequence[Answer], Mapping[Topic, Pause], PartlyFailed | None]:
        failed = None
        try:
            answers = await ask(app)
        except PartlyFailed as error:
            failed, answers = error, [answer for answer in error.answers if isinstance(answer, Answer)]
        return answers, await pauses_about(app, answers), failed

    answers, paused, failed = context.open(work)
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
        totals = Counter(answer.result for answer in answers)
        words = ", ".join(f"{result.value} {count:,}" for result, count in totals.most_common())
        click.echo(f"group {group}: {words}")
    if failed is not None:
        raise failed
    return Exit.DONE if answers and all(answer.ok for answer in answers) else Exit.NOT_DONE


async def _redrive_all(app: Bide, context: Context, topic: str | None, delay: str, yes: bool) -> Exit:
    """Redrive page by page. A task that dies again meanwhile is left, or a broken handler would keep this running."""
    begun = app.clock.now()
    counts = (await app.tally()).counts
    number, exact = summed(
        count for (of, state), count in counts.items() if state is State.DEAD and topic in (None, of)
    )
    if not number:
        if not context.json:
            click.echo("no dead tasks" + ("" if topic is None else f" in topic {topic}"))
        return Exit.DONE
    if not yes:
        if not sys.stdin.isatty():
            raise BadInput("--yes", None, "--yes, since standard input is not a terminal")
        if not click.confirm(f"Send {'' if exact else 'at least '}{number:,} dead tasks again?", err=True):
            return Exit.NOT_DONE
    totals: Counter[Result] = Counter()
    with progress_bar("redriving", number if exact else None) as progress:
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
            raise PartlyDone(f"{error}. {done:,} tasks were redriven; run it again for the rest") from error
    if not context.json:
        click.echo(totals_words(totals))
    return Exit.DONE if set(totals) <= {Result.REDRIVEN} else Exit.NOT_DONE


@click.command()
@click.argument("topics", metavar="[TOPIC]...", nargs=-1)
@takes_context()
def pause(context: Context, topics: tuple[str, ...]) -> Exit:
    """Hold the tasks of each TOPIC back until it is resumed; without a TOPIC, list the pauses.

    New tasks are accepted, and running deliveries go on. Workers, webhooks and consumers stop within two seconds. A
    pause survives every restart.
    """
    for topic in topics:  # all of them, before any is changed
        check_topic(topic, "TOPIC")

    async def work(app: Bide) -> Exit:
        changed = {topic: await app.pause(topic) for topic in topics}
        found = await app.paused()
        for topic in topics:
            words = "paused" if changed[topic] else "already paused"
            _print_pause(context, topic, found.get(topic), words, changed=changed[topic])
        if topics:
            return Exit.DONE
        for topic, pause in found.items():
            context.say(pause_shape(pause), f"{printable(topic)}: {paused_words(pause)}")
        if not found and not context.json:
            click.echo(f"no topic is paused in {context.shown_store}")
        return Exit.DONE

    return context.open(work, make=bool(topics))


@click.command()
@click.argument("topics", metavar="TOPIC...", nargs=-1, required=True)
@takes_context()
def resume(context: Context, topics: tuple[str, ...]) -> Exit:
    """Deliver the tasks of each TOPIC again: overdue ones at once, as fast as its workers handle them."""
    for topic in topics:
        check_topic(topic, "TOPIC")

    async def work(app: Bide) -> Exit:
        for topic in topics:
            changed = await app.resume(topic)
            _print_pause(context, topic, None, "resumed" if changed else "was not paused", changed=changed)
        return Exit.DONE

    return context.open(work)


def _print_pause(context: Context, topic: Topic, pause: Pause | None, words: str, *, changed: bool) -> None:
    shape = {"since": None, "who": None} if pause is None else pause_shape(pause)
    since = "" if pause is None or changed else f": {paused_words(pause)}"
    context.say(
        {**shape, "topic": topic, "paused": pause is not None, "changed": changed},
        f"{printable(topic)}: {words}{since}",
    )
