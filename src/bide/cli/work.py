"""`bide work`: runs the handlers of an app, in this process or in several under a supervisor."""

from __future__ import annotations

import asyncio
import importlib
import logging
import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches

import click

from bide.app import Bide
from bide.cli.context import Context, WholeNumber, takes_context, without_password
from bide.cli.exits import SETTLING, SIGNALS, Exit, Shutdown, on_signals, run_loop
from bide.core.errors import BadInput, BideError, SetupError
from bide.core.instants import duration_text
from bide.service.logs import LEVELS, ProcessLines

_log = logging.getLogger("bide.work")
_supervisor_log = logging.getLogger("bide.supervisor")
SHORTEST_PAUSE = 0.5
LONGEST_PAUSE = 30.0
HEALTHY_AFTER = 30.0
"""Seconds of life after which a death counts as the first again."""
_PERMANENT = frozenset({Exit.BAD_INPUT, Exit.DAMAGED, Exit.SETUP})
"""Exit codes of a process that would end the same way again."""
_SLACK = 2.0
"""Seconds after the longest drain of a process until it is killed: it ends itself, unless it is frozen."""


@click.command()
@click.argument("application", metavar="MODULE:APP")
@click.option("--processes", type=WholeNumber(1, 1024), default=1, show_default=True, help="How many worker processes.")
@click.option("--topic", "topics", multiple=True, help="Work on this topic only; may be given several times.")
@click.option("--quiet", is_flag=True, help="Print no start line, and log only errors.")
@click.option(
    "--log-level", type=click.Choice(LEVELS), default="info", show_default=True, help="The level of the log on stderr."
)
@click.option("--uvloop", is_flag=True, help="Run on uvloop, if it is installed.")
@click.option("--supervised", type=int, hidden=True, help="0, or the number of processes for the first one.")
@takes_context(json=False)
def work(
    context: Context, application: str, processes: int, topics: tuple[str, ...], quiet: bool, log_level: str,
    uvloop: bool, supervised: int | None,
) -> int:  # fmt: skip
    """Run the handlers of an app: MODULE:APP is a module and the name of the Bide object in it, as in shop:app.

    The first SIGTERM, SIGHUP or Ctrl-C drains: no new task starts, running ones have BIDE_GRACE to end, and those that
    do not are delivered again elsewhere. The second ends at once. An app that names its store takes no other --store.
    """
    if context.store is not None:
        os.environ["BIDE_STORE"] = context.store
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(ProcessLines())
    level = "ERROR" if quiet else log_level.upper()
    logging.basicConfig(handlers=[handler], level=level)  # does nothing where the app's module has set up logging
    if processes > 1:
        return Supervisor(sys.argv, processes).run()
    shutdown = Shutdown(only_drains=supervised is not None)
    pipe = None if supervised is None else _supervisor_pipe(shutdown)
    app = load_app(application)
    if context.store not in (None, app.url):
        its = f"none, since the app names a store itself: {without_password(app.url)}"
        raise BadInput("--store", without_password(str(context.store)), its)
    for topic in topics:
        if topic not in app.routes:
            raise BadInput("--topic", topic, f"topics that have a handler: {', '.join(sorted(app.routes)) or 'none'}")
    if not app.routes and not app.watches:
        raise SetupError(f"{application}: the app has no handlers; declare one with @app.handler(topic)")
    if not quiet and supervised != 0:
        work_on = [*topics] or [*sorted(app.routes), *(f"table {watch.name}" for watch in app.watches)]
        who = f"{supervised} processes under pid {os.getppid()}" if supervised else f"pid {os.getpid()}"
        click.echo(f"bide work {application}: {', '.join(work_on)} from {without_password(app.url)}, {who}", err=True)
    run_loop(_work(app, topics, shutdown, pipe), uvloop=uvloop)
    if not quiet and supervised is None:
        click.echo(f"bide work: pid {os.getpid()} has stopped", err=True)
    return Exit.DONE


async def _work(app: Bide, topics: tuple[str, ...], shutdown: Shutdown, pipe: socket.socket | None) -> None:
    draining = asyncio.Event()

    def drain(why: str) -> None:
        _log.info("%s: draining, at most %s; a second one ends at once", why, duration_text(app.settings.grace))
        draining.set()

    async with app:
        drain_seconds = shutdown.begin(drain, app.settings.grace)
        async with app.worker(topics=topics or None):
            if pipe is not None:
                with suppress(OSError):
                    pipe.send(f"{drain_seconds}\n".encode())
            await draining.wait()


def _supervisor_pipe(shutdown: Shutdown) -> socket.socket:
    """Take over standard input: the supervisor closes it to make this process drain; so does its death."""
    pipe = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # so that no handler, and no child of one, reads or holds it

    def wait() -> None:
        with suppress(OSError):
            while pipe.recv(1024):
                pass
        shutdown.request("the supervisor")

    threading.Thread(target=wait, name="bide supervised", daemon=True).start()
    return pipe


def load_app(application: str) -> Bide:
    """Import the Bide object that `application` names, from this directory first. Raises BadInput, SetupError."""
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
            raise SetupError(f"{module_name}: cannot be imported: {error}") from error
        accepted = f"a module that can be imported from {os.getcwd()} or the Python path ({error})"
        raise BadInput("MODULE:APP", application, accepted) from None
    except (Exception, SystemExit) as error:
        raise SetupError(f"{module_name}: cannot be imported: {type(error).__name__}: {error}") from error
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


class _Child:
    """One worker process, and when it may be started again."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.pipe: socket.socket | None = None
        """The other end of its standard input. The child writes here once it works, and drains when this closes."""
        self.started = 0.0
        self.deaths = 0
        self.not_before = 0.0

    def close(self) -> None:
        if self.pipe is not None:
            self.pipe.close()
            self.pipe = None


class Supervisor:
    """Starts several worker processes, drains them on a signal, and restarts one that dies.

    There is nothing to coordinate, since leases decide who has a task: it only keeps up their number. It runs its own
    command again for each process, with `--processes 1`, and imports nothing of the app. When the first process is at
    work, it starts the others.
    """

    def __init__(self, command: Sequence[str], processes: int) -> None:
        self._command = [sys.executable, "-m", "bide", *command[1:], "--processes", "1", "--supervised"]
        self._children = [_Child() for _ in range(processes)]
        self._signals: list[int] = []
        self._ready = False
        """True once the first process is at work."""
        self._drain_seconds = 30.0 + SETTLING
        """Most seconds that a process takes to drain, as reported by the first one."""
        self._drain_deadline: float | None = None
        """The time by which all must have ended; None before draining begins."""
        self._wakes: socket.socket
        self._code: int = Exit.DONE

    def run(self) -> int:
        """Run until all processes have ended: after a signal, or because the first one cannot start."""
        self._wakes, written = socket.socketpair()
        self._wakes.setblocking(False)
        written.setblocking(False)
        signal.set_wakeup_fd(written.fileno(), warn_on_full_buffer=False)
        on_signals(lambda number, frame: self._signals.append(number))  # `_handle_signals` acts on them
        signal.signal(signal.SIGCHLD, lambda number, frame: None)  # only to end the sleep
        while True:
            self._reap()
            self._handle_signals()
            for child in self._children:
                self._supervise(child)
            if self._drain_deadline is not None and not any(child.process for child in self._children):
                return self._code
            self._sleep()

    def _sleep(self) -> None:
        """Sleep until a signal, until a process may be started, or until the first one is at work. Nothing polls."""
        ahead = [child.not_before for child in self._children if self._may_start(child)]
        until = min(ahead, default=math.inf) if self._drain_deadline is None else self._drain_deadline
        lines = [child.pipe for child in self._children[:1] if child.pipe is not None and not self._ready]
        select.select([self._wakes, *lines], [], [], None if until == math.inf else max(0.0, until - time.monotonic()))
        with suppress(BlockingIOError):
            self._wakes.recv(4096)

    def _reap(self) -> None:
        """Collect the exit codes of all children, and, as process 1, of the orphans that handlers left behind."""
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                for child in self._children:
                    if child.process is not None and child.process.pid == ended[0]:
                        child.process.returncode = os.waitstatus_to_exitcode(ended[1])

    def _handle_signals(self) -> None:
        """Drain on the first signal; kill on a second one, or when the time to drain is over."""
        if self._signals and self._drain_deadline is None:
            self._drain()
        overdue = self._drain_deadline is not None and time.monotonic() >= self._drain_deadline
        if not overdue and len(self._signals) < 2:
            return
        why = "not drained in time" if overdue else f"{signal.Signals(self._signals[-1]).name} again"
        _supervisor_log.warning("%s: ending at once; running tasks are delivered again when their leases expire", why)
        self._code = Exit.DEFECT if overdue else 128 + self._signals[-1]
        self._drain_deadline = math.inf
        del self._signals[1:]
        for child in self._children:
            if child.process is not None:
                child.process.kill()

    def _drain(self) -> None:
        self._drain_deadline = time.monotonic() + self._drain_seconds + _SLACK
        for child in self._children:
            child.close()

    def _may_start(self, child: _Child) -> bool:
        return child.process is None and (self._ready or child is self._children[0])

    def _supervise(self, child: _Child) -> None:
        if child.process is None:
            if self._drain_deadline is None and self._may_start(child) and time.monotonic() >= child.not_before:
                self._start(child)
        elif child.process.returncode is not None:
            child.close()
            pid, code, child.process = child.process.pid, child.process.returncode, None
            self._ended(child, pid, code)
        elif not self._ready and child.pipe is not None:
            self._note_ready(child, child.pipe)

    def _start(self, child: _Child) -> None:
        child.started = time.monotonic()
        child.pipe, theirs = socket.socketpair()
        child.pipe.setblocking(False)
        shown = 0 if self._ready else len(self._children)
        # A session of its own, so that Ctrl-C and the end of a terminal reach the supervisor alone. The end of its
        # standard input makes the child drain. A signal to all processes of a unit does the same once more; it stays
        # blocked until the child has a handler.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        with theirs:
            try:
                command = [*self._command, str(shown)]
                child.process = subprocess.Popen(command, stdin=theirs.fileno(), start_new_session=True)
            except OSError as error:  # out of memory, or at the limit of processes
                child.close()
                self._back_off(child, f"no process could be started ({error})")
                return
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        _supervisor_log.info("process %d started", child.process.pid)

    def _note_ready(self, child: _Child, pipe: socket.socket) -> None:
        with suppress(BlockingIOError):
            if said := pipe.recv(64):
                self._drain_seconds = float(said)
                self._ready = True
            else:
                child.close()

    def _ended(self, child: _Child, pid: int, code: int) -> None:
        if self._drain_deadline is not None:
            # A signal that stops finds no handler any more in a process that has drained and is about to exit.
            if code != 0 and -code not in SIGNALS and self._code == Exit.DONE:
                self._code = Exit.DEFECT
        elif code in _PERMANENT and not self._ready:
            _supervisor_log.error("process %d cannot work, and would fail again", pid)
            self._code = code
            self._drain()
        else:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
            self._back_off(child, f"process {pid} {how}")

    def _back_off(self, child: _Child, why: str) -> None:
        """Schedule the restart of a process, after a pause that grows from death to death."""
        now = time.monotonic()
        child.deaths = 1 if now - child.started >= HEALTHY_AFTER else child.deaths + 1
        pause = min(SHORTEST_PAUSE * 2 ** (child.deaths - 1), LONGEST_PAUSE)
        child.not_before = now + pause
        _supervisor_log.warning("%s; another one starts in %.1f s", why, pause)
