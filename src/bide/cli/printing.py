"""What `--json` prints."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable

import click

from bide.service.schemas import one_line


def print_json(shape: object, echo: Callable[[str], None] = click.echo) -> None:
    """One line of JSON; in ASCII where the stream cannot take every letter."""
    text = one_line(shape).decode()
    if not sys.stdout.encoding.lower().startswith("utf"):
        text = re.sub(r"[^\x00-\x7f]", lambda letter: json.dumps(letter[0])[1:-1], text)  # only texts have any
    echo(text)
