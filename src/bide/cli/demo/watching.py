"""Two ways to watch the demo: a board that stays in place, and plain lines for a pipe or a log."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import click
from rich.console import Console, Group
from rich.live import Live

from bide.cli.demo.board import board
from bide.cli.demo.ledger import Line
from bide.cli.demo.record import Lateness
from bide.cli.demo.story import Story, quiet

_FRAME = 0.125


class Screen:
    """The board, redrawn eight times a second on the terminal's other screen."""

    def __init__(self, store: str) -> None:
        self._store = store
        self._note = ""
        self._console = Console(highlight=False)

    def note(self, words: str) -> None:
        self._note = words

    def told(self, line: Line) -> None:
        """The next drawing shows it."""

    async def run(self, stories: Sequence[Story], lateness: Lateness) -> None:
        console = self._console
        with Live(console=console, screen=True, auto_refresh=False, redirect_stderr=False) as live:
            while True:
                await quiet(stories)
                live.update(self._board(stories, lateness, *console.size), refresh=True)
                await asyncio.sleep(_FRAME)

    def last(self, stories: Sequence[Story], lateness: Lateness) -> None:
        """The board as it is at the end, to stay on the screen."""
        console = self._console
        console.print(self._board(stories, lateness, *console.size))

    def _board(self, stories: Sequence[Story], lateness: Lateness, width: int, height: int) -> Group:
        return board(stories, lateness, self._store, self._note, time.time_ns() // 1_000_000, width, height)


class Lines:
    """One line for each thing that happens, as it happens."""

    def __init__(self, store: str) -> None:
        self._store = store
        self._stories: dict[str, Story] = {}
        self._lateness: Lateness

    def note(self, words: str) -> None:
        click.echo(words)

    def told(self, line: Line) -> None:
        story = self._stories.get(line.story)
        if story is not None:
            self._print(story, line)

    async def run(self, stories: Sequence[Story], lateness: Lateness) -> None:
        self._lateness = lateness
        click.echo(f"bide demo: real tasks in {self._store}")
        for story in stories:
            click.echo(f"  {story.code} {story.title}: {story.scale.words}, {story.pace.speed_words}".rstrip(", "))
        self._stories = {story.code: story for story in stories}
        lines = [line for story in stories for told in story.things.values() for line in told]
        for line in sorted(lines, key=lambda line: line.at):
            self._print(self._stories[line.story], line)
        await asyncio.Event().wait()

    def last(self, stories: Sequence[Story], lateness: Lateness) -> None:
        """The sum of it."""
        for story in stories:
            waiting = f"{len(story.live)} tasks wait" if story.live else "people have yet to act"
            click.echo(f"  {story.code} {story.title}: {'came to its end' if story.ended else waiting}")
        click.echo(f"  {lateness.words}")
        if all(story.ended for story in stories):
            click.echo("every story has come to its end")

    def _print(self, story: Story, line: Line) -> None:
        seconds = (line.at - story.pace.begins) / 1000
        late = (
            f"  (due {story.pace.words(line.due_at)}, {self._lateness.text(line, False).plain})" if line.due_at else ""
        )
        click.echo(f"{seconds:7.3f} s  {line.story}  {line.thing}: {line.words}{late}")
