"""`bide demo` itself: its options, how it ends, and what to try next."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from contextlib import suppress
from typing import Any
from urllib.parse import unquote, urlsplit

import click

from bide.app import Bide
from bide.cli.demo.run import Demo
from bide.cli.exits import Exit
from bide.cli.surroundings import Surroundings, shared_options
from bide.core.errors import BadInput
from bide.settings import Settings

_STORE = "sqlite:///bide-demo.db"


class Speed(click.ParamType[float]):
    """A number above zero."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        field = "number" if param is None else param.opts[0]
        try:
            number = float(value)
        except ValueError:
            number = 0.0
        if not 0.0 < number <= 1_000_000:
            raise BadInput(field, value, "a number above zero, such as 20 or 0.5")
        return number


@click.command()
@click.option("--seconds", metavar="N", type=Speed(), help="Stop by itself after this long.")
@click.option("--fresh", is_flag=True, help="Begin anew, also when a run before has not come to its end.")
@click.option("--plain", is_flag=True, help="Lines instead of a board; so it is anyhow where nobody watches.")
@click.option("--speed", type=Speed(), default=1.0, hidden=True)
@shared_options(json=False)
@click.pass_obj
def demo(surroundings: Surroundings, seconds: float | None, fresh: bool, plain: bool, speed: float) -> Exit:
    """Watch five everyday scenarios at work, in less than a minute.

    Real tasks in a SQLite file (bide-demo.db in this directory, or --store), each scenario in quickened time, with what
    waits, what has fired, and how late it was. Ctrl-C stops it; started again, it goes on where it was. Ends by itself:
    with 0 when every scenario has come to its end, with 1 when --seconds came first.
    """
    store = _STORE if surroundings.store is None else surroundings.store
    settings = Settings.from_env(store=store)
    demo = Demo(Bide(settings=settings), _path_of(store), speed=speed, fresh=fresh)
    from bide.cli.demo.watching import Lines, Screen

    logging.getLogger("bide").addHandler(logging.NullHandler())  # the board tells of failures itself

    watch = Lines(store) if plain or not sys.stdout.isatty() else Screen(store)
    ended = interrupted = False
    try:
        ended = asyncio.run(_until_told(demo, watch, seconds))
    except (KeyboardInterrupt, asyncio.CancelledError):
        interrupted = True
    watch.last(demo.stories, demo.lateness)
    option = "" if surroundings.store is None else f" --store {store}"
    if ended:
        click.echo(_next(store))
        return Exit.DONE
    click.echo(f"Stopped before the end. `bide demo{option}` goes on from here; with --fresh it begins anew.")
    return Exit.INTERRUPTED if interrupted else Exit.NOT_DONE


async def _until_told(demo: Demo, watch: Any, seconds: float | None) -> bool:
    """SIGTERM ends it as Ctrl-C does."""
    running = asyncio.current_task()
    assert running is not None
    with suppress(NotImplementedError):
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
    return await demo.play(watch, seconds=seconds)


def _path_of(store: str) -> str:
    """The file that the stories' own tables share with the tasks."""
    parts = urlsplit(store)
    if parts.scheme != "sqlite" or not parts.path.strip("/"):
        raise BadInput("--store", store, f"a SQLite file such as {_STORE}: the scenarios keep their own tables in it")
    return unquote(parts.path.removeprefix("/"))


def _next(store: str) -> str:
    return f"""
What to try next:
  bide ls --state all --store {store}    what is remembered of it
  bide events --store {store}            what failed
  bide schedule greeting '"hello"' --key 1 --delay 1h    a task of your own
  bide ls; bide move greeting 1 --delay 2h; bide show greeting 1"""
