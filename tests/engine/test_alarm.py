"""The alarm: by a descriptor where the system has such timers, by the loop otherwise."""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from collections.abc import Callable

import pytest
from tests.waiting import PATIENCE, not_before, pause

from bide.engine.delivery.lease_loop import DescriptorAlarm, LoopAlarm, new_alarm
from bide.testing.virtual import VirtualLoop, run_virtual

Alarm = LoopAlarm | DescriptorAlarm
Kind = Callable[[Callable[[], None]], Alarm]
KINDS = pytest.mark.parametrize("kind", [DescriptorAlarm, LoopAlarm])


class Bell:
    """Counts, and lets a test wait for the next time."""

    def __init__(self) -> None:
        self.rung: list[float] = []
        self._heard = asyncio.Event()

    def ring(self) -> None:
        self.rung.append(time.monotonic())
        self._heard.set()

    async def heard(self) -> float:
        self._heard.clear()
        async with asyncio.timeout(PATIENCE):
            await self._heard.wait()
        return self.rung[-1]


@KINDS
async def test_it_rings_once_and_not_much_too_early(kind: Kind) -> None:
    bell = Bell()
    alarm = kind(bell.ring)
    try:
        for seconds in (0.0, 0.0004, 0.02):
            set_at = time.monotonic()
            alarm.set(seconds)
            not_before(await bell.heard(), set_at + seconds - 0.002, "the alarm")
        await pause(0.01, why="an alarm that rings twice would do it now")
        assert len(bell.rung) == 3
    finally:
        alarm.close()


@KINDS
async def test_what_it_was_set_to_last_counts(kind: Kind) -> None:
    bell = Bell()
    alarm = kind(bell.ring)
    try:
        alarm.set(3600)
        alarm.set(0.001)
        await bell.heard()
        set_at = time.monotonic()
        alarm.set(0.001)
        alarm.set(0.05)
        not_before(await bell.heard(), set_at + 0.048, "the alarm")
    finally:
        alarm.close()


@KINDS
async def test_a_closed_one_is_silent_and_leaves_nothing_open(kind: Kind) -> None:
    before = len(os.listdir("/proc/self/fd"))
    bell = Bell()
    alarm = kind(bell.ring)
    alarm.set(0.001)
    alarm.close()
    alarm.close()
    await pause(0.01, why="it would have rung by now")
    assert bell.rung == []
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("factory", ["asyncio", "uvloop"])
def test_any_loop_of_real_time_has_the_fine_one(factory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "bide.engine.delivery.lease_loop._OWN_TIME", PATIENCE
    )  # what two looks at the time may lie apart
    make = asyncio.new_event_loop if factory == "asyncio" else pytest.importorskip("uvloop").new_event_loop

    async def kind() -> type[Alarm]:
        alarm = new_alarm(lambda: None)
        alarm.close()
        return type(alarm)

    with asyncio.Runner(loop_factory=make) as runner:
        assert runner.run(kind()) is DescriptorAlarm


def test_a_loop_with_a_time_of_its_own_is_asked_for_its_own() -> None:
    async def main(loop: VirtualLoop) -> float:
        bell = Bell()
        alarm = new_alarm(bell.ring)
        assert isinstance(alarm, LoopAlarm)
        alarm.set(3)
        await bell.heard()
        return loop.time()

    assert run_virtual(main) == pytest.approx(3)


class Poor:
    """The C library of another system."""


class Full:
    """A system without descriptors to spare."""

    @staticmethod
    def timerfd_create(*_: int) -> int:
        ctypes.set_errno(24)
        return -1


@pytest.mark.parametrize("library", [Poor, Full])
async def test_without_such_timers_the_loop_does_it(library: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: library())
    assert isinstance(new_alarm(lambda: None), LoopAlarm)
