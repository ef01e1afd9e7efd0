"""What the hook of a task that died is told: the task as it now is, whatever it died of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from bide import Bide, Dead, Defer, Task
from bide.testing import TimeMachine


@dataclass
class Order:
    number: int


class Shop:
    """A handler that ends as it is told, and what its hooks heard."""

    def __init__(self) -> None:
        self.app = Bide("memory:")
        self.end: BaseException | None = None
        self.told: list[tuple[Any, str, str]] = []

        @self.app.on_dead("order.refund")  # before the handler is declared: the order does not matter
        async def first(task: Task[Order]) -> None:
            self.told.append((task.payload, task.state, task.error or ""))

        @self.app.handler("order.refund", retry="never", losses=1)
        async def refund(task: Task[Order]) -> None:
            if self.end is not None:
                raise self.end

        self.refund = refund


@pytest.fixture
def shop() -> Shop:
    return Shop()


@pytest.mark.parametrize(
    ("end", "error"),
    [(Dead("no such bank"), "no such bank"), (OSError("away"), "OSError: away"), (Defer("1d"), "deadline: deferred")],
    ids=["dead", "failed", "deferred"],
)
async def test_a_death_in_the_handler(shop: Shop, end: BaseException, error: str) -> None:
    shop.end = end
    async with TimeMachine(shop.app) as machine:
        await shop.refund.schedule(Order(42), key="42", delay="0s", deadline="1h")
        await machine.advance("0s")
    [(payload, state, why)] = shop.told
    assert (payload, state) == (Order(42), "dead")
    assert why.startswith(error)


async def test_a_death_before_any_handler_saw_it(shop: Shop) -> None:
    """Past its deadline nothing is delivered, and still the hook is told in the type that it was declared with."""
    async with TimeMachine(shop.app) as machine:
        await shop.refund.schedule(Order(42), key="42", delay="0s", deadline="1h")
        await machine.pass_unattended("2h")
        await machine.advance("0s")
    [(payload, state, why)] = shop.told
    assert (payload, state) == (Order(42), "dead")
    assert why.startswith("deadline: not after")


async def test_a_payload_that_nobody_could_read_is_told_as_it_is(shop: Shop) -> None:
    async with TimeMachine(shop.app) as machine:
        await shop.app.schedule("order.refund", b'{"number": "forty-two"}', key="42", delay="0s")
        await machine.advance("0s")
    [(payload, _, why)] = shop.told
    assert payload == {"number": "forty-two"}
    assert "Expected `int`" in why


@pytest.mark.parametrize("error", [KeyError("in the hook"), SystemExit(3)], ids=["error", "exit"])
async def test_a_hook_that_fails_stops_nobody(
    shop: Shop, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    @shop.app.on_dead("order.refund")
    def second(task: Task[Order]) -> None:
        raise error

    @shop.app.on_dead("order.refund")
    def third(task: Task[Order]) -> None:
        shop.told.append((task.payload, "third", ""))

    shop.end = Dead("no such bank")
    async with TimeMachine(shop.app) as machine:
        await shop.refund.schedule(Order(42), key="42", delay="0s")
        await machine.advance("0s")
    assert [state for _, state, _ in shop.told] == ["dead", "third"]
    assert "on_dead hook for order.refund/42 failed" in caplog.text


async def test_the_hook_itself_is_given_back_as_it_is(shop: Shop) -> None:
    def hook(task: Task[Order]) -> None: ...

    assert shop.app.on_dead("order.refund")(hook) is hook
