"""Heartbeats in a store: a device with no packet for 30 s goes offline, and every packet pushes that time back."""

import asyncio
import sqlite3
import time
from dataclasses import dataclass
from tempfile import TemporaryDirectory

from bide import Bide, Task
from bide.engine.clock import ScaledClock

DEVICES, BROKEN = 2_000, 100
SPEED = 10  # ten seconds of the story take one
folder = TemporaryDirectory()  # gone when the program ends
app = Bide(f"sqlite:///{folder.name}/devices.db", clock=ScaledClock(SPEED), lease="10m", max_sleep="10s")
devices = sqlite3.connect(":memory:", isolation_level=None)
devices.execute("CREATE TABLE devices (number INTEGER PRIMARY KEY, heard INTEGER, silence INTEGER)")


@dataclass
class Device:
    number: int


@app.handler("device.offline", concurrency=1000)
async def offline(task: Task[Device]) -> None:
    silence = "UPDATE devices SET silence = ? - heard WHERE number = ?"
    devices.execute(silence, (app.clock.now(), task.payload.number))


async def packet(number: int) -> None:
    """A touch: one move of one time. All that come while the store is busy share its next transaction."""
    heard = "INSERT INTO devices VALUES (?1, ?2, NULL) ON CONFLICT DO UPDATE SET heard = ?2, silence = NULL"
    devices.execute(heard, (number, app.clock.now()))
    touched = await offline.reschedule(str(number), delay="30s")
    if touched.result != "moved":  # first seen, or going offline in this very moment: a new life
        await offline.schedule(Device(number), key=str(number), delay="30s")


async def main() -> None:
    print(f"10 seconds = {10 / SPEED:g} s")
    async with app, app.worker():
        await asyncio.gather(*map(packet, range(DEVICES)))  # from now on the first hundred say nothing
        packets, begun = 0, time.perf_counter()
        while time.perf_counter() - begun < 40 / SPEED:
            await asyncio.gather(*map(packet, range(BROKEN, DEVICES)))
            packets += DEVICES - BROKEN
        print(f"{packets:,} packets, {packets * SPEED / 40:,.0f} a second, each of them durable")
        gone = [number for (number,) in devices.execute("SELECT number FROM devices WHERE silence IS NOT NULL")]
        print(f"offline meanwhile: {len(gone)} of {BROKEN} broken devices, {len(gone) - BROKEN} of the others")
        while [task async for task in app.find()]:  # noqa: ASYNC110 - until nothing is left
            await asyncio.sleep(0.1)
    least, most = devices.execute("SELECT min(silence), max(silence) FROM devices").fetchone()
    print(f"when all have stopped, all go offline, after {least / 1000:.3f} to {most / 1000:.3f} s of silence")
    assert gone == list(range(BROKEN)), gone
    assert least >= 30_000, least


asyncio.run(main())
