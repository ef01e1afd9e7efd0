"""`bide schedule`: one task from the command line, or many from a file of JSON lines."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import msgspec

from bide.app import Bide
from bide.cli.context import Context, WholeNumber, shared_options
from bide.cli.exits import Exit
from bide.cli.format import answer_words
from bide.cli.output import print_json
from bide.cli.pause import pauses_about
from bide.core.errors import BadInput, BadPayload
from bide.core.records import OnConflict
from bide.core.retry import PRESETS
from bide.service.schemas import answer_shape

_PAYLOAD_ACCEPTED = "JSON such as '{\"number\": 42}', @FILE, or - for standard input; with --bytes anything"


@click.command()
@click.argument("topic", required=False)
@click.argument("payload", required=False)
@click.option("--key", help="Its name, unique within the topic; a fresh UUIDv7 if not given.")
@click.option("--group", help="Tasks of one group are shifted and cancelled together.")
@click.option("--delay", metavar="LENGTH", help='How long from now: "15m", "1h30m", "250ms", "2d".')
@click.option("--at", metavar="INSTANT", help='Or when: "2030-01-31T08:00:00+01:00"; the offset is needed.')
@click.option(
    "--on-conflict",
    type=click.Choice([choice.value for choice in OnConflict]),
    default="replace",
    show_default=True,
    help="What happens when the key is taken.",
)
@click.option("--retry", type=click.Choice(list(PRESETS)), help="When to try again after a failure.")
@click.option("--deadline", metavar="WHEN", help="Not after this instant, or this length from now.")
@click.option("--bytes", "raw", is_flag=True, help="Take the payload as it is; it need not be JSON.")
@click.option("--many", metavar="FILE", help="JSON lines, one task each; - for standard input. TOPIC is their default.")
@click.option(
    "--from", "first", metavar="LINE", type=WholeNumber(1, 2**63 - 1), help="With --many: leave out those before."
)
@shared_options()
@click.pass_obj
def schedule(
    context: Context,
    topic: str | None,
    payload: str | None,
    key: str | None,
    group: str | None,
    delay: str | None,
    at: str | None,
    on_conflict: str,
    retry: str | None,
    deadline: str | None,
    raw: bool,
    many: str | None,
    first: int | None,
) -> Exit:
    """Register something to happen at a time.

    PAYLOAD is JSON, @FILE, or - for standard input. Give one of --delay and --at. Once this has answered, the task
    survives any crash.

    A line of a --many file is an object: {"topic", "key", "group", "delay" or "at", "payload" or "payload_base64",
    "on_conflict", "retry", "deadline", "headers"}; 1,000 lines make one transaction.
    """
    if many is not None:
        return _schedule_many(context, many, topic, first or 1, {"payload": payload, "--key": key, "--at": at,
            "--delay": delay, "--group": group, "--deadline": deadline, "--retry": retry})  # fmt: skip
    if first is not None:
        raise BadInput("--from", first, "together with --many only")
    if topic is None:
        raise BadInput("TOPIC", None, "the kind of the task, such as order.close")
    data = read_payload(payload, raw=raw)

    async def work(app: Bide) -> Exit:
        answer = await app.schedule(
            topic, data, key=key, group=group, delay=delay, at=at, on_conflict=on_conflict, retry=retry,
            deadline=deadline,
        )  # fmt: skip
        paused = await pauses_about(app, [answer])
        if context.json:
            print_json(answer_shape(answer, paused=paused))
        else:
            click.echo(answer_words(answer, topic, key or "", paused=paused))
        return Exit.DONE if answer.ok else Exit.NOT_DONE

    return context.open(work, make=True)


def read_payload(given: str | None, *, raw: bool) -> bytes:
    """The bytes that PAYLOAD stands for; JSON is checked and made compact, its numbers left as written."""
    if given is None:
        return b"" if raw else b"null"
    if given == "-":
        data = sys.stdin.buffer.read()
    elif given.startswith("@"):
        try:
            data = Path(given[1:]).read_bytes()
        except (OSError, ValueError) as error:
            raise BadInput("payload", given, f"@ and the path of a readable file ({error})") from None
    else:
        data = given.encode(errors="surrogateescape")
    if raw:
        return data
    try:
        msgspec.json.decode(data)
        return msgspec.json.format(data, indent=-1)
    except (ValueError, RecursionError) as error:
        raise BadPayload("payload", data[:60].decode(errors="replace"), f"{_PAYLOAD_ACCEPTED} ({error})") from None


def _schedule_many(context: Context, path: str, topic: str | None, first: int, alone: dict[str, object]) -> Exit:
    for option, value in alone.items():
        if value is not None:
            raise BadInput(option, value, "nothing beside --many: each line says it for itself")
    from bide.cli.bulk import schedule_lines  # with progress bars, which a single schedule can do without

    return schedule_lines(context, path, topic, first)
