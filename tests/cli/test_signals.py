"""`bide work`, and what signals do to it and to `bide serve`, as docs/deploy.md says: real processes and signals."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from tests.cli.conftest import CommandLine, Write
from tests.waiting import wait_until

from bide.cli.exits import Exit

SHOP = """
import asyncio, os, subprocess, time
from bide import Bide, Dead, Task

app = Bide(lease=os.environ.get("SHOP_LEASE", "10m"), grace=os.environ.get("SHOP_GRACE", "10m"))

def told(what, key):
    with open("told.txt", "a") as file:
        file.write(f"{what} {key} {os.getpid()}\\n")

@app.handler("work", retry="never")
async def work(task: Task[dict]) -> None:
    told("begun", task.key)
    while not os.path.exists("go"):
        if task.payload.get("blocks"):
            time.sleep(0.05)
        try:
            await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            if not task.payload.get("deaf"):
                raise
    if task.payload.get("dies"):
        raise Dead("as it was told")
    told("ended", task.key)

@app.handler("other")
async def other(task: Task[None]) -> None:
    told("other", task.key)

@app.handler("leave")
async def leave(task: Task[None]) -> None:
    subprocess.run(["sh", "-c", "sleep 0.05 & echo $! > orphan.tmp; mv orphan.tmp orphan"])

told("loaded", "-")
"""
SHORT = SHOP + "\nimport bide.cli.exits\nbide.cli.exits.SETTLING = 0.1\n"
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
Begin = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def begin(line: CommandLine, write: Write) -> Iterator[Begin]:
    """Start `bide ...`; whatever is left of it ends with the test."""
    write("shop.py", SHOP)
    begun: list[subprocess.Popen[str]] = []

    def start(*args: str, by: Sequence[str] = ("-m", "bide"), log: int | None = None) -> subprocess.Popen[str]:
        with (line.directory / "said.txt").open("w") as said:
            process = subprocess.Popen(
                [sys.executable, *by, *args], stderr=log or said, text=True, start_new_session=True,
                preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # under nohup it would be ignored
            )  # fmt: skip
        begun.append(process)
        return process

    yield start
    for process in begun:
        for pid in children_of(process):
            os.kill(pid, signal.SIGKILL)
        process.kill()
        process.wait()


def children_of(process: subprocess.Popen[str]) -> list[int]:
    try:
        text = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    except OSError:
        return []
    return [int(one) for one in text.split()]


def tell(process: subprocess.Popen[str], number: int, to: str) -> None:
    """Send a signal to the process; if `to` is a unit, to its children too."""
    for pid in [process.pid, *(children_of(process) if to == "a unit" else [])]:
        with suppress(ProcessLookupError):  # the first one has drained the others
            os.kill(pid, number)


def stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    assert process.wait(60) == Exit.DONE


def states_of(pid: int) -> set[str]:
    """Of its threads. A signal that stops reaches the second one only when the first one has run again."""
    return {stat.read_text().rpartition(") ")[2][0] for stat in Path(f"/proc/{pid}/task").glob("*/stat")}


class Ground:
    """What the processes of a test have written."""

    def __init__(self, line: CommandLine) -> None:
        self.line = line

    def told(self, what: str, number: int) -> list[int]:
        """Wait until `number` processes or tasks have told `what`; the processes."""

        def found() -> list[int]:
            lines = (self.line.directory / "told.txt").read_text().splitlines()
            pids = [int(one.split()[2]) for one in lines if one.startswith(what)]
            return pids if len(pids) >= number else []

        return wait_until(found, f"{number} times {what}")

    def said(self, text: str) -> None:
        wait_until(lambda: text in (self.line.directory / "said.txt").read_text(), text)

    def schedule(self, number: int, payload: str = "{}") -> None:
        for key in range(number):
            self.line.run("schedule", "work", payload, "--key", str(key), "--delay", "0s")

    def go(self) -> None:
        """Let the handlers come to their end."""
        (self.line.directory / "go").touch()


@pytest.fixture
def ground(line: CommandLine) -> Ground:
    return Ground(line)


@pytest.mark.parametrize(
    ("to", "number"), [("the process", signal.SIGTERM), ("the supervisor", signal.SIGINT), ("a unit", signal.SIGHUP)]
)
def test_the_first_signal_drains(begin: Begin, ground: Ground, number: signal.Signals, to: str) -> None:
    ground.schedule(2)
    process = begin("work", "shop:app", *(() if to == "the process" else ("--processes", "2")))
    ground.told("begun", 2)
    tell(process, number, to)
    ground.said("draining")
    assert process.poll() is None
    ground.go()
    assert process.wait(60) == Exit.DONE
    assert len(ground.told("ended", 2)) == 2


def test_a_unit_at_rest_ends(begin: Begin, ground: Ground) -> None:
    ground.go()
    ground.schedule(1)
    process = begin("work", "shop:app", "--processes", "2")
    ground.told("ended", 1)
    tell(process, signal.SIGTERM, "a unit")
    assert process.wait(60) == Exit.DONE


@pytest.mark.parametrize(("number", "processes"), [*((number, "1") for number in STOPS), (signal.SIGTERM, "2")])
def test_a_second_signal_ends_at_once(
    line: CommandLine, begin: Begin, ground: Ground, number: signal.Signals, processes: str
) -> None:
    ground.schedule(1)
    process = begin("work", "shop:app", "--processes", processes)
    ground.told("begun", 1)
    process.send_signal(number)
    ground.said("draining")
    process.send_signal(number)
    assert process.wait(60) == 128 + number
    ground.said(f"{number.name} again: ending at once")
    assert line.one("show", "work", "0")["task"]["state"] == "leased"


def test_a_second_signal_to_a_child_lets_it_drain(begin: Begin, ground: Ground) -> None:
    ground.schedule(1)
    process = begin("work", "shop:app", "--processes", "2")
    [child] = ground.told("begun", 1)
    for _ in range(2):
        os.kill(child, signal.SIGTERM)
        ground.said("SIGTERM: draining")
    ground.go()
    assert ground.told("ended", 1) == [child]
    ground.said(f"process {child} ended with 0; another one starts")
    stop(process)


@pytest.mark.parametrize(("number", "processes"), [(signal.SIGINT, "1"), (signal.SIGTERM, "2")])
def test_a_signal_while_the_app_is_loaded_ends_at_once(
    begin: Begin, ground: Ground, write: Write, number: signal.Signals, processes: str
) -> None:
    write("shop.py", SHOP + "\nwhile True: time.sleep(0.05)\n")
    process = begin("work", "shop:app", "--processes", processes)
    ground.told("loaded", 1)
    process.send_signal(number)
    assert process.wait(60) == Exit.DONE


def test_a_process_that_is_ended_while_it_loads_the_app_is_replaced(begin: Begin, ground: Ground, write: Write) -> None:
    write("shop.py", SHOP + "\nwhile not os.path.exists('go'): time.sleep(0.05)\n")
    process = begin("work", "shop:app", "--processes", "2")
    [first] = ground.told("loaded", 1)
    os.kill(first, signal.SIGTERM)
    ground.told("loaded", 2)
    ground.said(f"process {first} ended with 0; another one starts")
    ground.go()
    stop(process)


@pytest.mark.parametrize(("after", "to"), [(0, "a unit"), (1, "the supervisor"), (3, "a unit")])
def test_a_signal_while_processes_are_started_reaches_all(begin: Begin, after: int, to: str) -> None:
    process = begin("work", "shop:app", "--processes", "5")
    wait_until(lambda: len(children_of(process)) > after, f"{after + 1} processes")
    tell(process, signal.SIGTERM, to)
    assert process.wait(60) == Exit.DONE


LAST = """
class _Last:
    def __init__(self):
        self.file, self.os, self.sleep = open("told.txt", "ab", 0), os, time.sleep

    def __del__(self):  # the handlers of signals are gone by then
        self.file.write(b"gone - %d\\n" % self.os.getpid())
        while not self.os.path.exists("over"):
            self.sleep(0.05)

_last = _Last()
"""


def test_a_signal_to_a_process_that_is_about_to_exit_is_no_defect(
    line: CommandLine, begin: Begin, ground: Ground, write: Write
) -> None:
    write("shop.py", SHOP + LAST)
    ground.go()
    ground.schedule(1)
    process = begin("work", "shop:app", "--processes", "2")
    ground.told("ended", 1)
    process.terminate()
    os.kill(ground.told("gone", 1)[0], signal.SIGTERM)
    (line.directory / "over").touch()
    assert process.wait(60) == Exit.DONE


@pytest.mark.parametrize(
    ("payload", "processes"),
    [('{"deaf": true}', "1"), ('{"blocks": true, "deaf": true}', "1"), ('{"blocks": true, "deaf": true}', "2")],
)
def test_what_does_not_end_is_bounded_by_the_grace(
    begin: Begin, ground: Ground, write: Write, monkeypatch: pytest.MonkeyPatch, payload: str, processes: str
) -> None:
    write("shop.py", SHORT)
    monkeypatch.setenv("SHOP_GRACE", "100ms")
    ground.schedule(1, payload)
    process = begin("work", "shop:app", "--processes", processes)
    ground.told("begun", 1)
    process.terminate()
    assert process.wait(60) == Exit.DEFECT
    ground.said("not drained after 0.2 s: ending at once")


def test_a_frozen_process_is_bounded_by_the_grace(
    begin: Begin, ground: Ground, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("shop.py", SHORT)
    monkeypatch.setenv("SHOP_GRACE", "100ms")
    process = begin("work", "shop:app", "--processes", "2")
    [*_, frozen] = ground.told("loaded", 2)
    os.kill(frozen, signal.SIGSTOP)
    wait_until(lambda: states_of(frozen) == {"T"}, "all its threads to stand still")
    process.terminate()
    assert process.wait(60) == Exit.DEFECT
    ground.said("not drained in time")


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """A server that is connected to, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(60)
        yield listening


@pytest.mark.parametrize("again", [False, True], ids=["once", "twice"])
def test_serve_drains_its_webhooks(begin: Begin, ground: Ground, silent: socket.socket, again: bool) -> None:
    place = f"127.0.0.1:{silent.getsockname()[1]}"
    process = begin("serve", "--port", "0", "--webhook", f"work=http://{place}", "--allow", place)
    ground.schedule(1)
    webhook, _ = silent.accept()
    with webhook:
        process.send_signal(signal.SIGINT)
        ground.said("draining")
        assert process.poll() is None
        if again:
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == Exit.INTERRUPTED
            ground.said("SIGINT again: ending at once")
        else:
            webhook.send(b"HTTP/1.1 204 No Content\r\n\r\n")
            assert process.wait(60) == Exit.DONE
            ground.said("has stopped")


def test_serve_at_rest_ends(begin: Begin, ground: Ground) -> None:
    process = begin("serve", "--port", "0")
    ground.said("bide serve: http://127.0.0.1:")
    process.send_signal(signal.SIGHUP)
    assert process.wait(60) == Exit.DONE


@pytest.mark.parametrize(
    ("number", "command"), [(signal.SIGTERM, ["serve", "--port", "0"]), (signal.SIGINT, ["work", "shop:app"])]
)
def test_a_signal_while_the_store_is_opened_ends_at_once(
    begin: Begin, silent: socket.socket, number: signal.Signals, command: list[str]
) -> None:
    process = begin(*command, "--store", f"redis://127.0.0.1:{silent.getsockname()[1]}")
    connection, _ = silent.accept()
    with connection:
        process.send_signal(number)
        assert process.wait(60) == Exit.DONE


def test_nohup_is_heeded(begin: Begin, ground: Ground) -> None:
    ground.schedule(1)
    ignoring = "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); os.execv(sys.executable, "
    process = begin("work", "shop:app", by=["-c", ignoring + "[sys.executable, '-m', 'bide', *sys.argv[1:]])"])
    ground.told("begun", 1)
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGHUP)
    ground.go()
    ground.told("ended", 1)
    stop(process)


def test_the_supervisor_reaps_what_handlers_leave_behind(begin: Begin, ground: Ground) -> None:
    """As process 1 it is given every orphan; here as the one that asks for them."""
    asks = "import ctypes, os, sys; ctypes.CDLL(None).prctl(36, 1); os.execv(sys.executable, "
    process = begin(
        "work", "shop:app", "--processes", "2", by=["-c", asks + "[sys.executable, '-m', 'bide', *sys.argv[1:]])"]
    )
    ground.line.run("schedule", "leave", "--delay", "0s")
    orphan = ground.line.directory / "orphan"
    pid = wait_until(orphan.read_text, "an orphan").strip()
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), "the orphan to be reaped")
    stop(process)


def test_what_dies_is_logged_and_no_error_of_a_handler_forges_a_line_or_moves_a_terminal(
    line: CommandLine, begin: Begin, ground: Ground, write: Write
) -> None:
    raises = "raise ValueError('\\x1b[2Jred\\r\\nforged')"
    write("shop.py", SHOP.replace('raise Dead("as it was told")', raises))
    ground.go()
    ground.schedule(1, '{"dies": true}')
    process = begin("work", "shop:app")
    ground.said("ERROR bide.worker")
    ground.said("work/0, attempt 1, is dead")
    ground.said(f"shop:app: leave, other, work from {line.url}, pid {process.pid}")
    stop(process)
    said = (line.directory / "said.txt").read_bytes()
    assert b"\\x1b[2Jred" in said
    assert b"Traceback" in said
    assert not {0x1B, 0x0D} & set(said)
    assert not [one for one in said.split(b"\n") if one.startswith(b"forged")]


def test_a_worker_goes_on_without_a_reader_of_its_log(line: CommandLine, begin: Begin, ground: Ground) -> None:
    line.run("schedule", "other", "--delay", "0s")
    process = begin("work", "shop:app", "--processes", "2", log=subprocess.PIPE)
    assert process.stderr is not None
    process.stderr.close()
    ground.told("other", 1)
    stop(process)


def test_what_was_held_comes_back(begin: Begin, ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_LEASE", "1s")
    ground.schedule(1)
    first = begin("work", "shop:app")
    ground.told("begun", 1)
    for _ in range(2):
        first.send_signal(signal.SIGINT)
        ground.said("SIGINT: draining")
    assert first.wait(60) == Exit.INTERRUPTED
    again = begin("work", "shop:app", "--topic", "work")
    assert ground.told("begun", 2) == [first.pid, again.pid]


def test_only_some_topics(line: CommandLine, begin: Begin, ground: Ground) -> None:
    ground.schedule(1)
    line.run("schedule", "other", "--delay", "0s")
    process = begin("work", "shop:app", "--topic", "other", "--uvloop", "--quiet")
    ground.told("other", 1)
    assert "begun" not in (line.directory / "told.txt").read_text()
    assert "no live worker has a handler" in line.run("doctor", code=1).stdout
    assert "--topic: 'more' is not accepted; give topics that have a handler: leave, other, work" in line.error(
        "work", "shop:app", "--topic", "more"
    )
    stop(process)
    assert (line.directory / "said.txt").read_text() == ""


def two_children_of(process: subprocess.Popen[str], *, but: int = 0) -> list[int]:
    def both() -> list[int]:
        found = children_of(process)
        return found if len(found) == 2 and but not in found else []

    return wait_until(both, "two processes")


def test_two_processes_and_one_that_is_killed(begin: Begin, ground: Ground) -> None:
    process = begin("work", "shop:app", "--processes", "2")
    first, second = two_children_of(process)
    os.kill(first, signal.SIGKILL)
    assert second in two_children_of(process, but=first)
    ground.schedule(1)
    ground.told("begun", 1)
    process.terminate()
    ground.said("draining")
    ground.go()
    assert process.wait(60) == Exit.DONE
    ground.said(f"process {first} was killed by SIGKILL; another one starts in 0.5 s")
    ground.told("ended", 1)


def test_a_supervisor_loads_nothing_of_the_app_and_when_it_is_killed_its_processes_drain(
    begin: Begin, ground: Ground
) -> None:
    process = begin("work", "shop:app", "--processes", "2")
    children = set(ground.told("loaded", 2))
    assert children == set(children_of(process))
    ground.said(f"leave, other, work from {ground.line.url}, 2 processes under pid {process.pid}")
    ground.schedule(1)
    ground.told("begun", 1)
    process.kill()
    ground.go()
    ground.told("ended", 1)
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), "both to end")


def test_what_cannot_start_is_not_started_for_ever(begin: Begin, ground: Ground, write: Write) -> None:
    broken = SHOP + "\nimport sys\nif '--supervised' in sys.argv: raise RuntimeError('only in the children')\n"
    write("shop.py", broken)
    process = begin("work", "shop:app", "--processes", "2")
    assert process.wait(60) == Exit.SETUP
    ground.said("shop: cannot be imported: RuntimeError: only in the children")
    ground.said("would fail again")


def test_an_app_without_handlers_or_with_another_store(line: CommandLine, write: Write) -> None:
    write("empty_shop.py", "from bide import Bide\napp = Bide()\n")
    assert "no handlers" in line.error("work", "empty_shop:app", code=Exit.SETUP)
    write("own_shop.py", "from bide import Bide\napp = Bide('sqlite:///own.db')\n")
    said = line.error("--store", "sqlite:///copy.db", "work", "own_shop:app")
    assert "--store: 'sqlite:///copy.db' is not accepted; give none, since the app names a store" in said
    write("broken_shop.py", "import nothing_like_it\n")
    assert "nothing_like_it" in line.error("work", "broken_shop:app", code=Exit.SETUP)
    write("script.py", "raise SystemExit(0)\n")
    assert "script: cannot be imported: SystemExit: 0" in line.error("work", "script:app", code=Exit.SETUP)
