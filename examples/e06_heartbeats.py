"""Heartbeats in a store: a device with no packet for 30 s goes offline, and every packet pushes that time back."""

import asyncio
import sqlite3
import time
from dataclasses import dataclass
from tempfile import TemporaryDirectory

from bide import Bide, ScaledClock, Task

DEVICES, BROKEN = 2_000, 100
SPEED = 12  # a minute of the story takes 5 s
folder = TemporaryDirectory()  # gone when the program ends
app = Bide(f"sqlite:///{folder.name}/devices.db", clock=ScaledClock(SPEED))
devices = sqlite3.connect(":memory:", isolation_level=None)
devices.execute("CREATE TABLE devices (number INTEGER PRIMARY KEY, heard REAL, silence REAL)")


@dataclass
class Device:
    number: int


@app.handler("device.offline", concurrency=1000)
async def offline(task: Task[Device]) -> None:
    silence = "UPDATE devices SET silence = ? - heard WHERE number = ?"
    devices.execute(silence, (app.now().timestamp(), task.payload.number))


async def packet(number: int) -> None:
    """A touch: one move of one time. All that come while the store is busy share its next transaction."""
    heard = "INSERT INTO devices VALUES (?1, ?2, NULL) ON CONFLICT DO UPDATE SET heard = ?2, silence = NULL"
    devices.execute(heard, (number, app.now().timestamp()))
    touched = await offline.reschedule(str(number), delay="30s")
    if touched.result != "moved":  # first seen, or going offline in this very moment: a new life
        await offline.schedule(Device(number), key=str(number), delay="30s")


async def main() -> None:
    print(f"1 minute = {60 / SPEED:g} s")
    async with app, app.worker() as worker:
        await asyncio.gather(*map(packet, range(DEVICES)))  # from now on the first hundred say nothing
        packets, begun = 0, time.perf_counter()
        while time.perf_counter() - begun < 40 / SPEED:
            await asyncio.gather(*map(packet, range(BROKEN, DEVICES)))
            packets += DEVICES - BROKEN
        print(f"{packets:,} packets, {packets * SPEED / 40:,.0f} a second, each of them durable")
        gone = [number for (number,) in devices.execute("SELECT number FROM devices WHERE silence IS NOT NULL")]
        print(f"offline meanwhile: {len(gone)} of {BROKEN} broken devices, {len(gone) - BROKEN} of the others")
        await worker.until_empty()
    least, most = devices.execute("SELECT min(silence), max(silence) FROM devices").fetchone()
    print(f"when all have stopped, all go offline, after {least:.3f} to {most:.3f} s of silence")
    assert gone == list(range(BROKEN)), gone
    assert least >= 30, least


asyncio.run(main())
