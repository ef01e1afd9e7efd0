"""`bide doctor`: what is well, what is not, and what to do about it."""

from __future__ import annotations

import asyncio

import click

from bide.app import Bide
from bide.cli.checkup import Level, Note, check_around, check_store
from bide.cli.exits import Exit
from bide.cli.printing import print_json
from bide.cli.surroundings import Surroundings, shared_options
from bide.core.errors import BideError
from bide.wiring import check_there

_MARKS = {Level.OK: ("ok", "green"), Level.WARNING: ("warning", "yellow"), Level.ERROR: ("error", "red")}


@click.command()
@shared_options()
@click.pass_obj
def doctor(surroundings: Surroundings) -> Exit:
    """Check the settings, this machine and the store; each line says what was found, and what to do about it.

    Ends with 1 when a line is an error; warnings alone end with 0.
    """
    errors = 0

    def tell(note: Note) -> None:
        nonlocal errors
        errors += note.level is Level.ERROR
        if surroundings.json:
            print_json({"level": note.level.value, "what": note.what, "advice": note.advice})
        else:
            word, colour = _MARKS[note.level]
            click.echo(f"{click.style(f'{word:8}', fg=colour)}{note.what}")
            if note.advice:
                click.echo(f"{'':8}{click.style(note.advice, dim=True)}")

    for note in check_around():
        tell(note)

    async def examine() -> None:
        check_there(surroundings.settings().store)
        async with Bide(settings=surroundings.settings()) as app:
            tell(Note(Level.OK, f"the store opens: {surroundings.shown_store}"))
            for note in await check_store(app):
                tell(note)

    try:
        asyncio.run(examine())
    except BideError as error:
        tell(Note(Level.ERROR, str(error), "nothing more can be said until this is put right"))
    return Exit.NOT_DONE if errors else Exit.DONE
