"""The idle ring: never before the time-out, not later than one tick after it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bide.timers import IdleRing

STEP = st.tuples(
    st.sampled_from(["touch", "touch", "touch", "remove", "advance"]), st.integers(0, 5), st.integers(-3, 40)
)


def test_empty() -> None:
    ring = IdleRing[str](timeout=30, tick=10)
    assert len(ring) == 0
    assert "a" not in ring
    assert ring.next_deadline() is None
    assert ring.advance(10**12) == []
    assert not ring.remove("a")


@pytest.mark.parametrize(("timeout", "tick"), [(0, 1), (1, 0), (-5, 10)])
def test_timeout_and_tick_are_positive(timeout: int, tick: int) -> None:
    with pytest.raises(ValueError, match="1 ms or more"):
        IdleRing[str](timeout=timeout, tick=tick)


def test_no_deadline_of_a_slot_that_became_empty() -> None:
    ring = IdleRing[str](timeout=30, tick=10)
    ring.touch("a", 0)
    ring.touch("b", 15)
    ring.remove("a")
    assert ring.next_deadline() == 50


def test_a_hundred_thousand_chatty_ones_are_put_forward_once_per_timeout() -> None:
    """What makes a touch cheap: the hand moves a uid, not the packet."""
    ring = IdleRing[int](timeout=30_000, tick=1000)
    for uid in range(1000):
        ring.touch(uid, 0)
    for now in range(0, 300_000, 500):
        for uid in range(0, 1000, 7):
            ring.touch(uid, now)
        ring.advance(now)
    assert len(ring) == len(range(0, 1000, 7))
    assert len(ring._slots) <= 32


@given(timeout=st.integers(1, 60), tick=st.integers(1, 25), steps=st.lists(STEP, max_size=80))
def test_never_early_and_at_most_a_tick_late(timeout: int, tick: int, steps: list[tuple[str, int, int]]) -> None:
    ring = IdleRing[int](timeout=timeout, tick=tick)
    last: dict[int, int] = {}
    now = latest = 1000
    ring.advance(now)
    for verb, uid, pause in steps:
        now = latest + pause
        latest = max(latest, now)
        if verb == "touch":
            ring.touch(uid, now)
            last[uid] = latest
        elif verb == "remove":
            assert ring.remove(uid) == (last.pop(uid, None) is not None)
        else:
            idle = ring.advance(now)
            assert [last[uid] for uid in idle] == sorted(last[uid] for uid in idle)
            for uid in idle:
                assert last.pop(uid) + timeout <= latest
            assert all(heard + timeout + tick > latest for heard in last.values())
        assert len(ring) == len(last)
        deadline = ring.next_deadline()
        assert (deadline is None) == (not last)
        if deadline is not None:
            # by then whoever is idle can be told within a tick
            assert deadline < min(last.values()) + timeout + tick
