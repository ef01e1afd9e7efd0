"""The child's side of a process group: its spec, the words of its parent and their end, and what it says."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

import msgspec

from bide_proofs.harness.processes import READY

S = TypeVar("S", bound=msgspec.Struct)


class Parent:
    """The process that has started this one."""

    def __init__(self) -> None:
        self.over = asyncio.Event()
        """Set when it tells us to end, or is no more."""
        self._words: asyncio.Queue[str | None] = asyncio.Queue()

    async def listen(self) -> None:
        """Read its words until their end."""
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        async for line in reader:
            self._words.put_nowait(line.decode().strip())
        self._words.put_nowait(None)
        self.over.set()

    async def words(self) -> AsyncIterator[str]:
        """Its words, until it tells us to end."""
        while (word := await self._words.get()) is not None:
            yield word


def spec_of(kind: type[S]) -> S:
    """The first line of the standard input; to be read before anything else is."""
    return msgspec.json.decode(sys.stdin.buffer.readline(), type=kind)


def run(main: Callable[[Parent], Awaitable[None]]) -> None:
    """Run `main` until it returns. It has to end soon after `parent.over`."""
    asyncio.run(_run(main))


async def _run(main: Callable[[Parent], Awaitable[None]]) -> None:
    parent = Parent()
    listening = asyncio.create_task(parent.listen())
    try:
        await main(parent)
    finally:
        listening.cancel()


def say(**values: object) -> None:
    """Tell the parent values by words, in one line that outlives this process."""
    os.write(1, msgspec.json.encode(values) + b"\n")


def ready() -> None:
    """Tell the parent that this process works."""
    say(**{READY: True})
