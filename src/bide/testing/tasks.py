"""A task made by hand, to call a handler in a unit test: without an open app, a store or waiting."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any, TypedDict, TypeVar, Unpack, overload

from bide.app import Handler
from bide.core.errors import SetupError
from bide.core.instants import Length, When, duration, instant
from bide.core.names import check_name, check_topic, new_id
from bide.core.options import encode_options
from bide.core.payloads import encode_payload
from bide.core.records import Record, State
from bide.core.tasks import Task
from bide.engine.verbs import whole_number

P = TypeVar("P")


class HandTask(Task[Any]):
    """A task as a running handler gets it. A test can check afterwards how the handler used it."""

    __slots__ = ("_connection", "_late", "completed", "extended")

    def __init__(self, record: Record, late: timedelta, connection: Any) -> None:
        super().__init__(record)
        self._late = late
        self._connection = connection
        self.completed = False
        """True once the handler's transaction was committed."""
        self.extended: list[Length] = []
        """All lengths by which the handler extended its lease."""

    @property
    def lateness(self) -> timedelta:
        return self._late

    @asynccontextmanager
    async def transaction(self, *, again_at: When | None = None, again_in: Length | None = None) -> AsyncIterator[Any]:
        """The task's connection, which commits on leaving without an error and else rolls back."""
        if self._connection is None:
            raise SetupError("this handler opens a transaction: make its task with task_for(..., connection=...)")
        if not self._connection.in_transaction:
            self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield self._connection
        except BaseException:
            self._connection.rollback()
            raise
        self._connection.commit()
        self.completed = True

    async def extend(self, by: Length) -> bool:
        duration(by, field="by")
        self.extended.append(by)
        return True


class TaskDetails(TypedDict, total=False):
    """The options of `task_for`, which explains each."""

    key: str
    group: str | None
    attempt: int
    failures: int | None
    error: str | None
    id: str | None
    token: int
    due_at: When | None
    late: Length
    deadline: When | None
    headers: Mapping[str, str] | None
    connection: object


@overload
def task_for(topic: Handler[P], payload: P, **details: Unpack[TaskDetails]) -> Task[P]: ...


@overload
def task_for(topic: str, payload: object = None, **details: Unpack[TaskDetails]) -> Task[Any]: ...


def task_for(
    topic: Handler[Any] | str,
    payload: object = None,
    *,
    key: str = "1",
    group: str | None = None,
    attempt: int = 1,
    failures: int | None = None,
    error: str | None = None,
    id: str | None = None,
    token: int = 1,
    due_at: When | None = None,
    late: Length = "0s",
    deadline: When | None = None,
    headers: Mapping[str, str] | None = None,
    connection: object = None,
) -> Task[Any]:
    """Make a leased task of `topic`, as its handler gets it: `await close(task_for(close, Order(42)))`.

    The payload is encoded, decoded and checked, as on its way through a store. Each earlier attempt counts as a failure
    unless `failures` is given. By default the task is due now; `due_at` sets another time. `late` is the value of
    `task.lateness`, and without `due_at` the task was due that long ago. `task.transaction()` yields `connection`, a
    `sqlite3.Connection` to your test's database. Raises BadInput, BadPayload.
    """
    whole_number("attempt", attempt, 1, 2**31 - 1)
    now = time.time_ns() // 1_000_000
    if isinstance(topic, Handler):
        now = topic._app.clock.now()
        topic._sink.check(payload)
    behind = duration(late, field="late")
    due = now - behind if due_at is None else instant(due_at, field="due_at")
    record = Record(
        topic=topic.topic if isinstance(topic, Handler) else check_topic(topic), key=check_name("key", key),
        id=id or new_id(), group=None if group is None else check_name("group", group), state=State.LEASED, due_at=due,
        wake_at=now + 10_000, planned_at=due, attempt=attempt, failures=attempt - 1 if failures is None else failures,
        losses=0, token=token, holder="test", payload=encode_payload(payload), options=encode_options(None, headers),
        deadline=None if deadline is None else instant(deadline, field="deadline"), error=error, created_at=due,
        finished_at=None, keep_until=None,
    )  # fmt: skip
    task = HandTask(record, timedelta(milliseconds=behind), connection)
    if isinstance(topic, Handler):
        topic._sink.read(task)
    return task
