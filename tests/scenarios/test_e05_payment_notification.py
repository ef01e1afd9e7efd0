"""Payment notification: at once, then up the published ladder to its end, and never after the first success."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from bide import Bide, Handler, Result, Task
from bide.testing.time_machine import TimeMachine

SECONDS = [0, 15, 30, 60, 240, 840, 2040, 3840, 7440, 14_640, 36_240, 90_240]
"""When each try is, counted from the payment."""


@dataclass
class Payment:
    order: int


class Merchant:
    """Fails so many times before it answers."""

    def __init__(self, app: Bide) -> None:
        self.failures = 0
        self.calls: list[tuple[str, int]] = []
        self.lost: list[str] = []

        @app.handler("payment.notify", retry="merchant-notify")
        async def notify(task: Task[Payment]) -> None:
            self.calls.append((task.id, task.token))
            if len(self.calls) <= self.failures:
                raise ConnectionError(f"no answer to call {len(self.calls)}")

        @app.on_dead("payment.notify")
        def somebody_must_know(task: Task[object]) -> None:
            self.lost.append(task.key)

        self.notify: Handler[Payment] = notify


@pytest.fixture
def merchant(bide_app: Bide) -> Merchant:
    return Merchant(bide_app)


@pytest.mark.parametrize("failures", [0, 1, 11])
async def test_it_stops_at_the_first_success(merchant: Merchant, bide_time: TimeMachine, failures: int) -> None:
    merchant.failures = failures
    begin = bide_time.now
    await merchant.notify.schedule(Payment(7), key="7", delay="0s")
    fired = await bide_time.advance("30d")
    assert [int((one.at - begin).total_seconds()) for one in fired] == SECONDS[: failures + 1]
    assert [one.outcome for one in fired] == ["retry"] * failures + ["done"]
    assert [one.attempt for one in fired] == list(range(1, failures + 2))
    assert not merchant.lost


async def test_a_receiver_can_refuse_the_repeated_and_the_old(merchant: Merchant, bide_time: TimeMachine) -> None:
    merchant.failures = 11
    await merchant.notify.schedule(Payment(7), key="7", delay="0s")
    await bide_time.advance("2d")
    ids, tokens = zip(*merchant.calls, strict=True)
    assert len(set(ids)) == 1
    assert list(tokens) == sorted(set(tokens))


async def test_after_the_last_try_somebody_knows_and_may_send_it_again(
    bide_app: Bide, merchant: Merchant, bide_time: TimeMachine
) -> None:
    merchant.failures = 12
    await merchant.notify.schedule(Payment(7), key="7", delay="0s")
    fired = await bide_time.advance("2d")
    assert [one.outcome for one in fired] == ["retry"] * 11 + ["dead"]
    assert merchant.lost == ["7"]
    (dead,) = [task async for task in bide_app.find(topic="payment.notify", state="dead")]
    assert dead.error == "ConnectionError: no answer to call 12"
    assert (await bide_app.redrive("payment.notify", "7")).result is Result.REDRIVEN
    assert [one.outcome for one in await bide_time.advance("0s")] == ["done"]
    assert merchant.calls[-1][0] != dead.id, "sent again it is another life, which no receiver refuses"
