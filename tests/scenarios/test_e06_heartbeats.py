"""Heartbeats in a store: offline after 30 s of silence, never before, and back with the next packet."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import datetime

import pytest

from bide import Bide, Handler, Task
from bide.testing.time_machine import TimeMachine

DEVICES = 500


@dataclass
class Device:
    number: int


class Devices:
    """Who is there, by what they send."""

    def __init__(self, app: Bide) -> None:
        self.offline: list[int] = []
        self.created = 0

        @app.handler("device.offline")
        async def offline(task: Task[Device]) -> None:
            self.offline.append(task.payload.number)

        self.timeout: Handler[Device] = offline

    async def packet(self, number: int) -> None:
        if (await self.timeout.reschedule(str(number), delay="30s")).result != "moved":
            await self.timeout.schedule(Device(number), key=str(number), delay="30s")
            self.created += 1


@pytest.fixture
def devices(bide_app: Bide) -> Devices:
    return Devices(bide_app)


async def test_silence_of_30_seconds_and_no_less(devices: Devices, bide_time: TimeMachine) -> None:
    await devices.packet(1)
    await bide_time.advance("29s999ms")
    assert not devices.offline
    await bide_time.advance("1ms")
    assert devices.offline == [1]


async def test_every_packet_pushes_it_back(devices: Devices, bide_time: TimeMachine) -> None:
    for _ in range(100):
        await devices.packet(1)
        assert await bide_time.advance("29s") == []
    assert devices.created == 1, "all packets but the first only moved it"
    last: datetime = bide_time.now
    (fired,) = await bide_time.advance("1h")
    assert (fired.at - last).total_seconds() == 1


async def test_only_the_silent_go_offline(devices: Devices, bide_time: TimeMachine) -> None:
    await asyncio.gather(*map(devices.packet, range(DEVICES)))
    for _ in range(6):
        await bide_time.advance("10s")
        await asyncio.gather(*map(devices.packet, range(50, DEVICES)))
    assert sorted(devices.offline) == list(range(50))
    await bide_time.advance("30s")
    assert sorted(devices.offline) == list(range(DEVICES))
