"""What `--json` prints."""

from __future__ import annotations

from collections.abc import Callable

import click

from bide.service.shapes import one_line


def print_json(shape: object, echo: Callable[[str], None] = click.echo) -> None:
    """One line of JSON."""
    echo(one_line(shape).decode())
