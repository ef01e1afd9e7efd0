"""Retry policies: bounds, the ladder rung by rung, the presets, and what they refuse."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bide.core.errors import BadInput
from bide.core.instants import LONGEST, duration
from bide.core.retry import FOREVER, PRESETS, Exponential, Fixed, Growing, Ladder, RetryPolicy, Rungs, Steady, policy

MERCHANT = ["15s", "15s", "30s", "3m", "10m", "20m", "30m", "1h", "2h", "6h", "15h"]


def pauses(policy: RetryPolicy, chance: float = 0.0) -> list[int]:
    """Every pause until it gives up."""
    found: list[int] = []
    while (pause := policy.delay(len(found) + 1, lambda: chance)) is not None:
        found.append(pause)
    return found


def test_fixed_pauses_between_so_many_deliveries() -> None:
    assert pauses(Fixed("30s", tries=5)) == [30_000] * 4
    assert pauses(Fixed("30s", tries=1)) == []


def test_a_ladder_is_climbed_rung_by_rung() -> None:
    assert pauses(Ladder("15s", "15s", "30s", "3m")) == [15_000, 15_000, 30_000, 180_000]


def test_merchant_notify_is_the_published_ladder() -> None:
    assert pauses(PRESETS["merchant-notify"]) == [duration(rung) for rung in MERCHANT]
    assert sum(pauses(PRESETS["merchant-notify"])) > duration("24h")


def test_exponential_grows_to_its_bound() -> None:
    growing = Exponential("1s", factor=2, longest="10s", tries=7, jitter=0)
    assert pauses(growing) == [1_000, 2_000, 4_000, 8_000, 10_000, 10_000]


def test_jitter_only_ever_shortens() -> None:
    growing = Exponential("1s", longest="1m", tries=9, jitter=0.25)
    longest, shortest = pauses(growing, 0.0), pauses(growing, 1.0)
    assert shortest == [int(pause * 0.75) for pause in longest]


@given(
    first=st.integers(0, LONGEST),
    factor=st.floats(1, 100),
    longest=st.integers(0, LONGEST),
    jitter=st.floats(0, 1),
    failures=st.integers(1, FOREVER - 1),
    seed=st.integers(),
)
def test_exponential_keeps_its_bounds_however_often_it_failed(
    first: int, factor: float, longest: int, jitter: float, failures: int, seed: int
) -> None:
    growing = Growing(first, factor, longest, FOREVER, jitter)
    pause = growing.delay(failures, random.Random(seed).random)
    most = growing.delay(failures, lambda: 0.0)
    assert pause is not None
    assert most is not None
    assert int(most * (1 - jitter)) - 1 <= pause <= most <= longest
    before = growing.delay(failures - 1, lambda: 0.0) if failures > 1 else 0
    assert before is not None
    assert before <= most
    assert growing.delay(FOREVER, lambda: 0.0) is None


def test_at_once_stays_at_once() -> None:
    assert Exponential("0s", tries=FOREVER).delay(100_000) == 0


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_found_by_name_and_ends(name: str) -> None:
    preset = policy(name)
    assert preset is PRESETS[name]
    assert len(pauses(preset)) < 50


def test_no_policy_is_the_default_one() -> None:
    assert policy(None) is PRESETS["default"]
    mine = Fixed("1s", tries=2)
    assert policy(mine) is mine
    assert pauses(policy("never")) == []


@pytest.mark.parametrize("value", ["Merchant-Notify", "", 5, [1, 2], Fixed, object()])
def test_an_unknown_policy_is_refused_with_the_names_that_there_are(value: Any) -> None:
    with pytest.raises(BadInput, match="merchant-notify"):
        policy(value)


@pytest.mark.parametrize("tries", [0, -1, FOREVER + 1, 2.5, 5.0, float("nan"), float("inf"), "5", None, True])
def test_bad_tries_are_refused(tries: Any) -> None:
    with pytest.raises(BadInput, match="tries"):
        Fixed("1s", tries=tries)
    with pytest.raises(BadInput, match="tries"):
        Exponential("1s", tries=tries)


@pytest.mark.parametrize("factor", [0.5, -2, 101, float("nan"), float("inf"), "2", None, True])
def test_bad_factors_are_refused(factor: Any) -> None:
    with pytest.raises(BadInput, match="factor"):
        Exponential("1s", factor=factor)


@pytest.mark.parametrize("jitter", [-0.1, 1.1, float("nan"), "0.5", None])
def test_bad_jitter_is_refused(jitter: Any) -> None:
    with pytest.raises(BadInput, match="jitter"):
        Exponential("1s", jitter=jitter)


def test_bad_pauses_are_refused_by_the_name_of_their_place() -> None:
    with pytest.raises(BadInput, match=r"rungs\[1\]"):
        Ladder("15s", "soon")
    with pytest.raises(BadInput, match="at least one pause"):
        Ladder()
    with pytest.raises(BadInput, match="pause"):
        Fixed("-1s", tries=2)


@given(
    st.one_of(
        st.builds(Steady, st.integers(0, LONGEST), st.integers(1, FOREVER)),
        st.builds(
            Growing,
            st.integers(0, LONGEST),
            st.floats(1, 100),
            st.integers(0, LONGEST),
            st.integers(1, FOREVER),
            st.floats(0, 1),
        ),
        st.builds(Rungs, st.lists(st.integers(0, LONGEST), min_size=1).map(tuple)),
    )
)
def test_a_policy_travels_as_data(policy: RetryPolicy) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(policy), type=RetryPolicy) == policy
