"""Worker processes that are killed in turn, and what one of them does."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from contextlib import suppress
from pathlib import Path

from bide.app import Bide
from bide.core.records import Record, Settlement
from bide.core.tasks import Task
from bide.settings import Settings
from bide_proofs.culling.lines import Delivered, Ended, Journal, Killed, Settled
from bide_proofs.trial import PATIENCE

TOPIC = "cull"
LEASE = 3.0
"""Seconds after which what a dead worker held comes back; the default of ten would only make the run longer."""
_LONGEST_WORK = 0.01


def work() -> None:
    """A worker process: its number and log are arguments, the store's URL comes by standard input, whose end stops it.

    Not as an argument, which everybody on the machine could read.
    """
    asyncio.run(_work(int(sys.argv[1]), Journal(Path(sys.argv[2])), sys.stdin.readline().strip()))


async def _work(number: int, journal: Journal, url: str) -> None:
    app, chance = app_on(url), random.Random(number)

    @app.handler(TOPIC)
    async def handle(task: Task[None]) -> None:
        at, record = time.time_ns(), task.record
        journal.say(Delivered(record.key, record.id, record.token, record.attempt, record.planned_at, at, number))
        await asyncio.sleep(chance.uniform(0, _LONGEST_WORK))

    def observe(record: Record, settlement: Settlement) -> None:
        journal.say(Settled(record.key, record.id, record.token, time.time_ns(), settlement.verdict))

    async with app, app.worker(observe=observe):
        sys.stdout.write("works\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.read)


def app_on(url: str) -> Bide:
    """With the shipped defaults but for the lease, whatever the environment says."""
    return Bide(url, settings=Settings(lease=int(LEASE * 1000), keep_done=0, keep_cancelled=0))


class Crew:
    """The worker processes."""

    def __init__(self, url: str, folder: Path, journal: Journal) -> None:
        self.kills = 0
        self._url = url
        self._folder = folder
        self._journal = journal
        self._members: list[tuple[int, asyncio.subprocess.Process]] = []
        self._started = 0

    async def start(self, count: int) -> None:
        """So many, and wait until all of them work."""
        for _ in range(count):
            self._members.append(await self._one())
        for _, process in self._members:
            assert process.stdout is not None
            if await asyncio.wait_for(process.stdout.readline(), PATIENCE) != b"works\n":
                raise SystemExit("a worker did not start; what it wrote is above")

    async def _one(self) -> tuple[int, asyncio.subprocess.Process]:
        self._started += 1
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", "from bide_proofs.culling.crew import work; work()"),
            *(str(self._started), str(self._folder / f"worker-{self._started}.log")),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        assert process.stdin is not None
        process.stdin.write(self._url.encode() + b"\n")
        return self._started, process

    async def cull(self, every: float, over: asyncio.Event) -> None:
        """Kill the one that has worked longest, and start another, again and again."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due += every
            with suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), due - loop.time())
            if over.is_set():
                return
            number, process = self._members.pop(0)
            if process.returncode is None:
                self._journal.say(Killed(number, time.time_ns()))
                process.kill()
                self.kills += 1
                await process.wait()
            else:
                self._journal.say(Ended(number, process.returncode))
            self._members.append(await self._one())

    async def stop(self) -> None:
        """Let them end; what they did not do by themselves and in time is noted."""
        for number, process in self._members:
            asked = process.returncode is None
            assert process.stdin is not None
            process.stdin.close()
            try:
                code = await asyncio.wait_for(process.wait(), PATIENCE)
            except TimeoutError:
                process.kill()
                code = await process.wait()
            if not asked or code != 0:
                self._journal.say(Ended(number, code))
