"""What rests in a store or comes out of one: options, bodies and rows of tasks, tidings of wakes.

Two readings of damage are right: it is told as damage (ValueError of a body, DecodeError of options), or the task is
read, with what the bytes now say. Then everything that the engine, the console and the calls do with a task has to go
on: a task that cannot be shown would hide its neighbours of the same page, and one that cannot be settled would keep
its worker.
"""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from functools import partial
from typing import Any
from uuid import UUID

from msgspec import DecodeError

from bide.core.errors import BadPayload
from bide.core.instants import LAST_INSTANT, LONGEST
from bide.core.names import new_id
from bide.core.options import decode_options, encode_options
from bide.core.outcomes import Dead, Defer, Retry
from bide.core.payloads import decode_json, encode_payload
from bide.core.records import At, NewTask, Record, State
from bide.core.retry import FOREVER, PRESETS
from bide.core.tasks import Task
from bide.engine.running import inherited_headers, set_running
from bide.engine.terms import Retention
from bide.engine.verdicts import TopicPolicy, settlement, unfit
from bide.ports import wire
from bide.service.shapes import detail_shape, one_line, task_shape
from bide.sinks.trace_headers import trace_headers
from bide.stores.listeners import Listeners
from bide.stores.postgres.wakes import Hearing
from bide.stores.redis.layout import Layout, flags_of, record_of, seed_of
from bide.stores.redis.wakes import Subscriber
from bide.stores.sqlite import rows
from bide.testing.clock import FIRST_INSTANT, ManualClock
from bide_proofs.fuzz.drawing import Draw
from bide_proofs.fuzz.running import Target, check, pure

_POLICY = TopicPolicy(PRESETS["default"], 10)
_KEEP = Retention()
_CLOCK = ManualClock()


_read = partial(json.loads, parse_int=str, parse_float=str)
"""JSON, whose numbers may be larger than any that Python would make of them."""


def worked_on(record: Record) -> None:
    """Whatever is done with a task that was read: shown, delivered, settled. Nothing of it may raise."""
    line = one_line(task_shape(record))
    check(b"\n" not in line and _read(line)["key"] is not None, "a line of JSON shows it")
    _read(one_line(detail_shape(record)))
    task: Task[Any] = Task(record)
    for moment in (task.due_at, task.wake_at, task.planned_at, task.created_at, task.started_at):
        check(moment is None or moment.tzinfo is not None, "an aware time")
    with suppress(BadPayload):
        check(task.payload is not ..., "a payload")
    trace_headers(task)
    set_running(record)
    inherited_headers()
    set_running(None)
    unfit(record, _POLICY, FIRST_INSTANT)
    for ended in (None, Dead("why"), Defer("5s"), Retry("why"), ValueError("\ud800")):
        told = settlement(record, ended, _POLICY, _KEEP, _CLOCK)
        if told.wake is not None:
            length = told.wake.millis
            check(type(length) is int and 0 <= length <= LONGEST, f"to be woken {told.wake}")


def options(draw: Draw) -> None:
    policy = draw.of(None, *PRESETS.values())
    sound = encode_options(policy, draw.of(None, {"a": "b"}, {"traceparent": "00-1-2-01", "é": "ü"}))
    data = draw.bytes(sound) if sound else draw.randbytes(draw.randrange(20))
    draw.note(data)
    try:
        read = decode_options(data)
    except DecodeError as error:
        check(data != sound, "sound options are refused")
        check(str(error), "what is wrong with it")
    else:
        check(data != sound or read.retry == policy, "another policy is read back")
        if read.retry is not None:
            for failures in (1, 2, 30, FOREVER):
                pause = read.retry.delay(failures, draw.random)
                check(pause is None or (type(pause) is int and 0 <= pause <= LONGEST), f"a pause of {pause}")
    worked_on(a_record(draw, options=data))


def payloads(draw: Draw) -> None:
    """A payload of any bytes is shown, and decoded or refused as a payload."""
    sound = encode_payload(draw.of({"number": 42}, [1, 2.5, None, "é"], "text", {"a": {"b": [[]]}}, 2**70, b"\0\xff"))
    data = draw.bytes(sound)
    if draw.chance(0.05):
        data = draw.of(
            b"[" * 100_000, b'{"a":' * 5_000, b"9" * 5_000, b"1e999", b"-0", b'"\\ud800"', b"\xef\xbb\xbf1", b" "
        )
    draw.note(data[:200])
    try:
        read = decode_json(data)
    except BadPayload as error:
        check(error.field == "payload" and error.accepted, "what would be accepted")
    else:
        with suppress(BadPayload):  # such as a number that JSON has and cannot say: 1e999
            check(decode_json(encode_payload(read, 2**30)) == read or read != read, "another value is read back")
    worked_on(a_record(draw, payload=data))


def a_record(draw: Draw, **given: Any) -> Record:
    """Of any state, with sound times unless given."""
    state = draw.choice(list(State))
    ended = FIRST_INSTANT if not state.live else None
    fields: dict[str, Any] = {
        "topic": "t", "key": draw.of("k", "a/b", "\udcff"), "id": new_id(), "group": draw.of(None, "g"), "state": state,
        "due_at": FIRST_INSTANT, "wake_at": FIRST_INSTANT, "planned_at": FIRST_INSTANT, "attempt": draw.randrange(5),
        "failures": draw.of(0, 1, 11, FOREVER), "losses": draw.of(0, 20), "token": FIRST_INSTANT * 1_000,
        "holder": draw.of(None, "w"), "payload": b"{}", "options": b"",
        "deadline": draw.of(None, FIRST_INSTANT - 1, FIRST_INSTANT + 10_000), "error": draw.of(None, "it failed"),
        "created_at": FIRST_INSTANT, "finished_at": ended, "keep_until": ended,
    }  # fmt: skip
    return Record(**(fields | given))


def bodies(draw: Draw) -> None:
    """Bodies of Redis: what was put together is read back, and damage is told as such or leaves a task."""
    new = NewTask(
        "t", "k", draw.of(new_id(), "odd id", str(UUID(int=draw.getrandbits(128))).upper()), At(0),
        draw.of(b"", b"{}", draw.randbytes(20)), draw.of(None, "g", "é" * 20), draw.of(b"", b"\x80"),
        deadline=draw.of(None, 0, FIRST_INSTANT),
    )  # fmt: skip
    flags = flags_of(new)
    times = b"".join((FIRST_INSTANT + number).to_bytes(6, "big") for number in (3, 2, 4))
    seed = seed_of(new, flags)
    if draw.chance(0.5):
        flags |= 8 | draw.randrange(5)
        counts = b"".join(number.to_bytes(4, "big") for number in (2, 1, 0))
        seed = b"".join(
            (FIRST_INSTANT.to_bytes(6, "big"), counts, times[:12], b"\1w", (3).to_bytes(4, "big"), b"bad", seed)
        )
    sound = bytes([flags]) + (7).to_bytes(7, "big") + times + seed
    data = draw.bytes(sound)
    draw.note(data)
    try:
        record = record_of("t", "k", data)
    except ValueError as error:
        check(data != sound, "a sound body is refused")
        check(str(error), "what is wrong with it")
        return
    if data == sound:
        check((record.id, record.payload, record.group, record.options, record.deadline)
              == (new.id, new.payload, new.group, new.options, new.deadline), "another task is read back")  # fmt: skip
    worked_on(record)


def sql_rows(draw: Draw) -> None:
    """Rows as SQL stores hand them over, a column or two of which hold what another program, or a fault, left there."""
    record = a_record(draw)
    row: list[Any] = [record.topic, record.key, *rows.values_of(record, 1)]
    check(rows.record_of(row) == record or record.finished_at, "another task is read back")
    integers = [place for place, value in enumerate(row) if type(value) is int and place != rows.STATE]
    for _ in range(draw.randrange(1, 4)):
        row[draw.choice(integers)] = draw.of(draw.number() % 2**63, -(draw.number() % 2**63), LAST_INSTANT + 1, -1, 0)
    if draw.chance(0.3):
        row[rows.STATE] = draw.of(*range(5), 5, 9, -1)
    if draw.chance(0.3):
        for place in rows.TEXTS:
            if row[place] is not None:
                row[place] = draw.bytes(str(row[place]).encode("utf-8", "replace"))
        read = rows.mended(row)
    else:
        try:
            read = rows.record_of(row)
        except IndexError:
            check(row[rows.STATE] not in range(5), "a sound row is refused")
            read = rows.mended([value.encode("utf-8", "replace") if isinstance(value, str) else value for value in row])
    draw.note(row)
    worked_on(read)


def tidings(draw: Draw) -> None:
    """Messages of the wakes of others: what is none is passed over, and the subscriber goes on."""
    heard: list[tuple[str, int]] = []
    listeners = Listeners(logging.getLogger("bide.fuzz"))
    kind = draw.of("redis", "postgres", "http")
    if kind == "redis":
        layout = Layout("n", 4)
        subscriber = Subscriber(None, layout, None, "e", lambda shard, topic, wake: heard.append((topic, wake)))  # type: ignore[arg-type]
        subscriber.stop()  # it has no server to listen to
        sound = f"3 {FIRST_INSTANT} t".encode()
        data = draw.bytes(sound, 60)
        draw.note(data)
        subscriber._take([b"message", layout.wake_channel(), data])
    elif kind == "postgres":
        hearing = Hearing(None, "c", "e", None, patience=1)  # type: ignore[arg-type]
        hearing.told = lambda wakes: heard.extend(wakes.items())
        sound = b'{"t":%d}' % FIRST_INSTANT
        data = draw.bytes(sound, 60)
        draw.note(data)
        hearing._take(None, 1, "c", data.decode("utf-8", "replace"))
    else:
        sound = b'["t",%d]\n' % FIRST_INSTANT
        data = draw.bytes(sound, 60)
        draw.note(data)
        with suppress(ValueError):
            heard.append(wire.read_tiding(data))
    check(data != sound or heard == [("t", FIRST_INSTANT)], f"heard {heard}")
    for topic, wake in heard:
        listeners.tell(topic, wake)


__all__ = ["TARGETS", "a_record", "worked_on"]

TARGETS = (
    Target("options", "the options of a stored task", pure(options)),
    Target("payloads", "payloads of any bytes", pure(payloads)),
    Target("bodies", "bodies of tasks in Redis", pure(bodies)),
    Target("rows", "rows of tasks in SQL", pure(sql_rows)),
    Target("tidings", "messages of wakes: Redis, PostgreSQL, HTTP", pure(tidings)),
)
