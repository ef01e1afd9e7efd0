"""A command: `bide shelf PATH` shows what the sink has written."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command()
@click.argument("path", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def shelf(path: Path) -> None:
    """Show what the lines sink has written."""
    for line in path.read_text(encoding="utf-8").splitlines():
        delivered = json.loads(line)
        click.echo(f"{delivered['topic']}/{delivered['key']}: {delivered['payload']}")
