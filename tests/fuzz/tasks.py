"""A task as it may rest in a store, and everything that the engine, the console and the calls do with one."""

from __future__ import annotations

import json
from contextlib import suppress
from functools import partial
from typing import Any

from hypothesis import strategies as st

from bide.core.errors import BadPayload
from bide.core.instants import LONGEST
from bide.core.names import new_id
from bide.core.outcomes import Dead, Defer, Retry
from bide.core.records import Record, State
from bide.core.retry import FOREVER, PRESETS
from bide.core.tasks import Task
from bide.engine.config import Retention
from bide.engine.delivery.settlement import reject_reason, settlement_for
from bide.engine.session import inherited_headers, set_running
from bide.ports import Policy
from bide.service.schemas import detail_shape, one_line, task_shape
from bide.sinks.webhook.sending import trace_headers
from bide.testing.clock import FIRST_INSTANT as NOW
from bide.testing.clock import ManualClock

POLICY = Policy(PRESETS["default"])
SOUND = Record(
    topic="t", key="k", id=new_id(), group=None, state=State.WAITING, due_at=NOW, wake_at=NOW, planned_at=NOW,
    attempt=1, failures=0, losses=0, token=NOW * 1_000, holder=None, payload=b"{}", options=b"", deadline=None,
    error=None, created_at=NOW, finished_at=None, keep_until=None,
)  # fmt: skip
_read = partial(json.loads, parse_int=str, parse_float=str)
"""JSON, whose numbers may be larger than any that Python would make of them."""


def records(**given: st.SearchStrategy[Any]) -> st.SearchStrategy[Record]:
    """Tasks of any state, with sound times unless given."""
    fields: dict[str, st.SearchStrategy[Any]] = {
        "key": st.sampled_from(["k", "a/b", "\udcff"]), "group": st.sampled_from([None, "g"]),
        "attempt": st.integers(0, 5), "failures": st.sampled_from([0, 1, 11, FOREVER]),
        "losses": st.sampled_from([0, 20]), "holder": st.sampled_from([None, "w"]),
        "deadline": st.sampled_from([None, NOW - 1, NOW + 10_000]), "error": st.sampled_from([None, "it failed"]),
        "state": st.sampled_from(State),
    }  # fmt: skip
    return st.fixed_dictionaries(fields | given).map(made)


def made(fields: dict[str, Any]) -> Record:
    """The sound task with these fields."""
    ended = None if fields.get("state", SOUND.state).live else NOW
    return Record(
        **{name: getattr(SOUND, name) for name in SOUND.__struct_fields__}
        | {"finished_at": ended, "keep_until": ended}
        | fields
    )


def worked_on(record: Record) -> None:
    """Show it, deliver it, settle it. Nothing of that may raise: a task that cannot be shown would hide its neighbours
    of the same page, and one that cannot be settled would keep its worker."""
    line = one_line(task_shape(record))
    assert b"\n" not in line
    assert _read(line)["key"] is not None
    _read(one_line(detail_shape(record)))
    task: Task[Any] = Task(record)
    for moment in (task.due_at, task.wake_at, task.planned_at, task.created_at, task.started_at):
        assert moment is None or moment.tzinfo is not None
    with suppress(BadPayload):
        assert task.payload is not ...
    trace_headers(task)
    set_running(record)
    inherited_headers()
    set_running(None)
    reject_reason(record, POLICY, NOW)
    for ended in (None, Dead("why"), Defer("5s"), Retry("why"), ValueError("\ud800")):
        wake = settlement_for(record, ended, POLICY, Retention(), ManualClock()).next_at
        assert wake is None or (type(wake.millis) is int and 0 <= wake.millis <= LONGEST)
