"""The two instances of `bide serve`: started, killed in turn, and started again."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import aiohttp

from bide_proofs.harness.command import PATIENCE
from bide_proofs.serving.lines import Killed, Line, Wrong
from bide_proofs.serving.receiver import INSTANCE_HEADER, Receiver

TOPIC = "serving"
LEASE = 3.0
"""Seconds after which what a dead instance held comes back; the default of ten would only make the run longer."""
COUNT = 2
_TAIL = 2_000
_PORTS = (11_000, 22_000)
"""Below those that systems hand out to clients, so that nobody has taken one when its instance is started again."""
_GUARD = 'trap "" HUP INT TERM; read -r dismissed || kill -KILL "$1"'
"""Ends the instance if this process ends without having done so."""
_ERROR = re.compile(r"^\S+ \S+ (ERROR|CRITICAL) |^Traceback ", re.MULTILINE)

_CONFIG = """
keep_most = 10000000

[webhooks]
allow = ["{place}"]

[topics.{topic}]
webhook = "http://{place}/hook"
secrets_file = "{secrets}"
headers = {{ {header} = "{serial}" }}
retry = {{ policy = "exponential", first = "100ms", longest = "1s", tries = 100 }}
"""


class _Running:
    """One process."""

    def __init__(self, serial: int, process: asyncio.subprocess.Process, log: Path) -> None:
        self.serial = serial
        self.process = process
        self.log = log
        self.began = time.monotonic()
        self.guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, "guard", str(process.pid)],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    def over(self) -> None:
        """It has ended, and its number may be another's now."""
        with suppress(BrokenPipeError):
            self.guard.communicate(b"dismissed\n")


class Instances:
    """Both, each at a port of its own that it keeps."""

    def __init__(self, store: str, receiver: Receiver, folder: Path, note: Callable[[Line], None]) -> None:
        self.ports = [_free_port() for _ in range(COUNT)]
        self.urls = [f"http://127.0.0.1:{port}" for port in self.ports]
        self.kills = 0
        self.ready_seconds: list[float] = []
        """From each start to the first answer."""
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith("BIDE_")}
        self._environment |= {"BIDE_STORE": store, "BIDE_LEASE": f"{LEASE:g}s"}
        self._receiver = receiver
        self._folder = folder
        self._note = note
        self._serials = itertools.count(1)
        self._running: list[_Running] = []
        self._awaited: set[asyncio.Task[None]] = set()
        self._secrets = folder / "secrets"
        self._secrets.write_text(receiver.secret + "\n", encoding="ascii")

    async def start(self) -> None:
        """Both, until they answer."""
        for place in range(COUNT):
            self._running.append(await self._one(place))
        await self.ready()
        ended = [one for one in self._running if one.process.returncode is not None]
        if ended:
            raise SystemExit(f"an instance did not start:\n{_tail(ended[0].log)}")

    async def _one(self, place: int) -> _Running:
        serial = next(self._serials)
        config, log = self._folder / f"{serial}.toml", self._folder / f"{serial}.log"
        config.write_text(
            _CONFIG.format(
                place=self._receiver.place, topic=TOPIC, secrets=self._secrets, header=INSTANCE_HEADER, serial=serial
            ),
            encoding="utf-8",
        )
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "bide", "serve", "--port", str(self.ports[place]), "--config", str(config)),
                *("--log-level", "warning"),
                env=self._environment, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip
        running = _Running(serial, process, log)
        awaited = asyncio.create_task(self._await_answer(running, self.urls[place]))
        self._awaited.add(awaited)
        awaited.add_done_callback(self._awaited.discard)
        return running

    async def _await_answer(self, running: _Running, url: str) -> None:
        """Until it answers, or has ended."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10.0)) as session:
            while running.process.returncode is None and time.monotonic() < running.began + PATIENCE:
                with suppress(aiohttp.ClientError, OSError):
                    async with session.get(f"{url}/v1/tasks?topic={TOPIC}&limit=1") as answer:
                        if answer.status == 200:
                            self.ready_seconds.append(time.monotonic() - running.began)
                            return
                await asyncio.sleep(0.02)

    async def ready(self) -> None:
        """Until all that were started answer."""
        while self._awaited:
            await asyncio.wait(self._awaited)

    async def cull(self, every: float, over: asyncio.Event) -> None:
        """Kill one and start it again, then the other, and so on; each only once both have answered.

        So one is always there, however long the other takes to start.
        """
        loop = asyncio.get_running_loop()
        due = loop.time()
        for place in itertools.cycle(range(COUNT)):
            await self.ready()
            due = max(due + every, loop.time())
            with suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), due - loop.time())
            if over.is_set():
                return
            running = self._running[place]
            if running.process.returncode is None:
                self._note(Killed(running.serial, time.monotonic_ns()))
                running.process.kill()
                self.kills += 1
                await running.process.wait()
            else:
                self._blame(running)
            running.over()
            self._read_log(running)
            self._running[place] = await self._one(place)

    async def stop(self) -> None:
        """Let both end; what they did not do by themselves and in time is noted."""
        for running in self._running:
            if running.process.returncode is not None:
                self._blame(running)
                continue
            running.process.terminate()
            try:
                await asyncio.wait_for(running.process.wait(), PATIENCE)
            except TimeoutError:
                running.process.kill()
                await running.process.wait()
            if running.process.returncode != 0:
                self._blame(running)
        for running in self._running:
            running.over()
            self._read_log(running)
        self._running.clear()

    def _blame(self, running: _Running) -> None:
        what = f"instance {running.serial} ended with {running.process.returncode}"
        self._note(Wrong("instance_ended", f"{what}:\n{_tail(running.log)}"))

    def _read_log(self, running: _Running) -> None:
        said = running.log.read_text(encoding="utf-8", errors="replace")
        for found in _ERROR.finditer(said):
            self._note(Wrong("logged", f"instance {running.serial}: {said[found.start() : found.start() + _TAIL]}"))


def _tail(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-_TAIL:]


def _free_port() -> int:
    """One that nobody has at this moment; whoever is quicker to take it makes the start fail."""
    chance = random.SystemRandom()
    for _ in range(1_000):
        port = chance.randrange(*_PORTS)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return port
    raise OSError(f"no free port was found from {_PORTS[0]} to {_PORTS[1]}")
