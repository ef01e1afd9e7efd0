"""What `loop.call_at` alone does with the same load at the same time: the floor under every figure of `lateness`.

Run as a process of its own beside the worker, so that both meet the same machine and neither waits for the other.
"""

from __future__ import annotations

import asyncio
import os
import sys

import msgspec

from bide.cli.bench.worker import loop_factory

READY, GO = b"ready\n", b"go\n"
"""What the process says when it has started, and what it waits for then."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """`count` timers, `rate` a second, each due `ahead` milliseconds after it is set."""

    count: int
    rate: float
    ahead: int
    loop: str = "asyncio"


async def lateness(load: Load) -> list[float]:
    """Milliseconds between when each timer was due and when it ran."""
    loop = asyncio.get_running_loop()
    late: list[float] = []
    done = loop.create_future()

    def fired(due: float) -> None:
        late.append((loop.time() - due) * 1000)
        if len(late) == load.count:
            done.set_result(None)

    begun = loop.time()
    for number in range(load.count):
        pause = begun + number / load.rate - loop.time()
        if pause > 0:
            await asyncio.sleep(pause)
        due = loop.time() + load.ahead / 1000
        loop.call_at(due, fired, due)
    await done
    return late


def main() -> None:
    load = msgspec.json.decode(sys.argv[1], type=Load)
    with asyncio.Runner(loop_factory=loop_factory(load.loop)) as runner:
        os.write(1, READY)
        if sys.stdin.buffer.readline() == GO:
            os.write(1, msgspec.json.encode(runner.run(lateness(load))))


if __name__ == "__main__":
    main()
