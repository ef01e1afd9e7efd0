"""The demo's screen: every thing of every story on a line of its own, which stays where it is.

It never writes past its window: what has no room is cut, the last words of a line last.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bide.cli.demo.ledger import Line
from bide.cli.demo.record import Lateness
from bide.cli.demo.story import CALLED_OFF, FAILED, FIRED, SAID, Story
from bide.core.instants import Millis
from bide.core.records import Record, State

_ROOMY = 29
"""Lines from which there is room for an empty one above each story."""
_MARK_STYLES = {SAID: "", FIRED: "green", FAILED: "red", CALLED_OFF: "dim"}


def board(
    stories: Sequence[Story], lateness: Lateness, store: str, note: str, now: Millis, width: int, height: int
) -> Group:
    """The whole screen: lines of `width`, with air between the stories where `height` has room for it."""
    parts: list[RenderableType] = [_head(lateness, note or f"real tasks in {store}", width)]
    for story in stories:
        if height >= _ROOMY:
            parts.append(Text())
        parts += [_title(story, now, width), _lines(story, lateness, now, width)]
    if height >= _ROOMY:
        parts.append(Text())
    parts.append(_foot(stories, store, width))
    return Group(*parts)


def _head(lateness: Lateness, note: str, width: int) -> Text:
    head = Text.assemble(("bide demo", "bold"), (f"  {note}" if width >= 100 else "", "dim"))
    return _spread(head, Text(lateness.words, "bold"), width)


def _foot(stories: Sequence[Story], store: str, width: int) -> Text:
    going = sum(not story.ended for story in stories)
    if going == 0:
        return Text("every story has come to its end", "bold green")
    left = "Ctrl-C stops it; started again it goes on from here" if width >= 100 else "Ctrl-C stops"
    return _spread(Text(left, "dim"), Text(f"meanwhile: bide ls --store {store}", "dim"), width)


def _title(story: Story, now: Millis, width: int) -> Text:
    left = Text.assemble(
        (f"{story.code} {story.title}", "bold cyan"), ("  ", ""), (story.scale.words, "cyan"),
        (f"  {story.pace.speed_words}", "dim"),
    )  # fmt: skip
    if story.ended:
        return _spread(left, Text("ended", "green"), width)
    where = f" in {story.place}" if story.place else " passed"
    return _spread(left, Text(f"{story.pace.words(now)}{where}", "cyan"), width)


def _lines(story: Story, lateness: Lateness, now: Millis, width: int) -> Table:
    table = Table.grid(padding=(0, 1), expand=False)
    narrow = width < 100
    widths = (1, 12, width - 50 if narrow else width - 63, 9 if narrow else 14, 9, 13 if narrow else 20)
    for place, columns in enumerate(widths):
        table.add_column(width=columns, no_wrap=True, overflow="ellipsis", justify="right" if place > 2 else "left")
    for thing, told in story.things.items():
        live = [record for record in story.live if story.thing_of(record) == thing]
        table.add_row(*_line(story, lateness, thing, told, live, widths[2], now, narrow))
    return table


def _line(
    story: Story,
    lateness: Lateness,
    thing: str,
    told: Sequence[Line],
    live: Sequence[Record],
    room: int,
    now: Millis,
    narrow: bool,
) -> tuple[Text, ...]:
    upcoming = min((record.wake_at for record in live if record.state is State.WAITING), default=None)
    running = any(record.state is State.LEASED for record in live)
    last = told[-1]
    due, countdown = Text(), Text()
    if upcoming is not None:
        mark = Text("!", "red") if last.mark == FAILED else Text("○", "yellow")
        due = Text(story.pace.words(upcoming) if narrow else f"next {story.pace.words(upcoming)}", "yellow")
        countdown = Text(f"{max(0, upcoming - now) / 1000:.1f} s", "bold yellow")
    elif running:
        mark, countdown = Text("●", "bold green"), Text("running", "bold green")
    else:
        mark = Text("–", "dim") if last.mark == CALLED_OFF else Text("✓", "bold green")
    fired = [line for line in told if line.late is not None]
    late = Text()
    if fired:
        late = lateness.text(fired[-1], narrow)
    style = "dim" if last.mark == CALLED_OFF else ""
    return mark, Text(thing, style), _history(told, room), due, countdown, late


def _history(told: Sequence[Line], room: int) -> Text:
    """What happened, the last words kept when there is no room for all."""
    words = [Text(line.words, _MARK_STYLES[line.mark]) for line in told]
    text = Text(", ").join(words)
    if text.cell_len > room:
        text = Text("…").append_text(text[text.cell_len - room + 1 :])
    return text


def _spread(left: Text, right: Text, width: int) -> Text:
    """Both at their ends of one line; the right one gives way."""
    gap = width - left.cell_len - right.cell_len
    if gap < 2:
        left.truncate(width, overflow="ellipsis")
        return left
    return Text.assemble(left, " " * gap, right)
