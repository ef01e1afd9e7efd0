"""The places of hosts, in virtual time: hours pass in milliseconds."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from tests.waiting import elapse, virtual_time

from bide.sinks.webhook.hosts import FARTHEST, PATIENCE, HostLimits, HostSlot
from bide.testing.virtual import VirtualLoop, run_virtual

A, B = "a.example:443", "b.example:443"
MOST = 8


def told(story: Callable[[HostLimits], Coroutine[Any, Any, None]]) -> None:
    async def begin(loop: VirtualLoop) -> None:
        await story(HostLimits(MOST, chance=lambda: 0.0))

    run_virtual(begin)


def fill(hosts: HostLimits, name: str = A) -> list[HostSlot]:
    places = []
    while (place := hosts.enter(name)) is not None:
        places.append(place)
    return places


def test_a_host_has_so_many_places_and_no_other_host_has_less_for_it() -> None:
    async def story(hosts: HostLimits) -> None:
        places = fill(hosts)
        assert len(places) == MOST
        assert len(fill(hosts, B)) == MOST
        places[0].leave(True)
        assert len(fill(hosts)) == 1

    told(story)


def test_who_waits_gets_the_place_that_becomes_free() -> None:
    async def story(hosts: HostLimits) -> None:
        places = fill(hosts)
        waiting = [asyncio.ensure_future(hosts.wait(A)) for _ in range(2)]
        await elapse(PATIENCE / 2)
        assert hosts.enter(A) is None
        places[0].leave(True)
        assert hosts.enter(A) is None, "it is for who came first"
        await elapse(PATIENCE)
        assert isinstance(waiting[0].result(), HostSlot)
        assert waiting[1].result() is None
        assert hosts.busy(A) == MOST

    told(story)


def test_nobody_waits_long_and_at_a_host_that_hangs_nobody_waits_at_all() -> None:
    async def story(hosts: HostLimits) -> None:
        fill(hosts)
        began = virtual_time()
        assert await hosts.wait(A) is None
        assert virtual_time() - began == pytest.approx(PATIENCE)
        await elapse(1.0)
        began = virtual_time()
        assert await hosts.wait(A) is None
        assert virtual_time() == began

    told(story)


def test_who_is_cancelled_while_waiting_takes_no_place_along() -> None:
    async def story(hosts: HostLimits) -> None:
        places = fill(hosts)
        before, given = (asyncio.ensure_future(hosts.wait(A)) for _ in range(2))
        await asyncio.sleep(0)
        before.cancel()
        await asyncio.gather(before, return_exceptions=True)
        places.pop().leave(True)
        given.cancel()  # in the same moment that it is given one
        await asyncio.gather(given, return_exceptions=True)
        assert given.cancelled()
        assert hosts.busy(A) == MOST - 1
        assert len(fill(hosts)) == 1

    told(story)


def test_a_host_that_is_down_is_given_fewer_and_one_that_answers_all_again() -> None:
    async def story(hosts: HostLimits) -> None:
        seen = []
        for answered in (False, False, False, False, None, True, True, True, True):
            place = hosts.enter(A)
            assert place is not None
            place.leave(answered)
            seen.append(hosts.allowed(A))
        assert seen == [4, 2, 1, 1, 1, 2, 4, 8, 8]
        assert hosts.allowed(B) == MOST

    told(story)


def test_those_that_are_deferred_come_back_one_by_one() -> None:
    """And the longer a host takes, the farther apart, within bounds."""

    async def story(hosts: HostLimits) -> None:
        places = fill(hosts)
        await elapse(30.0)
        for place in places:
            place.leave(False)
        fill(hosts)
        pauses = [hosts.pause(A) for _ in range(1_000)]
        gaps = [later - earlier for earlier, later in itertools.pairwise(pauses)]
        assert all(gap == pytest.approx(0.02) for gap in gaps)
        assert pauses[-1] == pytest.approx(20.0)
        await elapse(10.0)
        assert hosts.pause(A) == pytest.approx(10.02), "half of them are back by now"
        assert max(hosts.pause(A) for _ in range(100_000)) == pytest.approx(FARTHEST)

    told(story)


def test_none_comes_back_before_it_has_waited_for_as_long_as_the_host_has_been_silent() -> None:
    """Nor much later, while it is known to be quick: a host that stood still for a moment has its backlog back."""

    async def story(hosts: HostLimits) -> None:
        for _ in range(60):
            one = hosts.enter(A)
            assert one is not None
            await elapse(0.002)
            one.leave(True)
        fill(hosts)
        await elapse(0.5)
        pauses = [hosts.pause(A) for _ in range(5_000)]
        assert min(pauses) == pytest.approx(0.5)
        assert max(pauses) < 2.0

    told(story)


def test_a_host_that_is_well_again_is_not_held_to_its_past() -> None:
    async def story(hosts: HostLimits) -> None:
        places = fill(hosts)
        await elapse(30.0)
        assert all(hosts.pause(A) == pytest.approx(30.0) for _ in range(1_000))
        for place in places:
            place.leave(False)
        for _ in range(60):
            one = hosts.enter(A)
            assert one is not None
            await elapse(0.005)
            one.leave(True)
        fill(hosts)
        assert hosts.pause(A) < 2.0

    told(story)


def test_jitter_only_lengthens() -> None:
    async def begin(loop: VirtualLoop) -> None:
        hosts = HostLimits(1)
        fill(hosts)
        pauses = [hosts.pause(A) for _ in range(50)]
        shortest = [0.02 * (place + 1) for place in range(50)]
        assert all(least <= pause <= 1.25 * least for least, pause in zip(shortest, pauses, strict=True))
        assert pauses != shortest

    run_virtual(begin)


def test_hosts_are_forgotten_when_there_are_too_many_and_never_one_at_work() -> None:
    async def story(hosts: HostLimits) -> None:
        kept = hosts.enter(A)
        assert kept is not None
        for number in range(20_000):
            place = hosts.enter(f"{number}.example:443")
            assert place is not None
            place.leave(False)
        assert len(hosts._hosts) <= 4_096
        assert hosts.busy(A) == 1
        kept.leave(True)
        assert hosts.busy(A) == 0
        assert hosts.pause("0.example:443") == PATIENCE, "nothing is known of it any more"

    told(story)
