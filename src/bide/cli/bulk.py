"""Scheduling from a file of JSON lines: a transaction per thousand, with a bar for whoever watches."""

from __future__ import annotations

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
from bide.cli.exits import Exit
from bide.cli.printing import print_json
from bide.cli.progress import progress_bar
from bide.cli.surroundings import Surroundings
from bide.core.errors import BadInput
from bide.core.records import NewTask, Result
from bide.service.shapes import answer_shape

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


_decoder = msgspec.json.Decoder(Line)


def schedule_lines(surroundings: Surroundings, path: str, topic: str | None) -> Exit:
    """Schedule every line of the file at `path` ("-" is standard input). Stops at the first that is not acceptable."""

    async def work(app: Bide) -> Exit:
        totals: Counter[Result] = Counter()
        all_ok = True
        with _opened(path) as (file, size), progress_bar("scheduling", size) as progress:
            lines = ((number, line) for number, line in enumerate(file, 1) if line.strip())
            for page in _pages(lines):
                tasks = _read(app, page, topic, totals.total())
                for answer in await app.schedule_many(tasks):
                    totals[answer.result] += 1
                    all_ok = all_ok and answer.ok
                    if surroundings.json:
                        print_json(answer_shape(answer))
                progress(sum(len(line) for _, line in page))
        if not surroundings.json:
            words = ", ".join(f"{count:,} {result.value}" for result, count in totals.most_common())
            click.echo(f"{totals.total():,} tasks: {words}" if totals else "no tasks: the file has no lines")
        return Exit.DONE if all_ok else Exit.NOT_DONE

    # Not noted line by line: the event log is capped, and a large file would push everything else out of it.
    return surroundings.open(work, noted=False)


def _read(app: Bide, page: list[tuple[int, bytes]], topic: str | None, before: int) -> list[NewTask]:
    tasks = []
    for number, text in page:
        try:
            tasks.append(_task(app, _decoder.decode(text), topic))
        except BadInput as error:
            raise BadInput(
                f"line {number}, {error.field}", error.value, f"{error.accepted}. {_so_far(before)}"
            ) from None
        except (ValueError, RecursionError) as error:
            shown = text.decode(errors="replace").strip()
            accepted = f"a JSON object with the fields {', '.join(Line.__struct_fields__)} ({error}). {_so_far(before)}"
            raise BadInput(f"line {number}", shown, accepted) from None
    return tasks


def _task(app: Bide, line: Line, topic: str | None) -> NewTask:
    name = line.topic or topic
    if name is None:
        raise BadInput("topic", None, "a topic in the line, or TOPIC on the command line for all of them")
    given: Any = bytes(line.payload) or b"null"
    if line.payload_base64 is not None:
        if bytes(line.payload):
            raise BadInput("payload, payload_base64", "both", "one of the two")
        given = line.payload_base64
    return app.new(
        name, given, key=line.key, group=line.group, delay=line.delay, at=line.at, on_conflict=line.on_conflict,
        retry=line.retry, deadline=line.deadline, headers=line.headers,
    )  # fmt: skip


def _so_far(before: int) -> str:
    return f"{before:,} tasks from the lines before are scheduled" if before else "Nothing was scheduled"


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
