"""Where one cell is played: its strategy, its processes, its servers, and what came of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from bide.testing.proxy import Act, Chunk, FaultProxy
from bide_lab import journal
from bide_lab.actor import Spec, Step
from bide_lab.cast import LabFault, Player
from bide_lab.catalogue import catalogue, source_of
from bide_lab.judge import Verdict, judge
from bide_lab.strategy import Setting, Strategy

_LOOK = 0.02
"""Seconds between two looks at what has fired."""
MARGIN = 1.0
"""Seconds that a firing may be late beyond the strategy's own precision before it counts as not there."""


class Relay:
    """What stands between a strategy and one of its servers: it counts messages, and can cut the wire."""

    def __init__(self, host: str, port: int) -> None:
        self.proxy = FaultProxy(host, port)
        self.proxy.hook = self._seen
        self.to_server = 0

    def _seen(self, chunk: Chunk) -> Act:
        self.to_server += chunk.to_server
        return Act.FORWARD


class Stage:
    """One cell. `async with` it: at the end all processes have ended and what the strategy made is gone."""

    def __init__(self, strategy: type[Strategy], setting: Setting, *, relayed: bool = False) -> None:
        self.strategy = strategy
        self.setting = setting
        self.players: list[Player] = []
        self.relays: list[Relay] = []
        self._relayed = relayed
        self._direct = setting
        self.director = strategy(setting)
        """One that plays no part: it makes what the others need, looks at what there is, and takes it away."""
        self._stack = AsyncExitStack()
        self._read_to: dict[Path, int] = {}
        self._fired: set[bytes] = set()

    async def __aenter__(self) -> Stage:
        try:
            await self._set()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def _set(self) -> None:
        self._stack.push_async_callback(self.director.close)
        await self.director.open()
        self._stack.push_async_callback(self.director.clear)
        await self.director.prepare()
        if self._relayed and not self.strategy.direct:
            urls = {kind: await self._relay(url) for kind, url in self._direct.urls.items()}
            self.setting = replace(self._direct, urls=urls)
        self._stack.push_async_callback(self._stop_all)

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _relay(self, url: str) -> str:
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None, "the lab's URLs name their ports"
        relay = Relay(parts.hostname, parts.port)
        await self._stack.enter_async_context(relay.proxy)
        self.relays.append(relay)
        user = f"{parts.netloc.rpartition('@')[0]}@" if "@" in parts.netloc else ""
        return urlunsplit(parts._replace(netloc=f"{user}127.0.0.1:{relay.proxy.port}"))

    async def _stop_all(self) -> None:
        await asyncio.gather(*(player.stop() for player in self.players))

    @property
    def server_urls(self) -> Mapping[str, str]:
        """Where the servers are themselves, without a relay."""
        return self._direct.urls

    @property
    def patience(self) -> float:
        """Seconds after its time by which every firing has to be there, if nothing goes wrong."""
        return MARGIN + 1.5 * (self.strategy.period + self.setting.span(self.strategy.precision or 0.0))

    @property
    def hold(self) -> float:
        """Seconds after which what a dead consumer held has been given to another."""
        return self.strategy.hold + self.setting.span(self.strategy.time_out)

    def bearable(self, count: int) -> int:
        """So many tasks, or as many as the strategy is to be asked to hold."""
        return count if self.strategy.bears is None else min(count, self.strategy.bears)

    async def start(self, *roles: str, seconds: float = 0.0, slow: float = 0.0) -> list[Player]:
        """Consumers, one for each of `roles` or of all that the strategy has, in their order.

        Of a strategy within one process that is the one process, which is a client too. `seconds`: how long an effect
        takes; `slow`: that of a key which begins with "slow".
        """
        wanted = roles or tuple(self.strategy.roles)
        return [await self._start(role, seconds=seconds, slow=slow) for role in wanted]

    async def client(self) -> Player:
        """A process that calls the verbs."""
        if not self.strategy.in_process:
            return await self._start("")
        if not self.players:
            await self.start()
        return self.players[-1]

    async def _start(self, role: str, *, seconds: float = 0.0, slow: float = 0.0) -> Player:
        spec = self.spec(role, seconds=seconds, slow=slow)
        player = await Player.start(spec, log=self.setting.folder / f"log-{len(self.players)}")
        self.players.append(player)
        return player

    def spec(self, role: str, *, seconds: float = 0.0, slow: float = 0.0) -> Spec:
        """What the next process has to know."""
        return Spec(
            strategy=self.strategy.name,
            source="" if self.strategy.name in catalogue() else source_of(self.strategy),
            setting=self.setting, journal=self.setting.folder / f"journal-{len(self.players)}", role=role,
            seconds=seconds, slow=slow,
        )  # fmt: skip

    def fired(self) -> int:
        """Tasks that were done so far, in all processes, those that are gone too; a repeated one counts once."""
        for player in self.players:
            self._look(player.spec.journal)
        return len(self._fired)

    def _look(self, path: Path) -> None:
        whole = journal.whole_lines(path, since=self._read_to.get(path, 0))
        self._fired.update(line.split(b" ", 2)[1] for line in whole.splitlines() if line[:1] in b"!.")
        self._read_to[path] = self._read_to.get(path, 0) + len(whole)

    async def until_fired(self, count: int, *, by: float) -> bool:
        """Wait for so many tasks to be done, until `by` (seconds since the epoch) at most; whether there were."""
        while self.fired() < count:
            if time.time() > by:
                return False
            await asyncio.sleep(_LOOK)
        return True

    async def rest(self, seconds: float = 0.3) -> None:
        """Give what should not fire the time to do so, and what was done the time to be met again."""
        await asyncio.sleep(seconds + self.setting.span(self.strategy.again))

    def verdict(self, *, until: float | None = None) -> Verdict:
        """What all processes wrote down; what was due by `until` (seconds since the epoch) had to fire."""
        calls, firings = journal.read(player.spec.journal for player in self.players)
        return judge(calls, firings, until=round((time.time() if until is None else until) * 1e3) * 1_000_000)

    def calls(self) -> Sequence[journal.Call]:
        return journal.read(player.spec.journal for player in self.players)[0]

    def firings(self) -> Sequence[journal.Firing]:
        return journal.read(player.spec.journal for player in self.players)[1]

    def sound(self, answer: Mapping[str, Any]) -> None:
        """Raises `LabFault` if a call failed while nothing was done to anybody."""
        if answer.get("failed"):
            raise LabFault(f"{answer['failed']} calls failed, the first with {answer['failure']}")

    async def counts(self) -> dict[str, float]:
        """What the strategy's living processes counted, added up, and what it has left on the servers."""
        total: dict[str, float] = {}
        for player in self.players:
            if player.killed:
                continue
            used = await player.usage()
            for name, value in used["counts"].items():
                total[name] = total.get(name, 0) + value
        return {**total, **await self.director.left()}

    async def unharmed(self) -> None:
        """Raises `LabFault` if a consumer failed while nothing was done to anybody."""
        for player in self.players:
            if not player.killed and (await player.usage())["restarts"]:
                raise LabFault(f"{player.name} failed: {player.complaints()}")


def steps_at(rate: float, keys: Sequence[str], *, ahead: int) -> list[Step]:
    """One schedule for each key, `rate` a second, each due `ahead` milliseconds after it is made."""
    steps = []
    for number, key in enumerate(keys):
        at = round(number * 1000 / rate)
        steps.append(Step(at, "schedule", [(key, at + ahead)]))
    return steps


def keys_of(count: int, prefix: str = "k") -> list[str]:
    return [f"{prefix}{number:06d}" for number in range(count)]
