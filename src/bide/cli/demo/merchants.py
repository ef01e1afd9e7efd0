"""A tiny HTTP server that plays three merchants: one well, one too slow at first, one down for a while."""

from __future__ import annotations

import asyncio
import time

from bide.cli.demo.pace import Pace
from bide.core.instants import duration

BOOK_SHOP, TEA_HOUSE, NOODLE_BAR = "book-shop", "tea-house", "noodle-bar"
_SLOW_UNTIL = duration("75s")
_DOWN_UNTIL = duration("10m")


class Merchants:
    """Listens on 127.0.0.1, on any free port."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._server: asyncio.Server
        self.port = 0

    @classmethod
    async def serve(cls, pace: Pace) -> Merchants:
        merchants = cls(pace)
        merchants._server = await asyncio.start_server(merchants._answer, "127.0.0.1", 0)
        merchants.port = merchants._server.sockets[0].getsockname()[1]
        return merchants

    async def close(self) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request per connection; its body is not read, since what counts here is the answer."""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            merchant = head.split(b" ", 2)[1].decode().lstrip("/")
            passed = self._pace.story_at(time.time_ns() // 1_000_000)
            if merchant == TEA_HOUSE and passed < _SLOW_UNTIL:
                await asyncio.sleep(self._pace.length("30s").total_seconds())  # nobody waits so long
            down = merchant == NOODLE_BAR and passed < _DOWN_UNTIL
            status = "503 Service Unavailable" if down else "200 OK"
            writer.write(f"HTTP/1.1 {status}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n".encode())
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass  # it has hung up
        finally:
            writer.close()
