"""The output of commands in words and JSON, a progress bar, and standard streams whose failure fails no command."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TextIO

import click

from bide.app import Bide
from bide.core import names
from bide.core.answers import Answer
from bide.core.errors import BideError
from bide.core.instants import LAST_INSTANT, Millis, as_datetime, instant_text, rough_text
from bide.core.options import recurrence_of
from bide.core.records import Count, Pause, Result, State, Topic
from bide.service.schemas import one_line

WORDS: dict[Result, str] = {
    Result.CREATED: "created",
    Result.REPLACED: "replaced the existing task",
    Result.KEPT: "kept the existing task",
    Result.REFUSED: "refused",
    Result.MOVED: "moved",
    Result.UNDER_WAY: "under way: nothing changed",
    Result.CANCELLED: "cancelled",
    Result.CANCELLED_WHILE_LEASED: "cancelled while it was being delivered: no retry follows",
    Result.REDRIVEN: "redriven",
    Result.NOT_FOUND: "not found: it never existed, or finished and was forgotten",
    Result.FINISHED: "already finished",
    Result.STALE_TOKEN: "stale token: it has changed since you read it, so nothing was done",
}


def current_millis() -> Millis:
    return time.time_ns() // 1_000_000


def length_words(millis: Millis) -> str:
    """A duration in words: "250ms", "4.2s", "14m 3s"."""
    millis = abs(millis)
    return f"{millis}ms" if millis < 1_000 else rough_text(millis)


def relative_words(at: Millis, now: Millis) -> str:
    """ "in 14m 3s", "3s ago", "now"; "never" for a recurring task that is paused."""
    if at == LAST_INSTANT:
        return "never"
    if abs(at - now) < 50:
        return "now"
    return f"in {length_words(at - now)}" if at > now else f"{length_words(now - at)} ago"


def local_words(at: Millis) -> str:
    """The local date and time, with its zone; or "never", as `relative_words`."""
    if at == LAST_INSTANT:
        return "never"
    moment = as_datetime(at)
    with suppress(OverflowError, OSError, ValueError):  # year 9999 east of Greenwich
        moment = moment.astimezone()
    return moment.strftime("%Y-%m-%d %H:%M:%S %Z")


def moment_words(at: Millis, now: Millis) -> str:
    """Both: "in 14m 3s (2030-01-31 08:00:00 CET)"."""
    return "never" if at == LAST_INSTANT else f"{relative_words(at, now)} ({local_words(at)})"


def answer_words(answer: Answer, topic: str, key: str, *, paused: Container[Topic] = ()) -> str:
    """One line: the answer, the task, and when it is due now; and that it waits, if its topic is `paused`."""
    words, record, now = WORDS[answer.result], answer.record, current_millis()
    if record is None:
        return f"{topic}/{key}: {words}"
    line = f"{record.topic}/{record.key}: {words}"
    if answer.result is Result.FINISHED:
        return f"{line}, {record.state.value}" + (
            "" if record.finished_at is None else f" {relative_words(record.finished_at, now)}"
        )
    if answer.result is Result.REFUSED and record.deadline is not None:
        line += f", its deadline is {moment_words(record.deadline, now)}"
    if answer.past is not None and answer.past >= timedelta(seconds=1):
        line += f", due {moment_words(record.due_at, now)}, so now"
    elif record.state is State.WAITING:
        # one that is moved during its pause runs at that time
        recurrence = recurrence_of(record.options) if record.wake_at == LAST_INSTANT else None
        line += ", paused" if recurrence and recurrence.paused else f", due {moment_words(record.wake_at, now)}"
    elif record.state is State.LEASED:
        line += f", being delivered by {record.holder}"
    if answer.was is not None and answer.was != record.wake_at:
        line += f"; before: {moment_words(answer.was, now)}"
    if record.topic in paused and record.state.live:
        line += f"; the topic is paused: it waits for bide resume {record.topic}"
    return line


def totals_words(totals: Counter[Result]) -> str:
    """ "3 moved, 1 under_way"."""
    return ", ".join(f"{count:,} {result.value}" for result, count in totals.most_common())


def count_words(count: Count) -> str:
    """ "12", or "10,000+" where counting stopped."""
    return f"{count.number:,}{'' if count.exact else '+'}"


def paused_words(pause: Pause) -> str:
    """ "paused 3m ago (2030-01-31 08:00:00 CET) by anna@shop"."""
    by = "" if pause.who is None else f" by {printable(pause.who)}"
    return f"paused {moment_words(pause.since, current_millis())}{by}"


def pause_shape(pause: Pause) -> dict[str, Any]:
    return {"topic": pause.topic, "since": instant_text(pause.since), "who": pause.who}


async def pauses_about(app: Bide, answers: Iterable[Answer]) -> Mapping[Topic, Pause]:
    """The pauses, if any of these tasks is live, and so may have to wait for a resume. One call, or none.

    The verb itself is done, so an error (of a service of an older version) only leaves the pauses out.
    """
    if not any(answer.record is not None and answer.record.state.live for answer in answers):
        return {}
    try:
        return await app.paused()
    except BideError as error:
        click.echo(f"bide: note: the pauses cannot be read: {' '.join(str(error).split())}", err=True)
        return {}


def printable(text: str) -> str:
    """`text` without control characters: a payload or an error may hold anything."""
    return "\n".join(map(names.printable, text.split("\n")))


def print_json(shape: object) -> None:
    """Print one line of JSON; in ASCII if the stream cannot encode every character."""
    text = one_line(shape).decode()
    if not sys.stdout.encoding.lower().startswith("utf"):
        text = re.sub(r"[^\x00-\x7f]", lambda letter: json.dumps(letter[0])[1:-1], text)  # only strings contain any
    click.echo(text)


@contextmanager
def progress_bar(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Return a function to call with each amount done. `total` None: unknown, so the bar only shows activity."""
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task(what, total=total)
        yield lambda done: progress.advance(bar, done)


class Output(io.FileIO):
    """Standard output or error. If it cannot be written, output is dropped, so that a command still does its work."""

    ends = False
    """True if BrokenPipeError is raised as well: the command does nothing but write."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            if self.fileno() == 1 and error.errno != errno.EPIPE:
                print(f"bide: the output cannot be written and is dropped: {error}", file=sys.stderr)
            if self.ends:
                raise BrokenPipeError(errno.EPIPE, "nobody reads the output") from error
            return super().write(data)


def take_streams() -> Output:
    """Replace this process's standard streams, and return the standard output."""
    while (free := os.open(os.devnull, os.O_RDWR)) <= 2:  # else a socket or a database would get one of these numbers
        os.set_inheritable(free, True)
    os.close(free)
    sys.stdin = sys.stdin or os.fdopen(0)
    sys.stderr, _ = _stream(2, sys.stderr)
    sys.stdout, output = _stream(1, sys.stdout)
    return output


def _stream(number: int, before: TextIO | None) -> tuple[TextIO, Output]:
    raw = Output(number, "wb", closefd=False)
    text = io.TextIOWrapper(
        io.BufferedWriter(raw), before.encoding if before else None, "backslashreplace",
        line_buffering=number == 2 or raw.isatty(),
    )  # fmt: skip
    return text, raw
