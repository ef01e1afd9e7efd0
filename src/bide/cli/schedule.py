"""`bide schedule`: one task from the command line, or many from a file of JSON lines."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import IO, Any

import click
import msgspec

from bide.app import Bide
from bide.cli.context import Context, WholeNumber, if_token_option, takes_context, zone_option
from bide.cli.exits import Exit, PartlyDone
from bide.cli.output import print_json, progress_bar, totals_words
from bide.core.answers import Answer
from bide.core.errors import BadInput, BadPayload, BideError, OutcomeUnknown, PartlyFailed
from bide.core.records import NewTask, OnConflict, Result
from bide.core.retry import PRESETS
from bide.service.schemas import Schedule, answer_shape, payload_of, retries

_PAYLOAD_ACCEPTED = "JSON such as '{\"number\": 42}', @FILE, or - for standard input; with --bytes anything"
_PAGE = 1_000
"""Lines of one transaction: enough for one fsync per thousand, few enough to show progress."""


class _Line(Schedule, forbid_unknown_fields=True):
    """A line of the file, or of `bide ls --json`, which has the time at which the task wakes."""

    topic: str | None = None
    key: str | None = None
    wake_at: str | None = None
    id: object = None
    state: object = None
    due_at: object = None
    attempt: object = None
    token: object = None
    error: object = None
    created_at: object = None
    finished_at: object = None


_FIELDS = ("topic", "key", *Schedule.__struct_fields__)
_decoder = msgspec.json.Decoder(_Line)


@click.command()
@click.argument("topic", required=False)
@click.argument("payload", required=False)
@click.option("--key", help="A name for the task, unique within the topic; a new UUIDv7 by default.")
@click.option("--group", help="Tasks of one group are shifted and cancelled together.")
@click.option("--delay", metavar="LENGTH", help='Duration from now: "15m", "1h30m", "250ms", "2d".')
@click.option("--at", metavar="INSTANT", help='Or an instant: "2030-01-31T08:00:00+01:00", "tomorrow 20:00".')
@zone_option
@click.option(
    "--on-conflict",
    type=click.Choice([choice.value for choice in OnConflict]),
    default="replace",
    show_default=True,
    help="What to do if the key is taken.",
)
@click.option("--retry", type=click.Choice(list(PRESETS)), help="The retry policy.")
@click.option("--deadline", metavar="WHEN", help="Not after this instant, or this duration from now.")
@if_token_option
@click.option("--bytes", "raw", is_flag=True, help="Take the payload as bytes; it need not be JSON.")
@click.option("--many", metavar="FILE", help="JSON lines, one task each; - for standard input. TOPIC is the default.")
@click.option(
    "--from", "first", metavar="LINE", type=WholeNumber(1, 2**63 - 1), help="With --many: begin at this line."
)
@takes_context()
def schedule(
    context: Context, /, topic: str | None, payload: str | None, raw: bool, many: str | None, first: int | None,
    on_conflict: str, **given: Any,
) -> Exit:  # fmt: skip
    """Schedule a task.

    PAYLOAD is JSON, @FILE, or - for standard input. Give one of --delay and --at. Once the command has
    answered, the task survives any crash.

    A line of a --many file is an object: {"topic", "key", "group", "delay" or "at", "payload" or "payload_base64",
    "on_conflict", "retry", "deadline", "headers", "if_token", "zone"}; 1,000 lines make one transaction.
    """
    if many is not None:
        for option, value in {"payload": payload, **{f"--{name}": value for name, value in given.items()}}.items():
            if value is not None:
                raise BadInput(option, value, "no such option with --many: each line has its own")
        return _schedule_lines(context, many, topic, first or 1)
    if first is not None:
        raise BadInput("--from", first, "together with --many only")
    if topic is None:
        raise BadInput("TOPIC", None, "the kind of the task, such as order.close")
    if given["key"] is None and given["if_token"] is not None:
        raise BadInput("--if-token", given["if_token"], "together with --key only: a new key has no token")
    data = read_payload(payload, raw=raw)
    return context.answer(
        topic, given["key"] or "", lambda app: app.schedule(topic, data, on_conflict=on_conflict, **given), make=True
    )


def read_payload(given: str | None, *, raw: bool) -> bytes:
    """The bytes of PAYLOAD; JSON is checked and made compact, with its numbers as written."""
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


def _schedule_lines(context: Context, path: str, topic: str | None, first: int) -> Exit:
    """Schedule the lines of the file at `path` ("-" is standard input) from line `first`, up to the first error."""

    async def work(app: Bide) -> Exit:
        totals: Counter[Result] = Counter()
        all_ok = True
        with _opened(path) as (file, size), progress_bar("scheduling", size) as progress:
            lines = ((number, line) for number, line in enumerate(file, 1) if number >= first and line.strip())
            while page := list(islice(lines, _PAGE)):
                with _with_progress(page[0][0], page[-1][0], totals.total()):
                    answers = await app.schedule_many(_read(app, page, topic))
                for answer in answers:
                    totals[answer.result] += 1
                    all_ok = all_ok and answer.ok
                    if context.json:
                        print_json(answer_shape(answer))
                progress(sum(len(line) for _, line in page))
        if not totals and first > 1:
            raise BadInput("--from", first, f"a line of {path} at or before its last task")
        if not context.json:
            click.echo(f"{totals.total():,} tasks: {totals_words(totals)}" if totals else "no tasks: the file is empty")
        return Exit.DONE if all_ok else Exit.NOT_DONE

    # Not noted in the event log, which is capped: a large file would push everything else out of it.
    return context.open(work, noted=False, make=True)


@contextmanager
def _with_progress(first: int, last: int, before: int) -> Iterator[None]:
    """Raises PartlyDone if it fails after some lines are, or may be, done: with the lines that are done for certain."""
    try:
        yield
    except (BideError, asyncio.CancelledError) as error:
        done = f"{before:,} tasks of earlier lines are scheduled" if before else "Nothing is scheduled for certain"
        again = f"with keys, --from {first} repeats them without harm"
        if isinstance(error, PartlyFailed):
            some = sum(isinstance(answer, Answer) for answer in error.answers)
            how = f"{done}, and {some:,} of lines {first} to {last}; {again}"
        elif isinstance(error, OutcomeUnknown | asyncio.CancelledError):
            how = f"{done}; those of lines {first} to {last} may be; {again}"
        else:
            how = f"{done}, and none from line {first} on: go on with --from {first}"
        if isinstance(error, asyncio.CancelledError):
            click.echo(f"bide: {how}", err=True)
        elif before or isinstance(error, PartlyFailed | OutcomeUnknown):
            raise PartlyDone(f"{error}. {how}") from error
        raise


def _read(app: Bide, page: list[tuple[int, bytes]], topic: str | None) -> list[NewTask]:
    tasks = []
    for number, text in page:
        try:
            tasks.append(_task(app, _decoder.decode(text), topic))
        except BadInput as error:
            raise BadInput(f"line {number}, {error.field}", error.value, error.accepted) from None
        except (ValueError, RecursionError) as error:
            shown = text.decode(errors="replace").strip()
            accepted = f"a JSON object with the fields {', '.join(_FIELDS)} ({error})"
            raise BadInput(f"line {number}", shown, accepted) from None
    return tasks


def _task(app: Bide, line: _Line, topic: str | None) -> NewTask:
    name = line.topic or topic
    if name is None:
        raise BadInput("topic", None, "a topic in the line, or TOPIC on the command line")
    at = line.wake_at if line.at is None and line.delay is None else line.at
    return app.new(
        name, payload_of(line), key=line.key, group=line.group, delay=line.delay, at=at, on_conflict=line.on_conflict,
        retry=retries(line.retry), deadline=line.deadline, headers=line.headers, if_token=line.if_token, zone=line.zone,
    )  # fmt: skip


@contextmanager
def _opened(path: str) -> Iterator[tuple[IO[bytes], int | None]]:
    """The file and its size in bytes; None for a pipe."""
    if path == "-":
        yield sys.stdin.buffer, None
        return
    with ExitStack() as stack:
        try:
            file = stack.enter_context(Path(path).open("rb"))
        except (OSError, ValueError) as error:
            raise BadInput("--many", path, f"the path of a readable file, or - for standard input ({error})") from None
        yield file, Path(path).stat().st_size or None
