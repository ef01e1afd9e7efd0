"""Scheduling from a file of JSON lines: a transaction per thousand, with a bar for whoever watches."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import click
import msgspec

from bide.app import Bide
from bide.cli.context import Context
from bide.cli.exits import Exit, PartlyDone
from bide.cli.output import print_json, progress_bar
from bide.core.answers import Answer
from bide.core.errors import BadInput, BideError, OutcomeUnknown, PartlyFailed
from bide.core.records import NewTask, Result
from bide.service.schemas import answer_shape

PAGE = 1_000
"""Lines of one transaction: large enough to cost one fsync per thousand, small enough to show progress."""


class Line(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A task as a line of the file says it."""

    topic: str | None = None
    key: str | None = None
    group: str | None = None
    delay: str | None = None
    at: str | None = None
    payload: msgspec.Raw = msgspec.Raw(b"")
    payload_base64: bytes | None = None
    on_conflict: str = "replace"
    retry: str | None = None
    deadline: str | None = None
    headers: dict[str, str] | None = None


class Listed(Line, forbid_unknown_fields=True):
    """Or as `bide ls --json` prints it, with the time at which it wakes."""

    wake_at: str | None = None
    id: object = None
    state: object = None
    due_at: object = None
    attempt: object = None
    token: object = None
    error: object = None
    created_at: object = None
    finished_at: object = None


_decoder = msgspec.json.Decoder(Listed)


def schedule_lines(context: Context, path: str, topic: str | None, first: int) -> Exit:
    """Schedule every line of the file at `path` ("-" is standard input) from the line `first` on, as far as it goes."""

    async def work(app: Bide) -> Exit:
        totals: Counter[Result] = Counter()
        all_ok = True
        with _opened(path) as (file, size), progress_bar("scheduling", size) as progress:
            lines = ((number, line) for number, line in enumerate(file, 1) if number >= first and line.strip())
            for page in _pages(lines):
                with _said_how_far(page[0][0], page[-1][0], totals.total()):
                    answers = await app.schedule_many(_read(app, page, topic))
                for answer in answers:
                    totals[answer.result] += 1
                    all_ok = all_ok and answer.ok
                    if context.json:
                        print_json(answer_shape(answer))
                progress(sum(len(line) for _, line in page))
        if not context.json:
            words = ", ".join(f"{count:,} {result.value}" for result, count in totals.most_common())
            click.echo(f"{totals.total():,} tasks: {words}" if totals else "no tasks: the file has no lines")
        return Exit.DONE if all_ok else Exit.NOT_DONE

    # Not noted line by line: the event log is capped, and a large file would push everything else out of it.
    return context.open(work, noted=False, make=True)


@contextmanager
def _said_how_far(first: int, last: int, before: int) -> Iterator[None]:
    """Raises PartlyDone with the lines that are done for certain, where some are, or may be, and the rest failed."""
    try:
        yield
    except (BideError, asyncio.CancelledError) as error:
        done = f"{before:,} tasks from the lines before are scheduled" if before else "Nothing is scheduled for certain"
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
            accepted = f"a JSON object with the fields {', '.join(Line.__struct_fields__)} ({error})"
            raise BadInput(f"line {number}", shown, accepted) from None
    return tasks


def _task(app: Bide, line: Listed, topic: str | None) -> NewTask:
    name = line.topic or topic
    if name is None:
        raise BadInput("topic", None, "a topic in the line, or TOPIC on the command line for all of them")
    given: Any = bytes(line.payload) or b"null"
    if line.payload_base64 is not None:
        if bytes(line.payload):
            raise BadInput("payload, payload_base64", "both", "one of the two")
        given = line.payload_base64
    at = line.wake_at if line.at is None and line.delay is None else line.at
    return app.new(
        name, given, key=line.key, group=line.group, delay=line.delay, at=at, on_conflict=line.on_conflict,
        retry=line.retry, deadline=line.deadline, headers=line.headers,
    )  # fmt: skip


def _pages(lines: Iterable[tuple[int, bytes]]) -> Iterator[list[tuple[int, bytes]]]:
    rest = iter(lines)
    while page := list(itertools.islice(rest, PAGE)):
        yield page


@contextmanager
def _opened(path: str) -> Iterator[tuple[IO[bytes], int | None]]:
    """The file and its size in bytes; None for a pipe, whose size nobody knows."""
    if path == "-":
        yield sys.stdin.buffer, None
        return
    with ExitStack() as stack:
        try:
            file = stack.enter_context(Path(path).open("rb"))
        except (OSError, ValueError) as error:
            raise BadInput("--many", path, f"the path of a readable file, or - for standard input ({error})") from None
        yield file, Path(path).stat().st_size or None
