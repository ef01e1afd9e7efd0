"""The context of every command: its store, its output, and the person who runs it."""

from __future__ import annotations

import asyncio
import getpass
import os
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, TypeVar
from urllib.parse import urlsplit

import click

from bide.app import Bide
from bide.cli.exits import Exit
from bide.cli.output import answer_words, pauses_about, print_json
from bide.core.answers import Answer
from bide.core.errors import BadInput
from bide.core.names import LONGEST_NAME
from bide.service.schemas import answer_shape
from bide.settings import Settings
from bide.wiring import check_there, hide_options

T = TypeVar("T")
Decorated = TypeVar("Decorated", bound=Callable[..., Any])


@dataclass(slots=True)
class Context:
    """The values of the options that all commands share, wherever on the line they stand."""

    store: str | None = None
    json: bool = False
    debug: bool = False

    def settings(self) -> Settings:
        """The settings of the environment, overridden by `--store`. Raises BadInput."""
        return Settings.from_env(store=self.store)

    def open(self, work: Callable[[Bide], Coroutine[Any, Any, T]], *, noted: bool = True, make: bool = False) -> T:
        """Run `work` with an open app. With `noted`, the event log records its changes as this person's.

        With `make`, create a store that does not exist; else raise StoreUnavailable for a file that is not there.
        """
        settings = self.settings()
        if not make:
            check_there(settings.store)
        actor = (settings.actor or person()) if noted else None
        settings = replace(settings, actor=actor)
        if settings.store == "memory:":
            click.echo("bide: note: memory: keeps nothing after this command", err=True)

        async def within() -> T:
            async with Bide(settings=settings) as app:
                return await work(app)

        return asyncio.run(within())

    def answer(
        self, topic: str, key: str, verb: Callable[[Bide], Coroutine[Any, Any, Answer]], *, make: bool = False
    ) -> Exit:
        """Do `verb` to one task, and print the answer. See `open`."""

        async def work(app: Bide) -> Exit:
            answer = await verb(app)
            paused = await pauses_about(app, [answer])
            self.say(answer_shape(answer, paused=paused), answer_words(answer, topic, key, paused=paused))
            return Exit.DONE if answer.ok else Exit.NOT_DONE

        return self.open(work, make=make)

    def say(self, shape: object, words: str) -> None:
        """Print one line: the shape as JSON, or the words for a person."""
        if self.json:
            print_json(shape)
        else:
            click.echo(words)

    @property
    def shown_store(self) -> str:
        """The store's URL without its password."""
        return without_password(self.settings().store)


def person() -> str:
    """The person at this command line: user@host."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may run as a user without a name
        user = f"user {os.getuid()}"
    name = "".join(letter for letter in f"{user}@{socket.gethostname()}" if letter.isprintable())
    return name.encode()[:LONGEST_NAME].decode(errors="ignore")


def without_password(url: str) -> str:
    """`url` without its passwords, for output."""
    try:
        password = urlsplit(url).password
    except ValueError:
        return "(a store URL that cannot be read)"
    return hide_options(url.replace(f":{password}@", ":***@", 1) if password else url)


def _remember(ctx: click.Context, option: click.Parameter, value: Any) -> Any:
    if value is not None and option.name is not None:
        setattr(ctx.ensure_object(Context), option.name, value)
    return value


def _shared(*names: str, **given: Any) -> Callable[[Decorated], Decorated]:
    return click.option(*names, callback=_remember, expose_value=False, **given)


_DEBUG = _shared("--debug", is_flag=True, default=None, help="Show the traceback of an error.")
_JSON = _shared("--json", is_flag=True, default=None, help="Print JSON, one object a line.")
_STORE = _shared("--store", metavar="URL", help="The store of the tasks, such as sqlite:///bide.db.")


def shared_options(*, store: bool = True, json: bool = True) -> Callable[[Decorated], Decorated]:
    """Add the options that all commands share."""

    def decorate(command: Decorated) -> Decorated:
        for option in (_DEBUG, *([_JSON] if json else []), *([_STORE] if store else [])):
            command = option(command)
        return command

    return decorate


def takes_context(*, store: bool = True, json: bool = True) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add the options that all commands share, and pass the command its `Context` first."""
    return lambda command: shared_options(store=store, json=json)(click.pass_obj(command))


class NamedCommands(click.Group):
    """A group that answers an unknown subcommand with the nearest name and with all names."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            names = self.list_commands(ctx)
            closest = get_close_matches(args[0], names, n=1)
            meant = f"did you mean {closest[0]!r}? All are: " if closest else "one of "
            group = "command" if ctx.parent is None else self.name
            raise click.UsageError(f"{group}: {args[0]!r} is not accepted; {meant}{', '.join(names)}", ctx)
        return super().resolve_command(ctx, args)


class WholeNumber(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic since click 8.4 only
    """A whole number within bounds; errors name field, value and what is accepted, as all errors here do."""

    name = "number"

    def __init__(self, least: int, most: int) -> None:
        self.least = least
        self.most = most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            number = int(value)
        except ValueError:
            number = self.least - 1
        if self.least <= number <= self.most:
            return number
        field = "number" if param is None else param.opts[0]
        raise BadInput(field, value, f"a whole number from {self.least:,} to {self.most:,}")


zone_option = click.option("--zone", help='The zone of times like "08:00" and "tomorrow 20:00", such as Asia/Tokyo.')
if_token_option = click.option(
    "--if-token",
    metavar="TOKEN",
    type=WholeNumber(0, 2**63 - 1),
    help="Only if the task still has this token, as `bide show` prints it.",
)
