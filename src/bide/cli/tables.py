"""Tasks and events as tables: relative times first, then local times. Imports rich, so import it lazily."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click
import msgspec
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bide.cli.output import current_millis, length_words, local_words, moment_words, printable, relative_words
from bide.core.events import Event, EventKind
from bide.core.instants import Millis
from bide.core.names import error_parts
from bide.core.options import decode_options, recurrence_of
from bide.core.records import Record, State
from bide.insight.task_history import Attempt

STYLES = {
    "waiting": "cyan", "due": "bold yellow", "leased": "green", "leased, lost": "bold red", "done": "dim green",
    "cancelled": "dim", "dead": "bold red",
}  # fmt: skip
_KINDS = {
    EventKind.RETRY: "yellow", EventKind.DEAD: "bold red", EventKind.LOSS: "red", EventKind.DROPPED: "yellow",
    EventKind.CHANGE: "cyan",
}  # fmt: skip


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raise the error that is being handled, in place of rich's exit with 1: a command ends as with --json."""
        raise


def console() -> Console:
    """A console that never cuts off lines in a file or a pipe."""
    return _Console(highlight=False) if sys.stdout.isatty() else _Console(highlight=False, width=200)


def plain_table(*columns: str, right: Sequence[str] = ()) -> Table:
    """A table with a line under its head only; long texts are folded, never cut off."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def cells(*given: str | tuple[str, str]) -> list[Text]:
    """The cells of a row: texts, or pairs of a text and a style; without control characters."""
    return [Text(printable(one)) if isinstance(one, str) else Text(printable(one[0]), one[1]) for one in given]


_HEADS = ("topic", "key", "group", "state", "when", "local time", "attempt", "last error")
_RARE = frozenset({"group", "last error"})
"""Columns that the table of a whole list omits if they are empty."""
_SHORT = ("state", "when", "local time", "attempt")
"""Columns that are not folded, unless the terminal is much narrower than usual."""


def print_tasks(records: Sequence[Record], widths: Sequence[int] = (), *, whole: bool) -> Sequence[int]:
    """Print one line per task. Pages of a longer list are as wide as the first one, whose widths are returned."""
    now = current_millis()
    rows = [_cells(record, now) for record in records]
    shown = [n for n, head in enumerate(_HEADS) if not whole or head not in _RARE or any(row[n] for row in rows)]
    table = plain_table(*(_HEADS[n] for n in shown), right=("attempt",))
    table.show_edge = whole
    table.show_header = not widths
    widths = widths or [max(len(head), *(row[n].cell_len for row in rows)) for n, head in enumerate(_HEADS)]
    for column, n in zip(table.columns, shown, strict=True):
        column.min_width = None if whole else widths[n]
    printer = console()
    if 72 <= printer.width < sum(widths[n] + 3 for n in shown):
        for column in table.columns:
            column.no_wrap = column.header in _SHORT
        for row in rows:
            time = row[_HEADS.index("local time")]
            time.plain = time.plain.replace(" ", "\n", 1)
    for row in rows:
        table.add_row(*(row[n] for n in shown))
    printer.print(table)
    return widths


def _state_words(record: Record, now: Millis) -> str:
    """The state; "due" for a waiting task that is due, "leased, lost" for an expired lease."""
    if not record.state.live or record.wake_at > now:
        return record.state.value
    return "due" if record.state is State.WAITING else "leased, lost"


def _cells(record: Record, now: Millis) -> list[Text]:
    state = _state_words(record, now)
    at = record.finished_at if record.finished_at is not None else record.wake_at
    return cells(
        record.topic, record.key, record.group or "", (state, STYLES.get(state, "")), relative_words(at, now),
        (local_words(at), "dim"), str(record.attempt or ""), (_first_line(error_parts(record.error)[0]), "red"),
    )  # fmt: skip


def print_task(record: Record, last: Attempt | None, why: Sequence[str]) -> None:
    """Print one task, a line per fact, with its last delivery and the reasons why it was late."""
    now = current_millis()
    state = _state_words(record, now)
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
    if (recurrence := recurrence_of(record.options)) is not None:
        row("recurs", recurrence.rule.words + ("; paused" if recurrence.paused else ""))
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
    kind, shown = _payload(record.payload)
    printer.print(Text(f"payload, {len(record.payload):,} bytes {kind}:", "bold"))
    printer.print(Text(shown))


def _payload(payload: bytes) -> tuple[str, str]:
    """Its kind, and the payload itself: JSON indented, of anything else the first 200 bytes."""
    try:
        msgspec.json.decode(payload)
        return "of JSON", printable(msgspec.json.format(payload, indent=2).decode())
    except (ValueError, RecursionError):
        return "that are not JSON", f"{payload[:200]!r}{'…' if len(payload) > 200 else ''}"


def print_events(events: Sequence[Event], *, of_one: bool) -> None:
    """Print one line per event, the newest first."""
    if not events:
        click.echo("events: nothing unusual")
        return
    now = current_millis()
    table = plain_table("when", "local time", *([] if of_one else ["task"]), "what", "who", "from", "to")
    for event in events:
        what = event.what if event.kind is EventKind.CHANGE else f"{event.kind.value}: {event.what}"
        at, was, wake = ("" if at is None else local_words(at) for at in (event.at, event.was, event.wake_at))
        task = [] if of_one else [f"{event.topic}/{event.key}"]
        kind = (_first_line(what), _KINDS[event.kind])
        table.add_row(*cells(relative_words(event.at, now), (at, "dim"), *task, kind, event.who or "", was, wake))
    if of_one:
        console().print(Text("events", "bold"))
    console().print(table)


def _first_line(text: str | None, limit: int = 100) -> str:
    """The first line, as much as fits into a table; `show` and --json have the rest."""
    first, _, rest = (text or "").partition("\n")
    return printable(first if len(first) <= limit and not rest else f"{first[:limit]}…")
