"""A task made by hand: what a handler sees of it, and what it can do with it."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from bide import BadInput, BadPayload, Bide, Retry, SetupError, Task
from bide.testing import task_for

app = Bide("memory:")


@dataclass
class Order:
    number: int


@app.handler("order.close")
async def close(task: Task[Order]) -> Retry | None:
    if task.attempt < 3:
        return Retry(f"{task.payload.number} is not there yet: {task.error}")
    return None


@app.handler("order.pay")
async def pay(task: Task[Order]) -> None:
    async with task.transaction() as conn:
        conn.execute("UPDATE orders SET status = 'paid' WHERE number = ?", (task.payload.number,))
        if task.payload.number == 13:
            raise ConnectionError("after the effect")


@app.handler("report.render")
def render(task: Task[str]) -> None:
    task.payload.upper()


async def test_a_handler_is_called_like_the_function_that_it_is() -> None:
    outcome = await close(task_for(close, Order(42), attempt=2, error="ConnectionError: away"))
    assert isinstance(outcome, Retry)
    assert outcome.why == "42 is not there yet: ConnectionError: away"
    assert await close(task_for(close, Order(42), attempt=3)) is None
    render(task_for(render, "sales"))


def test_what_the_handler_sees() -> None:
    task = task_for(
        close, Order(42), key="42", group="user-7", attempt=3, id="life", token=9, due_at="2030-01-31T08:00:00+01:00",
        deadline=datetime(2030, 2, 1, tzinfo=UTC), headers={"traceparent": "00-1"},
    )  # fmt: skip
    assert (task.topic, task.key, task.group, task.id, task.token) == ("order.close", "42", "user-7", "life", 9)
    assert (task.state, task.attempt, task.failures, task.error) == ("leased", 3, 2, None)
    assert task.payload == Order(42)
    assert task.payload_bytes == b'{"number":42}'
    assert task.due_at == task.planned_at == datetime(2030, 1, 31, 7, tzinfo=UTC)
    assert task.deadline == datetime(2030, 2, 1, tzinfo=UTC)
    assert task.headers == {"traceparent": "00-1"}
    assert task.lateness == timedelta(0)


def test_it_is_as_late_as_one_says() -> None:
    task = task_for(close, Order(42), late="3s")
    assert task.lateness == timedelta(seconds=3)
    assert app.now() - task.due_at >= timedelta(seconds=3)
    assert task_for(close, Order(42), failures=0, attempt=4).failures == 0


def test_by_topic_alone_the_payload_is_what_json_holds() -> None:
    task = task_for("somebody.else", {"number": 42})
    assert (task.topic, task.payload) == ("somebody.else", {"number": 42})


def test_a_wrong_payload_is_refused_as_it_would_be_at_schedule() -> None:
    wrong: Any = {"number": "forty-two"}
    with pytest.raises(BadPayload, match="Expected `int`"):
        task_for(close, wrong)
    with pytest.raises(BadInput, match="attempt"):
        task_for(close, Order(42), attempt=0)
    with pytest.raises(BadInput, match="topic"):
        task_for("", None)


@pytest.mark.parametrize("isolation", ["", None], ids=["implicit", "explicit"])
async def test_its_transaction_is_the_tests_own_connection(isolation: Any) -> None:
    with closing(sqlite3.connect(":memory:", isolation_level=isolation)) as database:
        database.execute("CREATE TABLE orders (number INTEGER, status TEXT)")
        database.execute("INSERT INTO orders VALUES (42, 'unpaid'), (13, 'unpaid')")
        database.commit()
        await pay(task_for(pay, Order(42), connection=database))
        with pytest.raises(ConnectionError):
            await pay(task_for(pay, Order(13), connection=database))
        database.rollback()
        assert database.execute("SELECT * FROM orders").fetchall() == [(42, "paid"), (13, "unpaid")]


async def test_without_a_connection_a_transaction_says_what_is_missing() -> None:
    with pytest.raises(SetupError, match="connection="):
        await pay(task_for(pay, Order(42)))


async def test_a_lease_is_always_kept() -> None:
    assert await task_for(close, Order(42)).extend("30s")
    with pytest.raises(BadInput):
        await task_for(close, Order(42)).extend("soon")


def test_helpers_are_loaded_when_they_are_asked_for() -> None:
    code = (
        "import sys, bide.testing\n"
        "assert not [name for name in sys.modules if name.startswith('bide.testing.')]\n"
        "assert all(getattr(bide.testing, name) for name in bide.testing.__all__)\n"
        "assert not {'pytest', 'hypothesis'} & set(sys.modules)\n"
        "try: bide.testing.nothing\n"
        "except AttributeError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "nothing" in done.stdout
