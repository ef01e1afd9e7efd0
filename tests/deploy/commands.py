"""Whether a command that a file names would be taken: its words are read by the command line itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

from bide.cli.context import Context
from bide.cli.main import main
from bide.settings import describe

SETTINGS = {one.variable: one for one in describe()} | {
    one.file_variable: one for one in describe() if one.file_variable is not None
}


def check_command(words: Sequence[str]) -> dict[str, Any]:
    """The options of `bide WORDS`, by their names. Raises click's UsageError for what it does not take."""
    command: click.Command = main
    context = click.Context(main, info_name="bide")
    rest = list(words)
    while isinstance(command, click.Group):
        name, found, rest = command.resolve_command(context, rest)
        assert found is not None, words
        command, context = found, click.Context(found, info_name=name, parent=context)
    return dict(command.make_context(words[-1], rest, parent=context.parent, obj=Context()).params)


def check_environment(environment: Mapping[str, str]) -> None:
    """Every BIDE_ name is a setting, its value is one that it takes, and no secret stands there in the open."""
    for name, value in environment.items():
        if name.startswith("BIDE_"):
            setting = SETTINGS[name]
            if name == setting.variable:
                assert not setting.kind.secret, f"{name}: give it as a file"
                setting.kind.read(value, name)
