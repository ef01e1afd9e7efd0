"""`bide work`: the handlers of an app at work in this process, until told to stop."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import socket
import sys
import threading
from contextlib import suppress
from difflib import get_close_matches

import click

from bide.app import Bide
from bide.cli.context import Context, WholeNumber, shared_options, without_password
from bide.cli.exits import Exit
from bide.cli.stopping import Stopping, run_loop
from bide.core.errors import BadInput, BideError, SetupError
from bide.core.instants import duration_text
from bide.core.records import Record, Settlement, Verdict

_log = logging.getLogger("bide.work")
_LEVELS = ("debug", "info", "warning", "error")


@click.command()
@click.argument("application", metavar="MODULE:APP")
@click.option(
    "--processes", type=WholeNumber(1, 1024), default=1, show_default=True, help="Worker processes side by side."
)
@click.option("--topic", "topics", multiple=True, help="Only this topic; may be given several times.")
@click.option("--quiet", is_flag=True, help="No start line, and only errors are logged.")
@click.option(
    "--log-level", type=click.Choice(_LEVELS), default="info", show_default=True, help="What is logged on stderr."
)
@click.option("--uvloop", is_flag=True, help="Run on uvloop, which has to be installed.")
@click.option("--supervised", type=int, hidden=True, help="Its number; of the first, with how many others.")
@shared_options(json=False)
@click.pass_obj
def work(
    context: Context,
    application: str,
    processes: int,
    topics: tuple[str, ...],
    quiet: bool,
    log_level: str,
    uvloop: bool,
    supervised: int | None,
) -> int:
    """Work on the handlers of an app: MODULE:APP is a module and the name of the Bide object in it, as in shop:app.

    The first SIGTERM, SIGHUP or Ctrl-C drains: nothing new is begun, what runs has BIDE_GRACE to end, and what does not
    is delivered again elsewhere. The second ends at once. --store is for an app that names no store itself.
    """
    if context.store is not None:
        os.environ["BIDE_STORE"] = context.store
    _log_to_stderr("error" if quiet else log_level)
    if processes > 1:
        from bide.cli.supervisor import Supervisor

        return Supervisor(sys.argv, processes, os.environ).run()
    stopping = Stopping(only_drains=supervised is not None)
    line = None if supervised is None else _line_to_supervisor(stopping)
    app = load_app(application)
    for topic in topics:
        if topic not in app.routes:
            raise BadInput("--topic", topic, f"topics that have a handler: {', '.join(sorted(app.routes)) or 'none'}")
    if not app.routes and not app.watches:
        raise SetupError(f"{application}: the app has no handlers; declare one with @app.handler(topic)")
    if not quiet and supervised != 0:
        work_on = [*topics] or [*sorted(app.routes), *(f"table {watch.name}" for watch in app.watches)]
        who = f"{supervised} processes under pid {os.getppid()}" if supervised else f"pid {os.getpid()}"
        click.echo(f"bide work {application}: {', '.join(work_on)} from {without_password(app.url)}, {who}", err=True)
    run_loop(_work(app, topics, stopping, line), uvloop=uvloop)
    if not quiet and supervised is None:
        click.echo(f"bide work: pid {os.getpid()} has stopped", err=True)
    return Exit.DONE


async def _work(app: Bide, topics: tuple[str, ...], stopping: Stopping, line: socket.socket | None) -> None:
    told = asyncio.Event()

    def drain(why: str) -> None:
        _log.info("%s: draining, at most %s; a second one ends at once", why, duration_text(app.settings.grace))
        told.set()

    async with app:
        longest = stopping.begin(drain, app.settings.grace)
        async with app.worker(topics=topics or None, observe=_observe):
            if line is not None:
                with suppress(OSError):
                    line.send(f"{longest}\n".encode())
            await told.wait()


def _observe(record: Record, told: Settlement) -> None:
    """One line for each task that died. What failed by an exception, the worker itself logs."""
    if told.verdict is Verdict.DEAD:
        _log.error("%s/%s is dead, attempt %d was the last: %s", record.topic, record.key, record.attempt, told.why)
    elif told.verdict is Verdict.RETRY:
        _log.debug("%s/%s failed, will be tried again: %s", record.topic, record.key, told.why)


def _line_to_supervisor(stopping: Stopping) -> socket.socket:
    """Our standard input: the supervisor ends it to have us drain, and the kernel when the supervisor is killed."""
    line = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # so that no handler, and nothing that one starts, reads or holds it

    def wait() -> None:
        with suppress(OSError):
            while line.recv(1024):
                pass
        stopping.tell("the supervisor")

    threading.Thread(target=wait, name="bide supervised", daemon=True).start()
    return line


def _log_to_stderr(level: str) -> None:
    """Set up stdlib logging, unless the app's module does so itself when it is loaded."""
    logging.basicConfig(
        stream=sys.stderr, level=level.upper(), format="%(asctime)s %(levelname)s %(name)s [%(process)d] %(message)s"
    )


def load_app(application: str) -> Bide:
    """The Bide object that `application` names, looked for here first. Raises BadInput, SetupError."""
    module_name, colon, path = application.partition(":")
    if not colon or not all(part.isidentifier() for part in (*module_name.split("."), *path.split("."))):
        raise BadInput("MODULE:APP", application, "a module, a colon and the app's name in it, such as shop:app")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: object = importlib.import_module(module_name)
    except BideError:
        raise
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise SetupError(f"{module_name}: cannot be loaded: {error}") from error
        accepted = f"a module that can be imported from {os.getcwd()} or the Python path ({error})"
        raise BadInput("MODULE:APP", application, accepted) from None
    except Exception as error:
        raise SetupError(f"{module_name}: cannot be loaded: {type(error).__name__}: {error}") from error
    apps = [name for name, value in vars(found).items() if isinstance(value, Bide)]
    for part in path.split("."):
        if not hasattr(found, part):
            closest = get_close_matches(part, apps, n=1, cutoff=0.0)
            accepted = f"the name of a Bide object in {module_name}" + (f", such as {closest[0]}" if closest else "")
            raise BadInput("MODULE:APP", application, accepted)
        found = getattr(found, part)
    if not isinstance(found, Bide):
        there = f"; in {module_name} these are: {', '.join(apps)}" if apps else ""
        raise BadInput("MODULE:APP", application, f"the name of a Bide object, not of a {type(found).__name__}{there}")
    return found
