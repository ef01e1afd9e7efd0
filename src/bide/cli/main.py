"""The command `bide`: loads the one subcommand that is named, and turns every error into one line and an exit code.

Loading is lazy, so that `bide schedule` in a shell loop imports no rich. For the same reason the one-line help of each
subcommand stands here.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import click

from bide import extensions
from bide._version import __version__
from bide.cli.context import Context, NamedCommands, shared_options
from bide.cli.exits import Exit, end_at_once, exit_of, on_signals
from bide.cli.output import Output, take_streams
from bide.core.errors import BideError, SetupError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

SECTIONS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "Start here": {
        "demo": ("bide.cli.serve:demo", "Watch the live traffic of a small town in the console."),
        "doctor": ("bide.cli.doctor:doctor", "Check the settings, this machine and the store, with advice."),
    },
    "Schedule and change": {
        "schedule": ("bide.cli.schedule:schedule", "Schedule a task, or many from a file."),
        "move": ("bide.cli.change:move", "Move a waiting task to another time."),
        "fire": ("bide.cli.change:fire", "Fire a waiting task now."),
        "cancel": ("bide.cli.change:cancel", "Cancel a live task, or a whole group."),
        "shift": ("bide.cli.change:shift", "Shift the waiting tasks of a group by the same duration."),
        "redrive": ("bide.cli.change:redrive", "Redrive dead tasks: send them again."),
        "recurring": ("bide.cli.recurring:recurring", "List, add and steer recurring tasks."),
        "pause": ("bide.cli.change:pause", "Pause topics: hold their tasks back, accept new ones."),
        "resume": ("bide.cli.change:resume", "Resume paused topics."),
    },
    "Inspect": {
        "top": ("bide.cli.top:top", "Overview, kept fresh: pending, due, lateness, workers."),
        "ls": ("bide.cli.queries:ls", "List tasks."),
        "show": ("bide.cli.queries:show", "Show one task: its payload, its times, its events."),
        "next": ("bide.cli.recurring:next_runs", "Show when a recurring rule runs next."),
        "tally": ("bide.cli.queries:tally", "Count tasks by topic and state; forecast what comes due."),
        "events": ("bide.cli.queries:events", "List unusual events: failures, deaths, changes by people."),
    },
    "Run": {
        "serve": ("bide.cli.serve:serve", "Serve tasks over HTTP, with webhooks and a console."),
        "work": ("bide.cli.work:work", "Run the handlers of an app."),
        "token": ("bide.cli.token:token", "Make, list and revoke access tokens of the service."),
        "migrate": ("bide.cli.doctor:migrate", "Create or upgrade the schema in a database."),
    },
}
_WHERE = {name: path for section in SECTIONS.values() for name, (path, _) in section.items()}
_OURS_ELSEWHERE = {"bench": "./bench", "lab": "./bench ./lab"}
"""Commands in other distributions of bide's own, and what to install for each, in a clone."""
_READ_ONLY = {"doctor", *SECTIONS["Inspect"], *_OURS_ELSEWHERE}
"""Commands that change nothing: they end when the reader of their output is gone."""


def added() -> dict[str, EntryPoint]:
    """The commands that other distributions add; none can replace a command of bide."""
    return {name: one for name, one in extensions.installed(extensions.COMMANDS).items() if name not in _WHERE}


class Commands(NamedCommands):
    """A group that imports a command when it is named."""

    _output: Output | None = None
    """The standard output, if this is the program of its process and not a test inside another one."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args or ["--help"])

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*_WHERE, *added()]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if self._output is not None:
            self._output.ends = cmd_name in _READ_ONLY
            if cmd_name in ("demo", "serve", "work"):
                on_signals(end_at_once)
        if cmd_name not in _WHERE:
            more = added()
            return _loaded(more[cmd_name]) if cmd_name in more else None
        module, _, attribute = _WHERE[cmd_name].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0] if args else ""
        if name in _OURS_ELSEWHERE and name not in added():
            raise SetupError(f"bide {name} is not installed: pip install {_OURS_ELSEWHERE[name]} (in a clone of bide)")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, section in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(name, help_text) for name, (_, help_text) in section.items()])
        if more := added():
            with formatter.section("Added by other packages"):
                formatter.write_dl([(name, _about(more[name])) for name in sorted(more)])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(code.value), code.meaning) for code in Exit])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            ended = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:  # `bide ls | head` has seen enough: that is no failure
            return Exit.DONE
        finally:
            if self._output is not None:
                self._output.ends = False
        return ended

    def main(
        self, args: Sequence[str] | None = None, prog_name: str | None = None, complete_var: str | None = None,
        standalone_mode: bool = True, **extra: Any,
    ) -> NoReturn:  # fmt: skip
        """Run one command and end the process. Errors are one line on stderr; `--debug` adds the traceback."""
        context = Context()
        self._output = take_streams() if args is None else None
        try:
            ended = super().main(args, prog_name or "bide", complete_var, standalone_mode=False, obj=context, **extra)
        except (click.Abort, KeyboardInterrupt):
            click.echo("bide: interrupted", err=True)
            sys.exit(Exit.INTERRUPTED)
        except click.UsageError as error:
            where = f"  (see {error.ctx.command_path} --help)" if error.ctx else ""
            _complain(f"{error.format_message()}{where}", error, context)
            sys.exit(Exit.BAD_INPUT)
        except click.ClickException as error:
            _complain(error.format_message(), error, context)
            sys.exit(error.exit_code)
        except BideError as error:
            _complain(str(error), error, context)
            sys.exit(exit_of(error))
        except Exception as error:  # noqa: BLE001 - a person gets one line; --debug has the rest
            advice = "" if context.debug else "; run it again with --debug to see where"
            _complain(f"a defect: {type(error).__name__}: {error}{advice}", error, context)
            sys.exit(Exit.DEFECT)
        sys.exit(ended if isinstance(ended, int) else Exit.DONE)


def _loaded(extension: EntryPoint) -> click.Command:
    """Load a command of another distribution. Raises SetupError if that fails."""
    command = extensions.load(extension)
    if not isinstance(command, click.Command):
        raise SetupError(f"{extensions.described(extension)} is not a click command but {command!r}")
    return command


def _about(extension: EntryPoint) -> str:
    """The one-line help of a command; the reason, if it cannot be loaded, so that the list is still shown."""
    try:
        return _loaded(extension).get_short_help_str(limit=90)
    except SetupError as error:
        return str(error)


def _complain(message: str, error: BaseException, context: Context) -> None:
    if context.debug:
        traceback.print_exception(error)
    click.echo(f"bide: {' '.join(message.split())}", err=True)


@click.group(
    cls=Commands,
    name="bide",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    help="Schedule something to happen at a time; until then fire it now, move it, or cancel it.\n\n"
    "The store is --store URL, else BIDE_STORE of the environment, else sqlite:///bide.db in this directory. "
    "Every command has --help, and every command that prints has --json.",
)
@click.version_option(__version__, prog_name="bide")
@shared_options()
def main() -> None:
    """Parse the options that all commands share."""
