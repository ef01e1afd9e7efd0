"""Printing: JSON on stdout, and a progress bar on stderr where a person watches."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

from bide.service.schemas import one_line


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
