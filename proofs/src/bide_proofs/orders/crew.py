"""The processes of a run: clients that place orders, workers that carry out their timers, and who kills them."""

from __future__ import annotations

import asyncio
import os
import random
import sys
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from bide.app import Bide
from bide.core.errors import StoreError
from bide.core.tasks import Task
from bide.settings import Settings
from bide_proofs.harness.command import PATIENCE
from bide_proofs.orders.databases import EFFECT, PLACED, database_of
from bide_proofs.orders.judge import COMMITTED, ROLLED_BACK

TOPIC = "orders.close"
LEASE = 2.0
"""Seconds after which what a dead worker held comes back."""
_LONGEST_DELAY = 1.0
_SIDE_BY_SIDE = 4


def app_on(url: str) -> Bide:
    """With the shipped defaults but for the lease, whatever the environment says."""
    return Bide(url, settings=Settings(lease=int(LEASE * 1000), keep_done=0, keep_cancelled=0))


class Words:
    """Lines that survive the death of who wrote them: one unbuffered append each."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def say(self, word: str, number: int) -> None:
        os.write(self._file, f"{number} {word}\n".encode())


def read(path: Path) -> dict[int, str]:
    """The last word about each order."""
    if not path.exists():
        return {}
    lines = (line.partition(" ") for line in path.read_text().splitlines())
    return {int(number): word for number, _, word in lines}


def work() -> None:
    """A worker process: the name of the tables is its argument, the URL comes by standard input, whose end stops it."""
    asyncio.run(_work(sys.argv[1], sys.stdin.readline().strip()))


async def _work(name: str, url: str) -> None:
    app, database = app_on(url), database_of(url, name)

    @app.handler(TOPIC)
    async def close(task: Task[Any]) -> None:
        async with task.transaction() as connection:
            await database.write(connection, EFFECT, int(task.key))

    async with app, app.worker():
        await asyncio.to_thread(sys.stdin.read)


def order() -> None:
    """A client process: the name of the tables, its log, and which orders are its own."""
    name, log, first, last, step = sys.argv[1:]
    numbers = range(int(first), int(last), int(step))
    asyncio.run(_order(name, Path(log), numbers, sys.stdin.readline().strip()))


async def _order(name: str, log: Path, numbers: range, url: str) -> None:
    begun, words, database = read(log), Words(log), database_of(url, name)
    left = iter([number for number in numbers if number not in begun])
    chance = random.Random()

    async def place(connection: Any) -> None:
        for number in left:
            words.say("begun", number)
            await database.begin(connection)
            try:
                await database.write(connection, PLACED, number)
                delay = timedelta(seconds=chance.uniform(0, _LONGEST_DELAY))
                await app.using(connection).schedule(TOPIC, key=f"{number}", group=f"order-{number}", delay=delay)
            except StoreError:  # on SQLite others may write for long
                await database.end(connection, "ROLLBACK")
                words.say(ROLLED_BACK, number)
                continue
            commits = chance.random() < 0.5
            await database.end(connection, "COMMIT" if commits else "ROLLBACK")
            words.say(COMMITTED if commits else ROLLED_BACK, number)

    async with app_on(url) as app:
        await asyncio.gather(*[place(await database.connect()) for _ in range(_SIDE_BY_SIDE)])


class Crew:
    """Clients and workers, some of whom die."""

    def __init__(self, url: str, name: str, folder: Path, chance: random.Random) -> None:
        self.killed = {"client": 0, "worker": 0}
        self.ended: list[str] = []
        self._url = url
        self._name = name
        self._folder = folder
        self._chance = chance
        self._workers: list[asyncio.subprocess.Process] = []
        self._clients: dict[int, asyncio.subprocess.Process] = {}
        self._shares: list[list[str]] = []

    @property
    def logs(self) -> list[Path]:
        return [Path(log) for _, log, *_ in self._shares]

    async def start(self, orders: int, clients: int, workers: int) -> None:
        for _ in range(workers):
            self._workers.append(await self._one("work", self._name))
        for number in range(clients):
            log = str(self._folder / f"client-{number}.log")
            self._shares.append([self._name, log, str(number), str(orders), str(clients)])
            self._clients[number] = await self._one("order", *self._shares[number])

    async def _one(self, what: str, *arguments: str) -> asyncio.subprocess.Process:
        """The URL does not go by the arguments, which everybody on the machine could read."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", f"from bide_proofs.orders.crew import {what}; {what}()", *arguments),
            stdin=asyncio.subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        assert process.stdin is not None
        process.stdin.write(self._url.encode() + b"\n")
        return process

    async def cull(self, every: float) -> None:
        """Kill one of them again and again, until all orders are placed."""
        while self._clients:
            ended = asyncio.gather(*(process.wait() for process in self._clients.values()))
            with suppress(TimeoutError):
                await asyncio.wait_for(ended, every * self._chance.uniform(0.5, 1.5))
            for number, process in list(self._clients.items()):
                if process.returncode is not None:
                    del self._clients[number]
                    if process.returncode != 0:
                        self.ended.append(f"client {number} ended with {process.returncode}")
            if self._clients and self._chance.random() < 0.5:
                number = self._chance.choice(list(self._clients))
                if await self._kill(self._clients[number], "client"):
                    self._clients[number] = await self._one("order", *self._shares[number])
            else:
                await self.kill_worker()

    async def kill_worker(self) -> None:
        place = self._chance.randrange(len(self._workers))
        if await self._kill(self._workers[place], "worker"):
            self._workers[place] = await self._one("work", self._name)

    async def _kill(self, process: asyncio.subprocess.Process, kind: str) -> bool:
        if process.returncode is not None:
            return False
        process.kill()
        self.killed[kind] += 1
        await process.wait()
        return True

    async def stop(self) -> None:
        """Let the workers end."""
        for process in self._workers:
            assert process.stdin is not None
            process.stdin.close()
            try:
                code = await asyncio.wait_for(process.wait(), PATIENCE)
            except TimeoutError:
                process.kill()
                code = await process.wait()
            if code != 0:
                self.ended.append(f"a worker ended with {code}")
        for process in self._clients.values():
            process.kill()
            await process.wait()
