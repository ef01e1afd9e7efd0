"""The command `bide`: loads the one subcommand that is named, and turns every error into one line and an exit code.

Loading is lazy, so that `bide schedule` in a shell loop imports neither rich nor the benchmark. For the same reason the
one-line help of each subcommand stands here.
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
        "demo": ("bide.cli.serve:demo", "Watch a small town's live traffic in the console."),
        "doctor": ("bide.cli.doctor:doctor", "Check the settings, this machine and the store; say what to do."),
    },
    "Put in and change": {
        "schedule": ("bide.cli.schedule:schedule", "Register something to happen at a time, or many from a file."),
        "move": ("bide.cli.change:move", "Give a waiting task another time."),
        "fire": ("bide.cli.change:fire", "Let a waiting task happen now."),
        "cancel": ("bide.cli.change:cancel", "Cancel a live task, or a whole group."),
        "shift": ("bide.cli.change:shift", "Move the waiting tasks of a group, all by the same length."),
        "redrive": ("bide.cli.change:redrive", "Send dead tasks again."),
        "pause": ("bide.cli.change:pause", "Hold the tasks of topics back, and keep taking new ones."),
        "resume": ("bide.cli.change:resume", "Let the tasks of paused topics go out again."),
    },
    "Look": {
        "top": ("bide.cli.top:top", "All at a glance, kept fresh: pending, due, lateness, who works."),
        "ls": ("bide.cli.queries:ls", "List tasks."),
        "show": ("bide.cli.queries:show", "Everything about one task: payload, and who did what to it."),
        "tally": ("bide.cli.queries:tally", "Count tasks by topic and state; what is due now, what is due when."),
        "events": ("bide.cli.queries:events", "What was out of the ordinary: failures, deaths, changes by people."),
    },
    "Run": {
        "serve": ("bide.cli.serve:serve", "The timeline over HTTP, with webhooks, until told to stop."),
        "work": ("bide.cli.work:work", "Work on the handlers of an app until told to stop."),
        "token": ("bide.cli.token:token", "Make, list and revoke the tokens that callers of the service show."),
        "migrate": ("bide.cli.migrate:migrate", "Make the schema in a database, or bring it up to date."),
        "bench": ("bide.cli.bench:bench", "Measure this machine."),
    },
}
_LOOKS = {"doctor", *SECTIONS["Look"], "bench", "lab"}
"""They change nothing: they end when nobody reads on."""
_WHERE = {name: path for section in SECTIONS.values() for name, (path, _) in section.items()}
_OURS_ELSEWHERE = {"lab": "pip install ./lab (in a clone of bide)"}
"""Commands in distributions of bide's own, and how each is installed."""


def added() -> dict[str, EntryPoint]:
    """The commands that other distributions add. A name of ours stays ours."""
    return {name: one for name, one in extensions.installed(extensions.COMMANDS).items() if name not in _WHERE}


class Commands(NamedCommands):
    """A group that loads its commands when they are asked for."""

    _output: Output | None = None
    """The standard output, where this is the program of its process, and no test within another one."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*_WHERE, *added()]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if self._output is not None:
            self._output.ends = cmd_name in _LOOKS
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
        if args and args[0] in _OURS_ELSEWHERE and args[0] not in added():
            raise SetupError(f"bide {args[0]} is not installed: {_OURS_ELSEWHERE[args[0]]}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, section in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(name, help_text) for name, (_, help_text) in section.items()])
        if more := added():
            with formatter.section("Installed beside bide"):
                formatter.write_dl([(name, _about(more[name])) for name in sorted(more)])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(code.value), code.meaning) for code in Exit])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            ended = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:  # `bide ls | head` has seen enough: no failure, and nothing left to say
            return Exit.DONE
        finally:
            if self._output is not None:
                self._output.ends = False
        return ended

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> NoReturn:
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
        raise SetupError(f"{extensions.described(extension)} is no click command, but {command!r}")
    return command


def _about(extension: EntryPoint) -> str:
    """Its help in a line; for one that cannot be loaded, why: the list of the others is shown all the same."""
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
    help="Register something to happen at a time; until then fire it now, move it, or cancel it.\n\n"
    "Where the tasks are: --store URL, or the environment's BIDE_STORE, or sqlite:///bide.db in this directory. "
    "Every command has --help, and every one that prints has --json.",
)
@click.version_option(__version__, prog_name="bide")
@shared_options()
def main() -> None:
    """The group itself does nothing: a subcommand does."""
