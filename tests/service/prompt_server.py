"""uvicorn, ended at once: of itself it looks ten times a second whether it is to end, and then waits for 0.1 s."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

import uvicorn
from tests.waiting import until

_TICK = 0.1


class PromptServer(uvicorn.Server):
    """A server that is told to end. To be made in the loop in which it runs."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._told = asyncio.Event()

    def end(self) -> None:
        """Takes no more connections; those that are idle are closed, and what was asked is answered."""
        self.should_exit = True
        self._told.set()

    async def main_loop(self) -> None:
        counter = 0
        while not await self.on_tick(counter):
            counter += 1
            with suppress(TimeoutError):
                await asyncio.wait_for(self._told.wait(), _TICK)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for one in sockets or []:
            one.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        try:
            await until(lambda: not self._busy, "connections to end", patience=_TICK)
        except AssertionError:
            await super().shutdown()

    @property
    def _busy(self) -> bool:
        return bool(self.server_state.connections or self.server_state.tasks)
