"""What rests in a store or comes out of one: options, payloads, bodies and rows of tasks, messages of wakes.

Two readings of damage are right: it is told as damage, or the task is read with what the bytes now say, and whatever is
done with a task goes on.
"""

from __future__ import annotations

import json
import logging
import random
from contextlib import suppress
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import strategies as st
from msgspec import DecodeError
from msgspec.structs import replace
from tests.fuzz.cases import NUMBERS, damaged, fuzz, mostly, near_bytes, refusals
from tests.fuzz.conftest import Loop
from tests.fuzz.tasks import SOUND, made, records, worked_on

from bide.core.errors import BadPayload
from bide.core.instants import LAST_INSTANT, LONGEST, At
from bide.core.names import new_id
from bide.core.options import decode_options, encode_options
from bide.core.payloads import decode_json, encode_payload
from bide.core.records import NewTask, Record, State
from bide.core.retry import FOREVER, PRESETS
from bide.ports import remote
from bide.service.schemas import one_line, task_shape
from bide.stores.listeners import Listeners
from bide.stores.postgres.wakes import Subscription
from bide.stores.redis.layout import Layout, flags_of, record_of, seed_of
from bide.stores.redis.wakes import Subscriber
from bide.stores.sql.rows import STATE, values_of
from bide.stores.sql.rows import record_of as record_of_row
from bide.stores.sqlite import rows
from bide.testing.clock import FIRST_INSTANT as NOW

HEADERS = st.sampled_from([None, {"a": "b"}, {"traceparent": "00-1-2-01", "é": "ü"}])


@fuzz(400, retry=st.sampled_from([None, *PRESETS.values()]), headers=HEADERS, draws=st.data(), record=records())
def test_options(retry: Any, headers: Any, draws: st.DataObject, record: Record) -> None:
    sound = encode_options(retry, headers)
    data = draws.draw(near_bytes(sound))
    with refusals(DecodeError) as refused:
        read = decode_options(data).retry
        assert data != sound or read == retry
        for failures in (1, 2, 30, FOREVER):
            pause = read.delay(failures, random.Random(1).random) if read else None
            assert pause is None or (type(pause) is int and 0 <= pause <= LONGEST)
    assert not refused or data != sound
    worked_on(replace(record, options=data))


PAYLOADS: list[Any] = [{"number": 42}, [1, 2.5, None, "é"], "text", {"a": {"b": [[]]}}, 2**70, b"\0\xff"]
ODD_JSON = [
    b"[" * 100_000, b'{"a":' * 5_000, b"9" * 5_000, b"1e999", b"-0", b'"\\ud800"', b"\xef\xbb\xbf1", b" ",
]  # fmt: skip


@fuzz(
    400,
    data=mostly(st.sampled_from(PAYLOADS).map(encode_payload).flatmap(near_bytes), st.sampled_from(ODD_JSON)),
    record=records(),
)
def test_payloads(data: bytes, record: Record) -> None:
    """A payload of any bytes is shown, and decoded or refused as a payload."""
    with refusals(BadPayload) as refused:
        read = decode_json(data)
        with suppress(BadPayload):  # such as a number that JSON has and cannot say: 1e999
            assert decode_json(encode_payload(read, 2**30)) == read or read != read
    assert all(str(error).startswith("payload") for error in refused)
    worked_on(replace(record, payload=data))


@fuzz(
    400,
    new=st.builds(
        NewTask, st.just("t"), st.just("k"), st.sampled_from([new_id(), "odd id", new_id().upper()]), st.just(At(0)),
        st.binary(max_size=20), st.sampled_from([None, "g", "é" * 20]), st.sampled_from([b"", b"\x80"]),
        deadline=st.sampled_from([None, 0, NOW]),
    ),
    under_way=st.none() | st.integers(0, 4),
    draws=st.data(),
)  # fmt: skip
def test_bodies_of_redis(new: NewTask, under_way: int | None, draws: st.DataObject) -> None:
    """What was put together is read back; damage is told as such, or leaves a task."""
    flags, seed = flags_of(new), seed_of(new, flags_of(new))
    times = b"".join((NOW + number).to_bytes(6, "big") for number in (3, 2, 4))
    if under_way is not None:
        flags |= 8 | under_way
        counts = b"".join(number.to_bytes(4, "big") for number in (2, 1, 0))
        seed = NOW.to_bytes(6, "big") + counts + times[:12] + b"\1w" + (3).to_bytes(4, "big") + b"bad" + seed
    sound = bytes([flags]) + (7).to_bytes(7, "big") + times + seed
    data = draws.draw(near_bytes(sound))
    record = None
    with refusals(ValueError):
        record = record_of("t", "k", data)
    if record is None:
        assert data != sound
        return
    if data == sound:
        assert (record.id, record.payload, record.group, record.options, record.deadline) == (
            new.id, new.payload, new.group, new.options, new.deadline,
        )  # fmt: skip
    worked_on(record)


ODD_INTEGERS = NUMBERS.map(lambda number: number % 2**63) | st.sampled_from([LAST_INSTANT + 1, -1, 0, -(2**63), 2**62])


@fuzz(400, record=records(), draws=st.data(), state=mostly(st.none(), st.sampled_from([*range(6), 9, -1]), 7))
def test_rows_of_sql(record: Record, draws: st.DataObject, state: int | None) -> None:
    """A column or two hold what another program, or a fault, left there."""
    row: list[Any] = [record.topic, record.key, *values_of(record, record.error)[2:], 1]
    assert record_of_row(row) == record or record.finished_at
    integers = [place for place, value in enumerate(row) if type(value) is int and place != STATE]
    for place in draws.draw(st.lists(st.sampled_from(integers), min_size=1, max_size=3)):
        row[place] = draws.draw(ODD_INTEGERS)
    if state is not None:
        row[STATE] = state
    if draws.draw(st.booleans()):
        try:
            read = record_of_row(row)
        except IndexError:
            assert row[STATE] not in range(5)
            row = [value.encode("utf-8", "replace") if isinstance(value, str) else value for value in row]
            read = rows.mended(row)
    else:
        for place in (0, 1, 2, 3, 12, 16):  # those of text
            if row[place] is not None:
                row[place] = draws.draw(damaged(str(row[place]).encode("utf-8", "replace")))
        read = rows.mended(row)
    worked_on(read)


WAKES = {"redis": b"3 %d t" % NOW, "postgres": b'{"t":%d}' % NOW, "http": b'["t",%d]\n' % NOW}


@fuzz(100, said=st.sampled_from(list(WAKES)).flatmap(lambda kind: st.tuples(st.just(kind), near_bytes(WAKES[kind]))))
def test_messages_of_wakes(loop: Loop, said: tuple[str, bytes]) -> None:
    """What is none is passed over, and whoever listens goes on."""
    kind, data = said
    heard = loop.finish(told_by(kind, data))
    assert data != WAKES[kind] or heard == [("t", NOW)]
    listeners = Listeners(logging.getLogger("bide.fuzz"))
    for topic, wake in heard:
        listeners.notify(topic, wake)


async def told_by(kind: str, data: bytes) -> list[tuple[str, int]]:
    heard: list[tuple[str, int]] = []
    if kind == "redis":
        layout = Layout("n", 4)
        subscriber = Subscriber(None, layout, None, "e", lambda shard, topic, wake: heard.append((topic, wake)))  # type: ignore[arg-type]
        subscriber.stop()  # it has no server to listen to
        subscriber._take([b"message", layout.wake_channel(), data])
    elif kind == "postgres":
        nowhere = Mock(notify=lambda wakes: heard.extend(wakes.items()))  # it has no server to listen to
        Subscription(nowhere, "c", patience=1)._take(None, 1, "c", data.decode("utf-8", "replace"))
    else:
        with suppress(ValueError):
            heard.append(remote.read_wake(data))
    return heard


# --- what was found


def broken(**given: object) -> Record:
    return made({"state": State.LEASED, **given})


@pytest.mark.parametrize(
    "record",
    [
        broken(due_at=2**48 - 1, wake_at=2**62),
        broken(created_at=-(2**62), deadline=2**62),
        broken(token=-(2**63)),
        broken(options=b"\x81\xa7headers\x81\xa1a\xa1\xff"),
        broken(payload=b"1e999"),
    ],
)
def test_a_damaged_task_can_be_shown_and_settled(record: Record) -> None:
    worked_on(record)


def test_a_name_that_no_utf8_can_say_is_shown_escaped() -> None:
    shown = task_shape(made({"topic": "\udcfft", "key": "é\udc80"}))
    line = json.loads(one_line(shown))
    assert (line["topic"], line["key"]) == ("\\udcfft", "é\\udc80")
    assert line["due_at"] == task_shape(SOUND).due_at
