"""Parts that several stores share: batches, sorted chunks, clocks, errors of resending, servers that are not there."""

from __future__ import annotations

import asyncio
import re
import time
from bisect import bisect_left, bisect_right, insort
from collections.abc import Mapping
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch
from zoneinfo import ZoneInfo

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bide import Bide, SetupError, StoreUnavailable
from bide.core.errors import BadInput, OutcomeUnknown, StoreError, StoreFull
from bide.core.instants import LAST_INSTANT, instant
from bide.core.payloads import TOGETHER, slices
from bide.core.records import Ref
from bide.engine.session import run_on_this_thread
from bide.stores.batches import Conflicts
from bide.stores.driver_adapters import awaited
from bide.stores.mysql import queries as mysql
from bide.stores.naive_times import instant_of, stretch
from bide.stores.named_queries import read_queries
from bide.stores.postgres import queries as postgres
from bide.stores.resending import Resending
from bide.stores.server import ServerTime, StoreClock
from bide.stores.sorted_chunks import SortedChunks
from bide.stores.sqlite.rows import QUERIES
from bide.testing.store_suite.base import new
from bide_proofs.servers.process import free_port


@given(st.lists(st.integers(0, 7), max_size=40), st.integers(1, 10))
@example([7, 1, 5, 6, 0, 0, 2], 3)
def test_a_batch_is_cut_by_number_and_by_bytes_and_no_more_than_needed(sizes: list[int], most: int) -> None:
    payloads = [bytes(size * TOGETHER // 6) for size in range(8)]
    tasks = [new(str(place), payload=payloads[size]) for place, size in enumerate(sizes)]
    parts = slices(tasks, most)
    assert [task for part in parts for task in part] == tasks
    loads = [sum(len(task.payload) for task in part) for part in parts]
    for place, part in enumerate(parts):
        assert len(part) == 1 or (len(part) <= most and loads[place] <= TOGETHER)
        if place + 1 < len(parts) and sum(map(len, parts[: place + 1])) % most:
            assert loads[place] + len(parts[place + 1][0].payload) > TOGETHER
    assert slices([Ref("t", str(number)) for number in range(3)], 2) == [[("t", "0"), ("t", "1")], [("t", "2")]]


OURS, THEIRS = [Ref("ours", "1"), Ref("ours", "2")], [Ref("theirs", "1")]


def test_conflicts_are_likely_for_some_batches_of_the_topic_after_one() -> None:
    conflicts = Conflicts()
    assert not conflicts.likely(OURS)
    conflicts.met(OURS, [])
    assert not conflicts.likely(OURS)
    conflicts.met([*OURS, *THEIRS], OURS[:1])
    assert conflicts.likely([*OURS, *THEIRS])
    assert not conflicts.likely(THEIRS)
    for _ in range(Conflicts.BATCHES - 1):
        conflicts.met(OURS, [])
        assert conflicts.likely(OURS)
    conflicts.met(OURS, [])
    assert not conflicts.likely(OURS)


def test_topics_without_end_do_not_fill_the_memory() -> None:
    conflicts = Conflicts()
    for number in range(3 * Conflicts.TOPICS):
        task = [Ref(f"tenant-{number}", "1")]
        conflicts.met(task, task)
        assert conflicts.likely(task)
    assert len(conflicts._wary) <= Conflicts.TOPICS


async def answered_already() -> int:
    """A driver's call whose answer was there before it was waited for."""
    return 1


async def test_a_thread_without_a_loop_is_refused_also_what_need_not_wait() -> None:
    assert await awaited(answered_already()) == 1
    with pytest.raises(SetupError, match="await"):
        await asyncio.to_thread(lambda: run_on_this_thread(awaited(answered_already())))


def test_a_refusal_says_that_nothing_was_done_unless_an_answer_was_lost() -> None:
    resending, full, bad = Resending(10.0), StoreFull("full"), BadInput("task", "x", "a task")
    assert resending.refused(full) is full
    resending.may_be_done = True
    assert type(resending.refused(full)) is OutcomeUnknown
    assert resending.refused(bad) is bad, "that is no error of the store's"
    unknown = OutcomeUnknown("?")
    assert resending.refused(unknown) is unknown


@pytest.mark.parametrize(("may_be_done", "kind"), [(False, StoreUnavailable), (True, OutcomeUnknown)])
async def test_once_patience_is_over_it_is_not_sent_again(may_be_done: bool, kind: type[StoreError]) -> None:
    resending = Resending(-1.0)
    resending.may_be_done = may_be_done
    with pytest.raises(StoreError, match="away") as raised:
        await resending.pause("away")
    assert type(raised.value) is kind


def seen(there: float, answers: list[tuple[float, float, float]]) -> ServerTime:
    """After answers at (moment, way there, way back), by a server that is ahead of the steady clock by `there`."""
    known = ServerTime()
    for moment, out, back in answers:
        known.saw(int((moment + there) * 1e6), moment - out, moment + back)
    return known


def ahead(known: ServerTime) -> float:
    """Seconds by which the server's clock is ahead of the steady one, by what is known."""
    with patch("time.monotonic", return_value=0.0):
        return known.seconds()


@given(
    there=st.floats(-1e6, 1e9),
    answers=st.lists(st.tuples(st.floats(0, 100), st.floats(0, 0.5), st.floats(0, 0.5)), min_size=1, max_size=20),
)
def test_it_is_known_within_half_of_the_quickest_round_trip(
    there: float, answers: list[tuple[float, float, float]]
) -> None:
    answers.sort()
    known = seen(there + 1e6, answers)
    quickest = min(out + back for _, out, back in answers)
    assert abs(ahead(known) - (there + 1e6)) <= quickest / 2 + 100 * 200e-6 + 1e-3


def test_a_clock_that_was_set_is_believed_at_once() -> None:
    known = seen(1000.0, [(1.0, 0.001, 0.001), (2.0, 0.001, 0.001)])
    known.saw(int((3.0 + 4600.0) * 1e6), 2.999, 3.001)
    assert ahead(known) == pytest.approx(4600.0, abs=0.01)


def test_the_clock_of_the_engine_does_not_care_what_this_machine_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    known = ServerTime()
    known.saw(1_700_000_000_000_000, 100.0, 100.0)
    clock = StoreClock(known)
    monkeypatch.setattr(time, "time", lambda: 5.0)
    monkeypatch.setattr(time, "time_ns", lambda: 5_000_000_000)
    assert clock.now() == 1_700_000_000_000
    assert clock.seconds_until(1_700_000_010_000) == pytest.approx(10)
    assert known.skew < -1_600_000_000


@pytest.mark.parametrize(("spans", "asked"), [([0.01], 1), ([2.0, 0.01], 2), ([2.0, 1.0, 3.0, 0.01], 3)])
async def test_a_slow_look_is_repeated_a_few_times(
    monkeypatch: pytest.MonkeyPatch, spans: list[float], asked: int
) -> None:
    """The first may have waited for a connection: it tells the time to within half of all that."""
    moment, there, times = 100.0, 5000.0, 0

    async def ask() -> int:
        """Answered at once, and heard late."""
        nonlocal moment, times
        answer = int((moment + there) * 1e6)
        moment += spans[times]
        times += 1
        return answer

    known = ServerTime()
    with monkeypatch.context() as patched:
        patched.setattr("bide.stores.server.time", SimpleNamespace(monotonic=lambda: moment))
        await known.read(ask)
    assert times == asked
    assert abs(ahead(known) - there) <= min(spans[:asked]) / 2 + 0.01


entries = st.tuples(st.sampled_from("abc"), st.integers(0, 9))
bounds = st.one_of(st.just(()), st.tuples(st.sampled_from("abcd")), entries)


@settings(max_examples=40)
@given(st.sets(entries, min_size=8), st.lists(st.tuples(st.booleans(), entries), min_size=20, max_size=60), bounds)
def test_it_is_a_sorted_list(
    first: set[tuple[str, int]], changes: list[tuple[bool, tuple[str, int]]], bound: tuple[str, int]
) -> None:
    chunks = SortedChunks(first, longest=4)
    plain = sorted(first)
    for adding, entry in changes:
        there = entry in plain
        if adding and not there:
            chunks.add(entry)
            insort(plain, entry)
        elif not adding:
            assert chunks.discard(entry) is there
            if there:
                plain.remove(entry)
        assert list(chunks.after(())) == plain
        assert len(chunks) == len(plain)
        assert all(chunks._chunks), "none is empty"
        assert list(chunks.after(bound)) == plain[bisect_right(plain, bound) :]
        assert chunks.rank(bound) == bisect_left(plain, bound)


@pytest.mark.parametrize("step", [1, -1, 7919])
def test_no_chunk_grows_too_long(step: int) -> None:
    chunks: SortedChunks[tuple[int]] = SortedChunks(longest=16)
    for number in range(2_000):
        chunks.add((number * step % 10_007,))
    assert max(map(len, chunks._chunks)) <= 16
    assert len(chunks._chunks) < 2_000 // 4
    assert list(chunks.after(())) == sorted((number * step % 10_007,) for number in range(2_000))


@pytest.mark.parametrize(
    "url",
    [
        "redis://{there}/0", "redis+cluster://{there}", "postgresql://u@{there}/d", "mysql://u@{there}/d",
        "http://{there}",
    ],
)  # fmt: skip
async def test_a_refused_connection_asks_whether_the_server_runs(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("redis.store", "sql.store", "http.calls"):
        monkeypatch.setattr(f"bide.stores.{module}._AT_FIRST", 0.1)
    there = f"127.0.0.1:{free_port()}"
    with pytest.raises(
        StoreUnavailable, match=rf"{there}.*: cannot be reached: connection refused; is it running\?"
    ) as caught:
        async with Bide(url.format(there=there)) as app:
            await app.get("t", "k")
    assert "Errno" not in str(caught.value)


def test_a_query_may_not_be_named_twice() -> None:
    assert read_queries("-- about all\n-- name: one\n-- why\nSELECT 1\n") == {"one": "SELECT 1"}
    with pytest.raises(ValueError, match="two queries are named one"):
        read_queries("-- name: one\nSELECT 1\n-- name: one\nSELECT 2\n")


@pytest.mark.parametrize(
    ("folder", "queries"),
    [("sqlite", QUERIES), ("mysql", mysql.queries_of("bide", "bide_")), ("postgres", postgres.queries_of("bide", ""))],
    ids=["sqlite", "mysql", "postgres"],
)
def test_every_query_is_used(root: Path, folder: str, queries: Mapping[str, object]) -> None:
    stores = root / "src" / "bide" / "stores"
    code = "\n".join(path.read_text("utf-8") for part in ("sql", folder) for path in (stores / part).glob("*.py"))
    numbered = {"page_of_state", "next_topic_of_state", "lease", "lease_more"} if folder == "postgres" else set[str]()
    assert {re.sub(r"_\d+$", "", name) for name in queries} - set(re.findall(r'"(\w+)"', code)) <= numbered


BERLIN = ZoneInfo("Europe/Berlin")


@pytest.mark.parametrize(
    ("shown", "comes"),
    [
        ("2027-01-16T08:00", "2027-01-16T08:00+01:00"),
        ("2027-03-28T01:59:59.999", "2027-03-28T01:59:59.999+01:00"),
        ("2027-03-28T02:00", "2027-03-28T03:00+02:00"),
        ("2027-03-28T02:59", "2027-03-28T03:00+02:00"),
        ("2027-10-31T01:59", "2027-10-31T01:59+02:00"),
        ("2027-10-31T02:00", "2027-10-31T02:00+01:00"),
        ("2027-10-31T02:59", "2027-10-31T02:59+01:00"),
        ("2027-07-16T08:00:00.0001", "2027-07-16T08:00:00.001+02:00"),
    ],
)
def test_when_a_time_has_come(shown: str, comes: str) -> None:
    assert instant_of(datetime.fromisoformat(shown), BERLIN) == instant(comes)


@given(shown=st.datetimes())
def test_any_time_at_all(shown: datetime) -> None:
    assert 0 <= instant_of(shown, BERLIN) <= LAST_INSTANT


def test_a_stretch_ends_where_the_offset_changes() -> None:
    jump = instant("2027-10-31T01:00Z")
    before = stretch(jump - 1_000, BERLIN)
    assert (before.offset, before.until) == (timedelta(hours=2), jump)
    assert before.least == datetime(2027, 10, 31, 2)
    assert stretch(jump, BERLIN).offset == timedelta(hours=1)
    assert stretch(LAST_INSTANT, BERLIN).until == LAST_INSTANT
