"""Name lookups in threads of their own.

asyncio looks names up in the loop's default threads, a handful that the whole program shares. A few names whose servers
do not answer would hold all of them for many seconds, and with them every other receiver's lookup.
"""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor

from aiohttp.abc import AbstractResolver, ResolveResult

_THREADS = 128
"""Made only when they are needed."""


class Lookup(AbstractResolver):
    """Resolves by the system's `getaddrinfo`. What it finds is checked when it is connected to, not here."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, "bide webhook lookup")

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(
            self._threads,
            socket.getaddrinfo,
            host, port, family, socket.SOCK_STREAM, socket.IPPROTO_TCP,
        )  # fmt: skip
        return [
            ResolveResult(
                hostname=host, host=str(address[0]), port=port, family=found_family, proto=protocol,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for found_family, _, protocol, _, address in found
        ]  # fmt: skip

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
