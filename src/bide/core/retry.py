"""The delays of retries after failures: three policies, and the named presets.

A policy is data, not code, so that it can travel with a task (`options.retry`) and be drawn in the console. Given the
number of failures, it returns the delay until the next try, or None to give up.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

from bide.core.errors import BadInput
from bide.core.instants import LONGEST, Length, Millis, duration

FOREVER: int = 2**31 - 1
"""The value of `tries` for never giving up."""

Chance: TypeAlias = Callable[[], float]
"""A function that returns a number in [0, 1): `random.random`, or a seeded one in tests."""

# The functions below check the bounds, and decoding checks them again, since stored bytes may be damaged.
Pause: TypeAlias = Annotated[Millis, Meta(ge=0, le=LONGEST)]
Tries: TypeAlias = Annotated[int, Meta(ge=1, le=FOREVER)]


def _check_tries(tries: int) -> int:
    if type(tries) is int and 1 <= tries <= FOREVER:
        return tries
    raise BadInput("tries", tries, "a whole number of deliveries, at least 1")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class FixedPolicy(Struct, frozen=True, tag="fixed", tag_field="policy"):
    """The same delay each time. Made by `Fixed(...)`."""

    pause: Pause
    tries: Tries

    def delay(self, failures: int, chance: Chance = random.random) -> Millis | None:
        """Milliseconds until the next try after `failures` of them (1 for the first); None: give up. O(1)."""
        return self.pause if failures < self.tries else None


class ExponentialPolicy(Struct, frozen=True, tag="exponential", tag_field="policy"):
    """Delays that grow. Made by `Exponential(...)`."""

    first: Pause
    factor: Annotated[float, Meta(ge=1, le=100)]
    longest: Pause
    tries: Tries
    jitter: Annotated[float, Meta(ge=0, le=1)]

    def delay(self, failures: int, chance: Chance = random.random) -> Millis | None:
        """Milliseconds until the next try after `failures` of them (1 for the first); None: give up. O(1)."""
        if failures >= self.tries:
            return None
        try:
            pause = min(self.first * self.factor ** (failures - 1), float(self.longest))
        except OverflowError:
            pause = float(self.longest) if self.first else 0.0
        return int(pause * (1.0 - self.jitter * chance()))


class LadderPolicy(Struct, frozen=True, tag="ladder", tag_field="policy"):
    """An explicit delay per failure; gives up after the last rung. Made by `Ladder(...)`."""

    rungs: Annotated[tuple[Pause, ...], Meta(min_length=1)]

    def delay(self, failures: int, chance: Chance = random.random) -> Millis | None:
        """Milliseconds until the next try after `failures` of them (1 for the first); None: give up. O(1)."""
        return self.rungs[failures - 1] if failures <= len(self.rungs) else None


RetryPolicy: TypeAlias = FixedPolicy | ExponentialPolicy | LadderPolicy


def Fixed(pause: Length, *, tries: int) -> FixedPolicy:  # noqa: N802 - reads as the noun it makes, like the two below
    """The same delay each time: `Fixed("30s", tries=5)` delivers at most five times."""
    return FixedPolicy(duration(pause, field="pause"), _check_tries(tries))


def Exponential(  # noqa: N802
    first: Length = "1s", *, factor: float = 2.0, longest: Length = "1h", tries: int = 12, jitter: float = 0.2
) -> ExponentialPolicy:
    """Delays that grow: first, first x factor, ... up to `longest`, each less a random part of at most `jitter`.

    Jitter only shortens a delay, so `longest` is a bound. It keeps tasks that failed together from retrying together
    (M. Brooker, "Exponential Backoff And Jitter", 2015).
    """
    if not _is_number(factor) or not 1.0 <= factor <= 100.0:
        raise BadInput("factor", factor, "a number from 1 to 100")
    if not _is_number(jitter) or not 0.0 <= jitter <= 1.0:
        raise BadInput("jitter", jitter, "a part from 0 to 1")
    return ExponentialPolicy(
        duration(first, field="first"), float(factor), duration(longest, field="longest"), _check_tries(tries),
        float(jitter),
    )  # fmt: skip


def Ladder(*rungs: Length) -> LadderPolicy:  # noqa: N802
    """`Ladder("15s", "15s", "30s", "3m")`: deliver at once, then after each of these delays in turn, then dead."""
    if not rungs:
        raise BadInput("rungs", rungs, 'at least one pause, such as Ladder("15s", "1m")')
    return LadderPolicy(tuple(duration(rung, field=f"rungs[{place}]") for place, rung in enumerate(rungs)))


PRESETS: Mapping[str, RetryPolicy] = MappingProxyType(
    {
        "default": Exponential(),
        "never": Fixed("0s", tries=1),
        "quick": Exponential("100ms", longest="5s", tries=6),
        "patient": Exponential("10s", longest="6h", tries=24),
        "merchant-notify": Ladder("15s", "15s", "30s", "3m", "10m", "20m", "30m", "1h", "2h", "6h", "15h"),
    }
)
"""The named policies. `merchant-notify` is the ladder that payment systems publish: eleven rungs over 25 hours."""


def policy(value: RetryPolicy | str | None) -> RetryPolicy:
    """The policy given as itself or as a preset's name; None is the default. Raises BadInput."""
    if value is None:
        return PRESETS["default"]
    if isinstance(value, str):
        if value in PRESETS:
            return PRESETS[value]
    elif isinstance(value, FixedPolicy | ExponentialPolicy | LadderPolicy):
        return value
    raise BadInput("retry", value, f"Ladder(...), Fixed(...), Exponential(...) or one of {sorted(PRESETS)}")
