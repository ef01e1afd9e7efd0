"""E6: 100,000 connections, and one that sends no packet for 30 s goes offline. One ring, and one timer for all.

Time runs 20 times as fast: the minute and a half that is shown takes some five seconds.
"""

import asyncio

from bide import ScaledClock
from bide.timers import IdleRing, drive

CONNECTIONS = 100_000
SPEED = 20


async def main() -> None:
    clock, all_gone = ScaledClock(SPEED), asyncio.Event()
    begin = clock.now()
    last_packet: dict[int, int] = {}
    packets = 0
    silent_for: list[int] = []  # milliseconds

    def offline(connection: int) -> None:
        silent_for.append(clock.now() - last_packet.pop(connection))
        if not last_packet:
            all_gone.set()

    async with drive(IdleRing[int](timeout=30_000, tick=1000), offline, clock=clock) as ring:
        talking = range(CONNECTIONS)
        while clock.now() < begin + 60_000:
            for connection in talking:
                last_packet[connection] = clock.now()  # before: no silence may seem shorter than it was
                ring.touch(connection)
            packets += len(talking)
            talking = range(0, CONNECTIONS, 3)  # two of three fall silent after their first packet
            await asyncio.sleep(5 / SPEED)
        passed = (clock.now() - begin) // 1000
        print(f"after {passed} s: {packets:,} packets, {len(ring):,} online, {len(silent_for):,} offline")
        await all_gone.wait()  # for now nobody talks
    print(f"after {(clock.now() - begin) // 1000} s: all {len(silent_for):,} offline")
    print(f"silent for {min(silent_for) / 1000} to {max(silent_for) / 1000} s: 30, a tick of 1 at most, and the calls")
    assert min(silent_for) >= 30_000


if __name__ == "__main__":
    asyncio.run(main())
