"""`bide pause` and `resume`: topics whose tasks are held back; and how other commands learn which these are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import click

from bide.app import Bide
from bide.cli.context import Context, shared_options
from bide.cli.exits import Exit
from bide.cli.format import current_millis, local_words, printable, relative_words
from bide.cli.output import print_json
from bide.core.answers import Answer
from bide.core.errors import BideError
from bide.core.instants import instant_text
from bide.core.names import check_topic
from bide.core.records import Pause, Topic


@click.command()
@click.argument("topics", metavar="[TOPIC]...", nargs=-1)
@shared_options()
@click.pass_obj
def pause(context: Context, topics: tuple[str, ...]) -> Exit:
    """Hold the tasks of each TOPIC back until it is resumed; without one, list what is paused.

    New tasks are taken as ever, and what runs goes on. Workers, webhooks and consumers heed it within two seconds. It
    survives every restart.
    """
    _check(topics)

    async def work(app: Bide) -> Exit:
        changed = {topic: await app.pause(topic) for topic in topics}
        found = await app.paused()
        if not topics:
            _list(context, found)
        for topic in topics:
            words = "paused" if changed[topic] else "paused already"
            _tell(context, topic, found.get(topic), words, changed=changed[topic])
        return Exit.DONE

    return context.open(work, make=bool(topics))


@click.command()
@click.argument("topics", metavar="TOPIC...", nargs=-1, required=True)
@shared_options()
@click.pass_obj
def resume(context: Context, topics: tuple[str, ...]) -> Exit:
    """Let the tasks of each TOPIC go out again: what is overdue at once, as fast as its workers are."""
    _check(topics)

    async def work(app: Bide) -> Exit:
        for topic in topics:
            changed = await app.resume(topic)
            _tell(context, topic, None, "resumed" if changed else "was not paused", changed=changed)
        return Exit.DONE

    return context.open(work)


async def pauses_about(app: Bide, answers: Iterable[Answer]) -> Mapping[Topic, Pause]:
    """The pauses, if any of these tasks is live and so may have to wait for it. One call, or none.

    The verb itself is done: where this cannot be told (a service of an older version), the answer goes without it.
    """
    if not any(answer.record is not None and answer.record.state.live for answer in answers):
        return {}
    try:
        return await app.paused()
    except BideError as error:
        click.echo(f"bide: note: what is paused cannot be told: {' '.join(str(error).split())}", err=True)
        return {}


def paused_words(pause: Pause) -> str:
    """ "paused 3m ago (2030-01-31 08:00:00 CET) by anna@shop"."""
    by = "" if pause.who is None else f" by {printable(pause.who)}"
    return f"paused {relative_words(pause.since, current_millis())} ({local_words(pause.since)}){by}"


def pause_shape(pause: Pause) -> dict[str, Any]:
    """A pause as JSON."""
    return {"topic": pause.topic, "since": instant_text(pause.since), "who": pause.who}


def _check(topics: tuple[str, ...]) -> None:
    """All before any is done."""
    for topic in topics:
        check_topic(topic, "TOPIC")


def _list(context: Context, found: Mapping[Topic, Pause]) -> None:
    if context.json:
        for pause in found.values():
            print_json(pause_shape(pause))
    elif not found:
        click.echo(f"nothing is paused in {context.shown_store}")
    else:
        for topic, pause in found.items():
            click.echo(f"{printable(topic)}: {paused_words(pause)}")


def _tell(context: Context, topic: Topic, pause: Pause | None, words: str, *, changed: bool) -> None:
    if context.json:
        shape = {"since": None, "who": None} if pause is None else pause_shape(pause)
        print_json({**shape, "topic": topic, "paused": pause is not None, "changed": changed})
    elif pause is not None and not changed:
        click.echo(f"{printable(topic)}: {words}: {paused_words(pause)}")
    else:
        click.echo(f"{printable(topic)}: {words}")
