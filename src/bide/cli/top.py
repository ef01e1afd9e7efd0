"""`bide top`: the overview of a store in a terminal, kept fresh until Ctrl-C."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias

import click
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.live import Live
from rich.segment import Segment, SegmentLines
from rich.style import Style
from rich.table import Table
from rich.text import Text

from bide.app import Bide
from bide.cli.context import Context, takes_context
from bide.cli.exits import Exit
from bide.cli.output import count_words, length_words, local_words, print_json, printable
from bide.cli.tables import STYLES, console
from bide.core.errors import BadInput, StoreError
from bide.core.instants import Millis, duration, duration_text, instant_text
from bide.core.records import Count
from bide.insight.minute_log import Flow
from bide.insight.overview import Figure, Holder, Overview, Overviews, TopicSeen
from bide.service.schemas import paused_shape

if TYPE_CHECKING:
    from bide.service.health import Check

_LEAST, _MOST = 200, 3_600_000
_BLOCKS = " ▁▂▃▄▅▆▇█"
_GRADES = ((100, "green"), (1_000, "yellow"))
_LEVELS = {"ok": ("●", "green"), "warning": ("▲", "yellow"), "failed": ("■", "bold red")}
_TOPICS = 5
_MOST_ROWS = 53
"""Most rows of a table without a window."""
_NUMBER = 9
"""Width of a column of numbers, with the space after it."""
_NAMES = {"topic", "worker", "works on"}
_Lines: TypeAlias = list[list[Segment]]
_OLD: Millis = 3_000
"""Age in milliseconds from which a count shows it."""


@click.command()
@click.option("--once", is_flag=True, help="Print it once and end; the default if standard output is not a terminal.")
@click.option("--every", metavar="LENGTH", default="2s", show_default=True, help="How often to refresh.")
@takes_context()
def top(context: Context, once: bool, every: str) -> Exit:
    """Show an overview: pending, due and dead tasks, their lateness, and the workers.

    It stays on the screen until Ctrl-C. --json prints one object and ends.
    """
    step = duration(every, field="--every")
    if not _LEAST <= step <= _MOST:
        raise BadInput("--every", every, f"a length from {duration_text(_LEAST)} to {duration_text(_MOST)}")
    screen = Screen(context.shown_store)

    async def work(app: Bide) -> Exit:
        overviews = Overviews(app)
        try:
            if context.json:
                print_json(_shape(*await _look(app, overviews), context.shown_store))
            elif once or not sys.stdout.isatty():
                printer = console()
                printer.print(screen.draw(*await _look(app, overviews), printer.width, None))
            else:
                await screen.watch(app, overviews, step / 1000)
        finally:
            await overviews.close()
        return Exit.DONE

    try:
        return context.open(work)
    except (KeyboardInterrupt, asyncio.CancelledError):
        screen.last()
        return Exit.DONE


async def _look(app: Bide, overviews: Overviews) -> tuple[Overview, Sequence[Check]]:
    """Read the overview and the checks of health. Raises StoreError."""
    from bide.service.health import ready

    overview = (await overviews.get()).overview()
    return overview, (await ready(app)).checks


class Screen:
    """Draws the overview, for a window of any size."""

    def __init__(self, store: str) -> None:
        self._store = store
        self._drawn: tuple[Overview, Sequence[Check]] | None = None

    async def watch(self, app: Bide, overviews: Overviews, every: float) -> None:
        """Refresh the overview on the alternate screen until cancelled; wait while the store is unavailable."""
        running = asyncio.current_task()
        assert running is not None
        with suppress(NotImplementedError):
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
        logging.getLogger("bide").addHandler(logging.NullHandler())  # errors are shown here
        printer = console()
        with Live(console=printer, screen=True, auto_refresh=False, redirect_stderr=False) as live:
            while True:
                failed = ""
                try:
                    self._drawn = await _look(app, overviews)
                except StoreError as error:
                    failed = f"the store is unavailable: {error}"
                if self._drawn is not None or failed:
                    width, height = printer.size
                    live.update(self._drawing(width, height, failed), refresh=True)
                await asyncio.sleep(every)

    def last(self) -> None:
        """Print the last overview, to stay on the screen."""
        if self._drawn is not None:
            printer = console()
            printer.print(self._drawing(*printer.size, ""))

    def _drawing(self, width: int, height: int, failed: str) -> RenderableType:
        if self._drawn is None:
            return Text.assemble(("bide top", "bold"), (f"  {failed}", "bold red"))
        return self.draw(*self._drawn, width, height, failed)

    def draw(
        self, seen: Overview, checks: Sequence[Check], width: int, height: int | None, failed: str = ""
    ) -> RenderableType:
        """Lines no longer than `width`, and no more than `height` of them (one is left for the cursor)."""
        printer = console()
        options = printer.options.update(width=width, height=None, no_wrap=True, overflow="ellipsis")

        def lines_of(*parts: RenderableType) -> _Lines:
            return printer.render_lines(Group(*parts), options, pad=False)

        note = (failed, "bold red") if failed else (self._store, "dim")
        above = lines_of(
            _head(seen, note, width), "", _figures(seen, width), "", *_warnings(seen), _health(checks),
            *([_hour(seen.by_minute, width)] if any(seen.by_minute) else []),
        )  # fmt: skip
        heads = ("topic", "due", "pending", "leased", "dead", "workers")
        topics = lines_of("", _table(heads, [*map(_topic, seen.topics)], width)) if seen.topics else []
        workers = lines_of("", _table(("worker", "holds", "lost", "works on"), [*map(_holder, seen.holders)], width))
        if not seen.holders:
            absent = lines_of("", Text("no worker is alive: due tasks wait", "yellow"))
            workers = absent if seen.holders_known else []
        room = None if height is None else max(height - 1 - len(above), 0)
        lines = [*above, *_fitted(topics, workers, room)]
        return SegmentLines(lines if height is None else lines[: height - 1], new_lines=True)


def _head(seen: Overview, note: tuple[str, str], width: int) -> Text:
    left = Text.assemble(("bide top", "bold"), (f"  {printable(note[0])}", note[1]))
    left.truncate(width, overflow="ellipsis")
    right = local_words(seen.at)
    gap = width - left.cell_len - len(right)
    return left if gap < 2 else Text.assemble(left, " " * gap, (right, "dim"))


def _figures(seen: Overview, width: int) -> Columns:
    """The figures: names, numbers and remarks, in columns of one width."""
    flow, oldest, age = seen.minute, seen.oldest_due, seen.at - seen.pending.at
    p50, p99 = (None, None) if flow is None else (flow.deliveries.lateness(0.5), flow.deliveries.lateness(0.99))
    cells: list[tuple[str, str, str, str]] = [
        ("pending", count_words(seen.pending.count), "bold cyan", f"{length_words(age)} ago" if age >= _OLD else ""),
        (
            "due now", *_counted(seen.due.count, "due"),
            "" if oldest is None else f"≤{length_words(max(seen.at - oldest[1], 0))}",
        ),
        ("leased", *_counted(seen.leased, "leased"), ""),
        ("dead", *_counted(seen.dead, "dead"), ""),
        (
            "late p99", "–" if p99 is None else length_words(p99), _grade(p99),
            "" if p50 is None else f"p50 {length_words(p50)}",
        ),
        ("in/s", "–" if flow is None or flow.scheduled is None else _rate(flow, flow.scheduled), "",
         "" if flow is None else f"in {length_words(flow.span)}"),
        ("done/s", "–" if flow is None else _rate(flow, flow.deliveries.done), "", ""),
        (
            "failed/s", "–" if flow is None else _rate(flow, flow.failed),
            "red" if flow is not None and flow.failed else "dim", "",
        ),
    ]  # fmt: skip
    texts = [
        Text.assemble((name, "dim"), "\n", (number, style), "\n", (remark, "dim"))
        for name, number, style, remark in cells
    ]
    each = min(16, width // max(1, min(len(cells), width // 10)))
    return Columns(texts, width=each - 1, padding=(0, 1, 0, 0))


def _warnings(seen: Overview) -> Iterator[Text]:
    if seen.minute is None:
        yield Text("the last minute and hour are not shown: the token may not read every topic", "yellow")
    if seen.held_back:
        yield Text.assemble(("paused, with tasks due: ", "bold yellow"), (_names(seen.held_back), "yellow"))
    if seen.unworked:
        yield Text.assemble(("no worker for: ", "bold red"), (_names(seen.unworked), "red"))
    if seen.empty:
        yield Text("there are no tasks: bide schedule TOPIC PAYLOAD --delay 1m", "dim")


def _names(topics: Sequence[TopicSeen]) -> str:
    return ", ".join(f"{printable(one.topic)} {count_words(one.due.count)}" for one in topics[:10])


def _health(checks: Sequence[Check]) -> Text:
    line = Text()
    for check in checks:
        mark, style = _LEVELS[check.level.value]
        line.append(f"{mark} ", style).append(f"{check.name} ", "bold").append(f"{check.what}   ", "dim")
    return line


def _hour(begun: Sequence[int], width: int) -> Text:
    """The deliveries in each of the last minutes, as many as fit."""
    head, most = "deliveries, last hour ", max(begun)
    shown = begun[-max(1, min(len(begun), width - len(head) - 24)) :]
    picture = "".join(_BLOCKS[-(-number * (len(_BLOCKS) - 1) // most)] for number in shown)
    return Text.assemble((head, "dim"), (picture, "cyan"), (f" at most {most:,} a minute", "dim"))


def _topic(one: TopicSeen) -> list[Text]:
    name = Text(printable(one.topic))
    if one.pause is not None:
        name.append(" paused", "yellow")
    return [
        name, Text(*_counted(one.due.count, "due")), Text(count_words(one.pending.count)),
        Text(*_counted(one.leased, "leased")), Text(*_counted(one.dead, "dead")),
        Text("–" if one.workers is None else f"{len(one.workers):,}", "red" if one.workers == [] else ""),
    ]  # fmt: skip


def _holder(one: Holder) -> list[Text]:
    works = ", ".join(one.topics) if one.announced else "(a consumer, or gone)"
    return [
        Text(printable(one.name)), Text(f"{one.number:,}", "" if one.number else "dim"),
        Text(f"{one.lost:,}", "bold red" if one.lost else "dim"), Text(printable(works), "dim"),
    ]  # fmt: skip


def _table(heads: Sequence[str], rows: Sequence[Sequence[Text]], width: int) -> Table:
    """A table whose names share the width that the numbers leave. A narrow window shows the first columns."""
    heads = heads[: max(1, (width - 12) // _NUMBER + 1)]
    names = sum(head in _NAMES for head in heads)
    each = (width - _NUMBER * (len(heads) - names)) // names - 1
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for head in heads:
        if head in _NAMES:
            table.add_column(head, no_wrap=True, overflow="ellipsis", min_width=min(11, each), max_width=each)
        else:
            table.add_column(head, no_wrap=True, overflow="ellipsis", justify="right", width=_NUMBER - 1)
    for row in rows:
        table.add_row(*row[: len(heads)])
    return table


def _fitted(topics: _Lines, workers: _Lines, room: int | None) -> _Lines:
    """Both tables, cut to the room, with a line for what is cut off."""
    if room is None:
        return [*_cut(topics, _MOST_ROWS), *_cut(workers, _MOST_ROWS)]
    for_topics = min(_TOPICS + 3, len(topics), max(room - min(len(workers), 5), 0))
    return [*_cut(topics, for_topics), *_cut(workers, room - for_topics)]


def _cut(lines: _Lines, room: int) -> _Lines:
    if len(lines) <= room:
        return lines
    if room < 3:
        return []
    return [*lines[: room - 1], [Segment(f"and {len(lines) - room + 1:,} more", Style(dim=True))]]


def _counted(count: Count, state: str) -> tuple[str, str]:
    """The number, in the style of the state; dim for none."""
    return count_words(count), STYLES[state] if count.number else "dim"


def _rate(flow: Flow, number: int) -> str:
    rate = flow.rate(number)
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def _grade(late: Millis | None) -> str:
    if late is None:
        return "dim"
    return next((style for most, style in _GRADES if late <= most), "bold red")


def _shape(seen: Overview, checks: Sequence[Check], store: str) -> dict[str, Any]:
    """The output of --json; null: the store does not have it, or the token may not read it."""
    oldest = seen.oldest_due
    return {
        "at": instant_text(seen.at),
        "store": store,
        "pending": _figure_shape(seen.pending),
        "due": _figure_shape(seen.due),
        "leased": seen.leased._asdict(),
        "dead": seen.dead._asdict(),
        "oldest_due": None if oldest is None else {"topic": oldest[0], "since": instant_text(oldest[1])},
        "last_minute": _flow_shape(seen.minute),
        "last_hour": _flow_shape(seen.hour),
        "deliveries_by_minute": list(seen.by_minute),
        "topics": [
            {
                "topic": one.topic,
                "pending": _figure_shape(one.pending),
                "due": _figure_shape(one.due),
                "leased": one.leased._asdict(),
                "dead": one.dead._asdict(),
                "paused": None if one.pause is None else paused_shape(one.pause),
                "workers": None if one.workers is None else len(one.workers),
            }
            for one in seen.topics
        ],
        "holders": [
            {
                "name": one.name,
                "worker": one.announced,
                "topics": list(one.topics),
                "held": [{"topic": topic, "number": its.number, "lost": its.lost} for topic, its in one.held.items()],
            }
            for one in seen.holders
        ],
        "workers_known": seen.holders_known,
        "nobody_works_on": [one.topic for one in seen.unworked],
        "held_back": [one.topic for one in seen.held_back],
        "health": [{"name": one.name, "level": one.level.value, "what": one.what} for one in checks],
    }


def _figure_shape(figure: Figure) -> dict[str, Any]:
    return {**figure.count._asdict(), "counted_at": instant_text(figure.at)}


def _flow_shape(flow: Flow | None) -> dict[str, Any] | None:
    if flow is None:
        return None
    past = flow.deliveries
    return {
        "seconds": flow.span / 1000, "scheduled": flow.scheduled, "begun": past.begun, "done": past.done,
        "retried": past.retried, "deferred": past.deferred, "dead": past.dead,
        "lateness_p50_ms": past.lateness(0.5), "lateness_p99_ms": past.lateness(0.99),
    }  # fmt: skip
