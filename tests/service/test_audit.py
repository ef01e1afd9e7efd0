"""The audit log: a line for every change, and few enough for what is refused."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from bide import Bide
from bide.engine.context import acting_as
from bide.service.audit import Refusals, audit, audit_unknown, network_of
from bide.service.authz import AccessRefused, Forbidden, Unauthorized, Verb

PARTS = ("who", "verb", "topic", "key", "id", "was", "wake_at", "answer")


def lines(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == "bide.audit"]


def parts(record: logging.LogRecord, *names: str) -> tuple[Any, ...]:
    return tuple(getattr(record, name) for name in names)


async def test_a_change_is_a_line_that_says_who_what_from_and_to(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "bide.audit")
    async with Bide("memory:") as app:
        with acting_as("ann", audit):
            await app.schedule("order.close", 1, key="k", group="g", at="2040-01-01T00:00Z")
            await app.reschedule("order.close", "k", at="2041-01-01T00:00Z")
            task = await app.get("order.close", "k")
            assert task is not None
            await app.reschedule("order.close", "gone", delay="1h")
            await app.cancel("order.close", "k", if_token=1)
            await app.schedule("order.close", 1, key="k", group="g", on_conflict="keep", delay="1h")
            await app.schedule("order.close", 1, key="k", group="g", at="2042-01-01T00:00Z")
            await app.shift("g", "1h")
            await app.cancel("order.close", "k")
    found = lines(caplog)
    assert [parts(record, "who", "verb", "topic", "key", "answer", "was", "wake_at") for record in found] == [
        ("ann", verb, "order.close", "k", answer, was, wake_at)
        for verb, answer, was, wake_at in (
            ("schedule", "created", None, "2040-01-01T00:00:00.000Z"),
            ("reschedule", "moved", "2040-01-01T00:00:00.000Z", "2041-01-01T00:00:00.000Z"),
            ("schedule", "replaced", "2041-01-01T00:00:00.000Z", "2042-01-01T00:00:00.000Z"),
            ("shift", "moved", "2042-01-01T00:00:00.000Z", "2042-01-01T01:00:00.000Z"),
            ("cancel", "cancelled", None, None),
        )
    ], "what changed nothing has no line"
    assert found[0].id == found[1].id == task.record.id  # type: ignore[attr-defined]
    assert all(set(PARTS) <= set(vars(record)) for record in found)
    assert found[1].getMessage() == "ann: reschedule order.close/k: moved"


async def test_new_tasks_are_one_line_in_all(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "bide.audit")
    async with Bide("memory:") as app:
        await app.schedule("a", key="there", delay="1h")
        with acting_as("ann", audit):
            await app.schedule_many(
                [app.new(topic, key=key, delay="1h") for topic in "ab" for key in ("there", "new", "too")]
            )
    replaced, created = lines(caplog)
    assert parts(replaced, "topic", "key", "answer") == ("a", "there", "replaced")
    assert parts(created, "who", "verb", "count", "topics", "answer") == (
        "ann", "schedule", 5, {"a": 2, "b": 3}, "created",
    )  # fmt: skip
    assert created.getMessage() == "ann: schedule 5 tasks of a, b: created"


async def test_nothing_is_made_where_nobody_listens(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "bide.audit")
    async with Bide("memory:") as app:
        with acting_as("ann", audit):
            await app.schedule("a", key="there", delay="1h")
    assert lines(caplog) == []


def test_a_change_whose_answer_was_lost_is_a_line_too(caplog: pytest.LogCaptureFixture) -> None:
    audit_unknown("ann", "cancel", "order.close", "k")
    audit_unknown("ann", "cancel")
    one, many = lines(caplog)
    assert parts(one, "who", "verb", "topic", "key", "answer") == ("ann", "cancel", "order.close", "k", "unknown")
    assert one.getMessage() == "ann: cancel order.close/k: the outcome is unknown"
    assert many.getMessage() == "ann: cancel many: the outcome is unknown"


class At:
    """A clock to be set."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_refusals_cannot_fill_a_disk(caplog: pytest.LogCaptureFixture) -> None:
    clock = At()
    refusals = Refusals(clock)
    for _ in range(5_000):
        refusals.note(Unauthorized("no"), "203.0.113.7")
    assert len(lines(caplog)) == 10, "one peer"
    clock.now = 10.0
    refusals.note(Unauthorized("no"), "203.0.113.7")
    refusals.note(Unauthorized("no"), "203.0.113.7")
    assert len(lines(caplog)) == 11, "and one more every ten seconds"
    assert parts(lines(caplog)[-1], "left_out", "peer", "answer") == (4_990, "203.0.113.7", "unauthorized")

    caplog.clear()
    for number in range(20_000):
        clock.now += 0.01
        refusals.note(Unauthorized("no"), f"2001:db8:{number >> 16:x}:{number & 0xFFFF:x}::1")
    assert 280 <= len(lines(caplog)) <= 310, "200 s from 20,000 networks: a hundred, and one a second"
    assert len(refusals._peers) <= Refusals.MOST_PEERS, "what is remembered of them is bounded"


def test_one_who_is_refused_often_does_not_hide_another(caplog: pytest.LogCaptureFixture) -> None:
    refusals = Refusals(At())
    for _ in range(100):
        refusals.note(Forbidden(Verb.CANCEL, "pay", "ann"), "203.0.113.7")
    refusals.note(Forbidden(Verb.CANCEL, "pay", "bob"), "203.0.113.7")
    refusals.note(Unauthorized("no"), "203.0.113.8")
    assert [parts(record, "who", "peer") for record in lines(caplog)[10:]] == [
        ("bob", "203.0.113.7"),
        (None, "203.0.113.8"),
    ]
    assert parts(lines(caplog)[0], "verb", "topic", "answer") == ("cancel", "pay", "forbidden")


@pytest.mark.parametrize(
    "error", [Forbidden(Verb.READ, "a\nbide: forged line\r\n" + "x" * 10_000, "ann"), Unauthorized("no")]
)
def test_a_line_stays_a_short_line(error: AccessRefused, caplog: pytest.LogCaptureFixture) -> None:
    Refusals().note(error, "::1")
    [line] = lines(caplog)
    assert len(line.getMessage().splitlines()) == 1
    assert len(line.getMessage()) < 500


@pytest.mark.parametrize(
    ("peer", "network"),
    [
        ("203.0.113.7", "203.0.113.7"),
        ("::ffff:203.0.113.7", "203.0.113.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("local", "local"),
    ],
)
def test_what_one_party_has_of_addresses(peer: str, network: str) -> None:
    assert network_of(peer) == network
