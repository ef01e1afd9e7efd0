"""The output of commands: tasks, times and answers in words, JSON, a progress bar, and streams that nothing fails.

Tasks and events as tables for a person: relative times first, the local time beside them.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any, TextIO

import click
import msgspec
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bide.app import Bide
from bide.core import names
from bide.core.answers import Answer
from bide.core.errors import BideError
from bide.core.events import Event, EventKind
from bide.core.instants import Millis, as_datetime, instant_text, rough_text
from bide.core.names import error_parts
from bide.core.options import decode_options
from bide.core.records import Count, Pause, Record, Result, State, Topic
from bide.insight.task_history import Attempt
from bide.service.schemas import one_line

WORDS: dict[Result, str] = {
    Result.CREATED: "created",
    Result.REPLACED: "replaced what was there",
    Result.KEPT: "kept what was there",
    Result.REFUSED: "refused",
    Result.MOVED: "moved",
    Result.UNDER_WAY: "under way: nothing changed",
    Result.CANCELLED: "cancelled",
    Result.CANCELLED_WHILE_LEASED: "cancelled while it was being delivered: no retry follows",
    Result.REDRIVEN: "redriven",
    Result.NOT_FOUND: "not found: never there, or finished and forgotten",
    Result.FINISHED: "finished already",
    Result.STALE_TOKEN: "stale token: it has changed since you looked, so nothing was done",
}


def current_millis() -> Millis:
    return time.time_ns() // 1_000_000


def length_words(millis: Millis) -> str:
    """A length for a person: "250ms", "4.2s", "14m 3s"."""
    millis = abs(millis)
    return f"{millis}ms" if millis < 1_000 else rough_text(millis)


def relative_words(at: Millis, now: Millis) -> str:
    """ "in 14m 3s", "3s ago", "now"."""
    if abs(at - now) < 50:
        return "now"
    return f"in {length_words(at - now)}" if at > now else f"{length_words(now - at)} ago"


def local_words(at: Millis) -> str:
    """The local date and time, with its zone."""
    return _local(at).strftime("%Y-%m-%d %H:%M:%S %Z")


def moment_words(at: Millis, now: Millis) -> str:
    """Both: "in 14m 3s (2030-01-31 08:00:00 CET)"."""
    return f"{relative_words(at, now)} ({local_words(at)})"


def state_words(record: Record, now: Millis) -> str:
    """The state; of what waits, whether it is due; of what is leased, whether its holder is lost."""
    if record.state is State.WAITING and record.wake_at <= now:
        return "due"
    if record.state is State.LEASED and record.wake_at <= now:
        return "leased, lost"
    return record.state.value


def answer_words(answer: Answer, topic: str, key: str, *, paused: Container[Topic] = ()) -> str:
    """One line: what happened, to which task, and when it is due now; of a topic that is `paused`, that it waits."""
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
        line += f", due {moment_words(record.wake_at, now)}"
    elif record.state is State.LEASED:
        line += f", being delivered by {record.holder}"
    if answer.was is not None and answer.was != record.wake_at:
        line += f"; before: {moment_words(answer.was, now)}"
    if record.topic in paused and record.state.live:
        line += f"; the topic is paused, so it waits for: bide resume {record.topic}"
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
    """A pause as JSON."""
    return {"topic": pause.topic, "since": instant_text(pause.since), "who": pause.who}


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


def printable(text: str) -> str:
    """`text` without what a terminal would obey: a payload or an error may hold anything."""
    return "\n".join(map(names.printable, text.split("\n")))


def _local(at: Millis) -> datetime:
    moment = as_datetime(at)
    try:
        return moment.astimezone()
    except (OverflowError, OSError, ValueError):  # year 9999 east of Greenwich
        return moment


def pretty_payload(payload: bytes) -> str | None:
    """The payload as indented JSON; None when it is not JSON."""
    try:
        msgspec.json.decode(payload)
        return msgspec.json.format(payload, indent=2).decode()
    except (ValueError, RecursionError):
        return None


def print_json(shape: object, echo: Callable[[str], None] = click.echo) -> None:
    """One line of JSON; in ASCII where the stream cannot take every letter."""
    text = one_line(shape).decode()
    if not sys.stdout.encoding.lower().startswith("utf"):
        text = re.sub(r"[^\x00-\x7f]", lambda letter: json.dumps(letter[0])[1:-1], text)  # only texts have any
    echo(text)


@contextmanager
def progress_bar(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A function to be told how much more is done. `total` None: nobody knows, so the bar only shows life."""
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
    """Standard output or error. What cannot be written is dropped: who changes something goes on to the end."""

    ends = False
    """True if that is an error all the same: to write is all that the command does."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if self.ends:
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            if self.fileno() == 1 and error.errno != errno.EPIPE:
                print(f"bide: the output cannot be written, and is left out: {error}", file=sys.stderr)
            return super().write(data)


def take_streams() -> Output:
    """Replace this process's streams; the standard output."""
    while (free := os.open(os.devnull, os.O_RDWR)) <= 2:  # else a socket or a database would be taken for one
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


STYLES = {
    "waiting": "cyan", "due": "bold yellow", "leased": "green", "leased, lost": "bold red", "done": "dim green",
    "cancelled": "dim", "dead": "bold red",
}  # fmt: skip
_KINDS = {EventKind.RETRY: "yellow", EventKind.DEAD: "bold red", EventKind.LOSS: "red", EventKind.CHANGE: "cyan"}


def console() -> Console:
    """A console that never cuts off what goes into a file or a pipe."""
    return Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=200)


def plain_table(*columns: str, right: Sequence[str] = ()) -> Table:
    """A table without lines but the one under its head; long texts are folded, never cut off."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


_HEADS = ("topic", "key", "group", "state", "when", "local time", "attempt", "last error")
_RARE = frozenset({"group", "last error"})
"""Columns that a table of all there is goes without when they are empty."""


def print_tasks(records: Sequence[Record], widths: Sequence[int] = (), *, whole: bool) -> Sequence[int]:
    """One line per task. A page, unless it is the `whole`, is as wide as the first one, whose widths are returned."""
    now = current_millis()
    rows = [_cells(record, now) for record in records]
    shown = [n for n, head in enumerate(_HEADS) if not whole or head not in _RARE or any(row[n] for row in rows)]
    table = plain_table(*(_HEADS[n] for n in shown), right=("attempt",))
    table.show_edge = whole
    table.show_header = not widths
    widths = widths or [max(len(head), *(row[n].cell_len for row in rows)) for n, head in enumerate(_HEADS)]
    for column, n in zip(table.columns, shown, strict=True):
        column.min_width = None if whole else widths[n]
    for row in rows:
        table.add_row(*(row[n] for n in shown))
    console().print(table)
    return widths


def _cells(record: Record, now: Millis) -> list[Text]:
    state = state_words(record, now)
    at = record.finished_at if record.finished_at is not None else record.wake_at
    return [
        Text(printable(record.topic)), Text(printable(record.key)), Text(printable(record.group or "")),
        Text(state, STYLES.get(state, "")), Text(relative_words(at, now)), Text(local_words(at), "dim"),
        Text(str(record.attempt or "")), Text(_first_line(error_parts(record.error)[0]), "red"),
    ]  # fmt: skip


def print_task(record: Record, last: Attempt | None, why: Sequence[str]) -> None:
    """All of one task, a line per fact: also how its last delivery went, and why it was not on time."""
    now = current_millis()
    state = state_words(record, now)
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")

    def row(name: str, value: object, style: str = "") -> None:
        if value not in (None, ""):
            table.add_row(name, Text(printable(str(value)), style))

    def when(name: str, at: Millis | None) -> None:
        if at is not None:
            row(name, moment_words(at, now))

    row("task", f"{record.topic}/{record.key}", "bold")
    row("state", state, STYLES.get(state, ""))
    row("group", record.group)
    when("asked for", record.due_at)
    if record.state.live:
        when("lease ends" if record.holder else "wakes", record.wake_at)
    row("holder", record.holder)
    when("deadline", record.deadline)
    when("created", record.created_at)
    if last is not None:
        when("began", last.began)
        row("late by", None if last.late is None else length_words(last.late))
        row("took", None if last.took is None else length_words(last.took))
    for reason in why:
        row("why", reason)
    when("finished", record.finished_at)
    when("forgotten", record.keep_until if not record.state.live else None)
    row("deliveries", f"{record.attempt} (failures {record.failures}, leases lost {record.losses})")
    error, trace = error_parts(record.error)
    row("last error", error, "red")
    row("trace", trace.rstrip(), "dim")
    row("id", record.id, "dim")
    row("token", record.token, "dim")
    try:
        options = decode_options(record.options)
        row("retry", options.retry)
        for name, value in options.headers.items():
            row(f"header {name}", value)
    except ValueError as damage:
        row("options", f"damaged: {damage}", "red")
    printer = console()
    printer.print(table)
    pretty = pretty_payload(record.payload)
    if pretty is None:
        shown = record.payload[:200]
        printer.print(Text(f"payload, {len(record.payload):,} bytes that are not JSON:", "bold"))
        printer.print(Text(f"{shown!r}{'…' if len(record.payload) > len(shown) else ''}"))
    else:
        printer.print(Text(f"payload, {len(record.payload):,} bytes of JSON:", "bold"))
        printer.print(Text(printable(pretty)))


def print_events(events: Sequence[Event], *, of_one: bool) -> None:
    """One line per event, the newest first."""
    if not events:
        click.echo("events: nothing out of the ordinary")
        return
    now = current_millis()
    table = plain_table("when", "local time", *([] if of_one else ["task"]), "what", "who", "from", "to")
    for event in events:
        what = event.what if event.kind is EventKind.CHANGE else f"{event.kind.value}: {event.what}"
        cells = [Text(relative_words(event.at, now)), Text(local_words(event.at), "dim")]
        if not of_one:
            cells.append(Text(printable(f"{event.topic}/{event.key}")))
        cells += [
            Text(_first_line(what), _KINDS[event.kind]),
            Text(printable(event.who or "")),
            Text("" if event.was is None else local_words(event.was)),
            Text("" if event.wake_at is None else local_words(event.wake_at)),
        ]
        table.add_row(*cells)
    if of_one:
        console().print(Text("events", "bold"))
    console().print(table)


def _first_line(text: str | None, limit: int = 100) -> str:
    """As much as a table has room for; `show` and --json have the rest."""
    first, _, rest = (text or "").partition("\n")
    return printable(first if len(first) <= limit and not rest else f"{first[:limit]}…")
