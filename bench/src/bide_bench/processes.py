"""Child processes, and the figures that Linux has of any process on this machine.

A process is named by its folder, `/proc/7`, and a thread of it by `/proc/7/task/9`. Reading raises OSError if there is
no such folder: the process has ended, runs on another machine, or the system has no `/proc`.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec

PATIENCE = 30.0
_PROC = Path("/proc")


class BenchFault(Exception):
    """The benchmark could not be carried out."""


def environment() -> dict[str, str]:
    """This process's environment, less what would configure bide: benchmarks use the shipped defaults."""
    return {name: value for name, value in os.environ.items() if not name.startswith("BIDE_")}


class Child:
    """A subprocess that leads a process group, so that `stop` and `kill` also reach its children.

    One that `talks` reads words on its input, whose end means `stop`, and writes JSON objects, one a line. The output
    of any other goes to its error file.
    """

    def __init__(self, what: str, process: asyncio.subprocess.Process, errors: Path | None) -> None:
        self.pid = process.pid
        self.settled = 0
        """The last reported number of outcomes that the store has accepted."""
        self.log_lines: list[bytes] = []
        """The lines with parts of its log."""
        self.began: Any = None
        """Its message when it was ready, if awaited."""
        self._what = what
        self._process = process
        self._errors = errors
        self._messages: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._reading = asyncio.create_task(self._read(), name=f"reads {what}")

    @classmethod
    async def start(
        cls, what: str, *command: str, cwd: Path | None = None, env: Mapping[str, str] | None = None,
        errors: Path | None = None, talks: bool = True,
    ) -> Self:  # fmt: skip
        """Start `command`. `errors`: the file for what it writes on stderr, and on stdout if it does not talk."""
        pipe = asyncio.subprocess.PIPE
        with errors.open("wb") if errors else nullcontext() as file:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=pipe if talks else asyncio.subprocess.DEVNULL, stdout=pipe if talks else file,
                stderr=file, cwd=cwd, env=environment() if env is None else env, start_new_session=True, limit=2**26,
            )  # fmt: skip
        return cls(what, process, errors)

    @classmethod
    @asynccontextmanager
    async def running(
        cls, what: str, *command: str, ready: str, within: float = PATIENCE, cwd: Path | None = None
    ) -> AsyncIterator[Self]:
        """Run one that talks, from its message `ready` until it is stopped. Raises BenchFault."""
        child = await cls.start(what, *command, cwd=cwd)
        try:
            child.began = await child.receive(ready, within=within)
            yield child
        finally:
            await child.stop()

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    def used(self) -> float:
        """Seconds of processor time so far, of all its threads, in steps of 10 ms. Raises OSError."""
        return stat(_PROC / str(self.pid)).used

    def send(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(word.encode() + b"\n")

    async def ask(self, word: str, *, within: float = PATIENCE) -> Any:
        """Send `word`, and return the answer. Raises BenchFault."""
        self.send(word)
        return await self.receive(word, within=within)

    async def receive(self, word: str, *, within: float = PATIENCE) -> Any:
        """Wait for a message with the field `word`. Raises BenchFault if it ends first, or takes too long."""
        while word not in (message := await self.receive_any(within=within)):
            pass
        return message[word]

    async def receive_any(self, *, within: float = PATIENCE) -> dict[str, Any]:
        """Wait for the next message. Raises BenchFault."""
        try:
            message = await asyncio.wait_for(self._messages.get(), within)
        except TimeoutError:
            raise BenchFault(f"{self._what} sent nothing for {within:.0f} s") from None
        if message is None:
            raise self.ended()
        return message

    def ended(self) -> BenchFault:
        """The error for one that has ended, with the last line of its output."""
        lines = self._errors.read_text(encoding="utf-8", errors="replace").split("\n") if self._errors else []
        last = next((line.strip() for line in reversed(lines) if line.strip()), "its output is above")
        return BenchFault(f"{self._what} ended by itself: {last}")

    def kill(self) -> None:
        """`kill -9`, for its whole group."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    async def stop(self, *, within: float = PATIENCE) -> None:
        """End its input, or send SIGTERM, and wait. Raises BenchFault where it has to be killed."""
        with suppress(ProcessLookupError):
            if self._process.stdin is not None:
                self._process.stdin.close()
            elif self._process.returncode is None:
                os.killpg(self.pid, signal.SIGTERM)
        try:
            await asyncio.wait_for(self._process.wait(), within)
        except TimeoutError:
            raise BenchFault(f"{self._what} did not stop within {within:.0f} s") from None
        finally:
            self.kill()  # and children that outlived it
            await self._process.wait()
            await self._reading

    async def _read(self) -> None:
        if self._process.stdout is not None:
            async for line in self._process.stdout:
                if not line.endswith(b"\n"):
                    break  # `kill -9` truncated it
                if line.startswith(b'{"log":'):
                    self.log_lines.append(line)
                    continue
                message: dict[str, Any] = msgspec.json.decode(line)
                if "settled" in message:
                    self.settled = message["settled"]
                else:
                    self._messages.put_nowait(message)
            self._messages.put_nowait(None)  # nothing follows


class Stat(NamedTuple):
    """The fields of `/proc/7/stat` that are used here. Times in seconds."""

    name: str
    state: str
    parent: int
    used: float
    """Processor time of all threads, in steps of some milliseconds."""
    waited: float
    """Processor time of children that have ended and were waited for."""


def stat(place: Path) -> Stat:
    """Read `/proc/7/stat`. Raises OSError if there is no such process."""
    text = (place / "stat").read_text(encoding="utf-8", errors="replace")
    name, _, rest = text.partition("(")[2].rpartition(")")
    fields = rest.split()  # from the third on
    tick = os.sysconf("SC_CLK_TCK")
    used, waited = (sum(map(int, fields[first : first + 2])) / tick for first in (11, 13))
    return Stat(name, fields[0], int(fields[1]), used, waited)


def spent(place: Path) -> float:
    """Processor seconds, to the nanosecond; for a process, of its main thread. Raises OSError."""
    return int((place / "schedstat").read_text(encoding="ascii").split()[0]) / 1e9


def resident_bytes(place: Path) -> int:
    """The resident memory of a process; 0 if unknown."""
    try:
        return int((place / "statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def process_named(pid: int, names: Collection[str]) -> Path | None:
    """The process with this id; None if it has none of these names: then the server runs elsewhere."""
    try:
        return _PROC / str(pid) if stat(_PROC / str(pid)).name in names else None
    except OSError:
        return None


def family(parent: Path) -> list[Path]:
    """The process and its children."""
    found = [parent]
    for place in _PROC.glob("[0-9]*"):
        with suppress(OSError):
            if stat(place).parent == int(parent.name):
                found.append(place)
    return found


def spent_by_family(parent: Path) -> float:
    """Processor seconds of all threads of the process and its children, ended children too. Raises OSError."""
    total = stat(parent).waited
    for place in family(parent):
        for thread in (place / "task").glob("*"):
            with suppress(OSError):  # it ended a moment ago
                total += spent(thread)
    return total
