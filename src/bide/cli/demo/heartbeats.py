"""Heartbeats: a connection that sends nothing for 30 seconds is offline; every packet pushes that back."""

from __future__ import annotations

import asyncio
from functools import partial

import msgspec

from bide.app import Bide
from bide.cli.demo.story import Story
from bide.core.tasks import Task

_CONNECTIONS = 40
_SILENCE = "30s"
_GOES_SILENT = 0.01
"""How likely it is that a packet was the last for a while."""


class Connection(msgspec.Struct):
    device: str


class Heartbeats(Story):
    topics = ("heartbeat",)

    def define(self, app: Bide) -> None:
        @app.handler("heartbeat", keep_done="10m")
        async def offline(task: Task[Connection]) -> None:
            """Nothing was heard of it."""

        self.offline = offline

    async def play(self) -> None:
        async with asyncio.TaskGroup() as devices:
            for number in range(_CONNECTIONS):
                devices.create_task(self._device(f"device-{number:02}"))

    async def _device(self, name: str) -> None:
        while True:
            await self.patiently(partial(self._packet, name))
            await asyncio.sleep(self.chance.uniform(8, 22))
            if self.chance.random() < _GOES_SILENT:
                await asyncio.sleep(self.chance.uniform(45, 120))

    async def _packet(self, name: str) -> None:
        answer = await self.offline.reschedule(name, delay=_SILENCE)
        if not answer.ok:  # it is new, or comes back
            await self.offline.schedule(Connection(name), key=name, delay=_SILENCE)
