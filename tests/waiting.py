"""The only way to wait in a test. A verdict never depends on how fast the machine is.

- `until`, `wait_until`: for a condition. The bound is so generous that only a hang reaches it.
- `elapse`: lets virtual time pass, which costs none; refuses a loop of real time. `virtual_time` reads its clock, and
  a test that is decorated by `in_virtual_time` runs in it.
- `pause`, `block`: real time, with the reason. A slow machine may make such a test see less, and never makes it fail:
  they keep the pace of a load, or give what must not happen the time to happen.
- `forever`: what a handler that never ends does.
- `not_before`: the one comparison of measured times that a slow machine cannot break, since it is late, never early.

`tests/test_waiting.py` refuses every other sleep and comparison.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Coroutine
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

from bide.testing.virtual import VirtualLoop, run_virtual

T = TypeVar("T")
P = ParamSpec("P")

PATIENCE = 60.0
"""Seconds until what is waited for is taken for a hang, and for a failure."""
_STEP = 0.005
_SLOW_STEP = 0.02


@overload
async def until(condition: Callable[[], Awaitable[T]], what: str, *, patience: float = PATIENCE) -> T: ...
@overload
async def until(condition: Callable[[], T], what: str, *, patience: float = PATIENCE) -> T: ...
async def until(condition: Callable[[], Any], what: str, *, patience: float = PATIENCE) -> Any:
    """Wait until `condition()`, which may be a coroutine, is true, and return it. `what` is said where it never is."""
    ends = asyncio.get_running_loop().time() + patience
    while True:
        found = condition()
        if inspect.isawaitable(found):
            found = await found
        if found:
            return found
        if asyncio.get_running_loop().time() > ends:
            raise AssertionError(f"waited {patience:g} s in vain for {what}")
        await asyncio.sleep(_STEP)


def wait_until(
    condition: Callable[[], T],
    what: str,
    *,
    patience: float = PATIENCE,
    passes: tuple[type[Exception], ...] = (OSError,),
) -> T:
    """`until` for code without an event loop. An error of `passes` counts as no: a server that does not answer yet."""
    ends = time.monotonic() + patience
    while True:
        problem = None
        try:
            if found := condition():
                return found
        except passes as error:
            problem = error
        if time.monotonic() > ends:
            raise AssertionError(f"waited {patience:g} s in vain for {what}") from problem
        time.sleep(_SLOW_STEP)


async def elapse(seconds: float) -> None:
    """Let virtual time pass. Raises AssertionError on a loop of real time."""
    _virtual()
    await asyncio.sleep(seconds)


def virtual_time() -> float:
    """Seconds, by the virtual loop that runs. Raises AssertionError on a loop of real time."""
    return _virtual().time()


def _virtual() -> asyncio.AbstractEventLoop:
    from bide.testing.virtual import VirtualLoop
    from bide_proofs.simulate.loop import SimulatedLoop

    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop | SimulatedLoop), "this loop's time is real: wait for a condition, by until()"
    return loop


async def pause(seconds: float, *, why: str) -> None:
    """Real time passes, because of `why`. Never in the place of a condition."""
    assert why
    await asyncio.sleep(seconds)


def block(seconds: float, *, why: str) -> None:
    """`pause` for code without an event loop, or to hold one up."""
    assert why
    time.sleep(seconds)


async def forever() -> None:
    """Until it is cancelled."""
    await asyncio.Event().wait()


def not_before(at: float, earliest: float, what: str) -> None:
    """Nothing happened early: `at` and `earliest` are of one clock and one unit."""
    assert at >= earliest, f"{what} is early by {earliest - at}"


def in_virtual_time(
    test: Callable[Concatenate[VirtualLoop, P], Coroutine[Any, Any, None]], *, given: int = 1
) -> Callable[P, None]:
    """The test runs on a virtual loop, which is its first argument. `given`: how many arguments are no fixtures."""

    @wraps(test)
    def run(*fixtures: P.args, **named: P.kwargs) -> None:
        run_virtual(lambda loop: test(loop, *fixtures, **named))

    asked = inspect.signature(test)
    run.__signature__ = asked.replace(parameters=list(asked.parameters.values())[given:])  # type: ignore[attr-defined]
    return run
