"""Answers: one word and a task, and no truth value to stumble over."""

from __future__ import annotations

import pytest

from bide.core.answers import Answer
from bide.core.instants import In
from bide.core.lifecycle import schedule
from bide.core.records import NewTask, Result, State

AS_ASKED = {"created", "replaced", "kept", "moved", "cancelled", "cancelled_while_leased", "redriven"}


def test_an_answer_is_neither_true_nor_false() -> None:
    for result in Result:
        with pytest.raises(TypeError, match=f"{result.value}.*answer.ok"):
            bool(Answer(result))
        with pytest.raises(TypeError):
            assert not Answer(result)


@pytest.mark.parametrize("result", Result)
def test_ok_says_whether_what_was_asked_for_holds(result: Result) -> None:
    assert Answer(result).ok is (result.value in AS_ASKED)


def test_a_result_is_its_text() -> None:
    assert Answer(Result.CANCELLED).result == "cancelled"


def test_an_answer_carries_the_task() -> None:
    assert Answer(Result.NOT_FOUND).task is None
    new = NewTask("order.close", "42", "life-1", In(900_000), b'{"number":42}', group="user-7")
    task = schedule(new, None, 1_000, 1).task
    assert task is not None
    assert (task.topic, task.key, task.id, task.group) == ("order.close", "42", "life-1", "user-7")
    assert task.state is State.WAITING
    assert task.payload == {"number": 42}
    assert task.wake_at == task.due_at
    assert (task.due_at.timestamp(), task.created_at.timestamp()) == (901.0, 1.0)
    assert task.deadline is None
    assert task.finished_at is None
    assert dict(task.headers) == {}
