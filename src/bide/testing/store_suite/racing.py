"""Tests of races, which exactly one caller wins, and of batches, names and payloads that broke other systems."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest

from bide.core.instants import At, In
from bide.core.names import new_id
from bide.core.records import Cancel, Filter, Move, OnConflict, Record, Redrive, Ref, Result, State
from bide.ports import Store
from bide.testing.store_suite.base import (
    DAY,
    HOUR,
    KEPT,
    LEASE,
    NOW,
    SuiteBase,
    add_all,
    bring,
    change_all,
    counted,
    dead,
    do,
    done,
    extend,
    hold,
    keys,
    lease,
    listed,
    look,
    new,
    put,
    put_and_take,
    put_one,
    record_of,
    retry,
    see,
    settle,
    settle_all,
    take,
)

AT_ONCE = 50

First = TypeVar("First")
Second = TypeVar("Second")


async def both(
    number: int, first: Callable[[], Awaitable[First]], second: Callable[[], Awaitable[Second]]
) -> tuple[First, Second]:
    """Start both at once, alternating which is called first."""
    if number % 2:
        two, one = await asyncio.gather(_run(second), _run(first))
    else:
        one, two = await asyncio.gather(_run(first), _run(second))
    return one, two


async def _run(act: Callable[[], Awaitable[First]]) -> First:
    return await act()


async def in_batches(races: int, race: Callable[[int, str], Coroutine[Any, Any, None]]) -> None:
    """Run the races, several at once, each with its number and its own topic."""
    for start in range(0, races, AT_ONCE):
        await asyncio.gather(*(race(number, f"t{number}") for number in range(start, start + AT_ONCE)))


class Racing(SuiteBase):
    """P3: one holder. P4: a lost race is an answer. The rival is a second client if the store can have one."""

    async def test_fifty_workers_take_no_task_twice(self, store: Store, rival: Store) -> None:
        await put(store, *(new(str(number)) for number in range(1_500)))
        taken: list[tuple[str, int]] = []

        async def work(number: int) -> None:
            mine = rival if number % 2 else store
            while batch := (await lease(mine, 1 + number % 7, holder=f"w{number}")).tasks:
                taken.extend((record.key, record.token) for record in batch)
                assert all(await settle_all(mine, [done(record) for record in batch]))

        await asyncio.gather(*(work(number) for number in range(50)))
        assert len(taken) == 1_500
        assert len({key for key, _ in taken}) == 1_500

    async def test_fifty_workers_hold_each_task_once(self, store: Store) -> None:
        await put(store, *(new(str(number)) for number in range(100)))
        answers = await asyncio.gather(*(lease(store, 7, holder=f"w{number}") for number in range(50)))
        held = [record for leased in answers for record in leased.tasks]
        assert sorted(record.key for record in held) == sorted(str(number) for number in range(100))
        assert await asyncio.gather(*(settle(store, done(record)) for record in held)) == [True] * 100

    async def test_lease_against_a_move(self, store: Store, rival: Store) -> None:
        async def race(number: int, topic: str) -> None:
            await put_one(store, new(topic=topic))
            leased, moved = await both(
                number, lambda: lease(store, topic=topic), lambda: do(rival, Move(topic, "k", At(NOW + HOUR)))
            )
            now_is = await see(store, Ref(topic, "k"))
            if leased.tasks:
                assert (moved.result, now_is) == (Result.UNDER_WAY, leased.tasks[0])
            else:
                assert (moved.result, now_is) == (Result.MOVED, moved.record)

        await in_batches(self.races, race)

    async def test_lease_against_a_conditional_fire_now(self, store: Store, rival: Store) -> None:
        async def race(number: int, topic: str) -> None:
            record = await put_one(store, new(topic=topic))
            leased, fired = await both(
                number, lambda: lease(store, topic=topic), lambda: do(rival, Move(topic, "k", In(0), record.token))
            )
            [held] = leased.tasks
            assert fired.record is not None
            if fired.result is Result.MOVED:
                assert held.token > fired.record.token > record.token
            else:
                assert (fired.result, fired.record) == (Result.STALE_TOKEN, held)
            assert await see(store, held) == held

        await in_batches(self.races, race)

    async def test_lease_against_a_cancel(self, store: Store, rival: Store) -> None:
        async def race(number: int, topic: str) -> None:
            await put_one(store, new(topic=topic))
            leased, cancelled = await both(
                number, lambda: lease(store, topic=topic), lambda: do(rival, Cancel(topic, "k", KEPT))
            )
            assert (await see(store, Ref(topic, "k"))).state is State.CANCELLED
            if leased.tasks:
                assert cancelled.result is Result.CANCELLED_WHILE_LEASED
                assert not await settle(store, done(leased.tasks[0]))
            else:
                assert cancelled.result is Result.CANCELLED, "and no delivery starts afterwards"
            assert (await lease(store, topic=topic)).tasks == []

        await in_batches(self.races, race)

    async def test_lease_against_a_redrive(self, store: Store, rival: Store) -> None:
        async def race(number: int, topic: str) -> None:
            gone = await bring(store, State.DEAD, topic=topic)
            assert gone is not None
            leased, redriven = await both(
                number,
                lambda: lease(store, topic=topic),
                lambda: do(rival, Redrive(topic, "k", new_id(), In(0), gone.token)),
            )
            assert redriven.result is Result.REDRIVEN
            assert redriven.record is not None
            held = leased.tasks or (await lease(store, topic=topic)).tasks
            assert [record.id for record in held] == [redriven.record.id], "delivered once, as the new life"
            assert (await do(rival, Redrive(topic, "k", new_id(), In(0)))).result is Result.UNDER_WAY

        await in_batches(self.races, race)

    @pytest.mark.parametrize("on_conflict", list(OnConflict), ids=str)
    async def test_lease_against_a_schedule(self, store: Store, rival: Store, on_conflict: OnConflict) -> None:
        due = At(NOW - HOUR if on_conflict is OnConflict.EARLIEST else NOW)
        if on_conflict is OnConflict.LATEST:
            due = At(NOW + 1)

        async def race(number: int, topic: str) -> None:
            old = await put_one(store, new(topic=topic))
            task = new(topic=topic, due=due, on_conflict=on_conflict)
            leased, [answer] = await both(number, lambda: lease(store, topic=topic), lambda: add_all(rival, [task]))
            now_is = await see(store, old)
            settled = [await settle(store, done(record)) for record in leased.tasks]
            if answer.result is Result.REPLACED:
                assert now_is.id == task.id
                assert settled == [record.id == task.id for record in leased.tasks], "only the new life counts"
            else:
                assert answer.result is (Result.REFUSED if on_conflict is OnConflict.REFUSE else Result.KEPT)
                assert now_is.id == old.id
                assert settled == [True]

        await in_batches(self.races, race)

    async def test_two_workers_race_for_a_lost_lease(self, store: Store, rival: Store) -> None:
        async def race(number: int, topic: str) -> None:
            lost = await put_and_take(store, new(topic=topic))
            one, two = await both(
                number,
                lambda: lease(store, topic=topic, now=NOW + LEASE, holder="one"),
                lambda: lease(rival, topic=topic, now=NOW + LEASE, holder="two"),
            )
            [held] = one.tasks + two.tasks
            assert (held.attempt, held.losses) == (2, 1)
            assert held.token > lost.token
            assert await see(store, held) == held

        await in_batches(self.races, race)

    async def test_a_late_settle_against_the_next_lease(self, store: Store, rival: Store) -> None:
        async def race(number: int, topic: str) -> None:
            late = await put_and_take(store, new(topic=topic))
            settled, leased = await both(
                number,
                lambda: settle(store, done(late), now=NOW + LEASE),
                lambda: lease(rival, topic=topic, now=NOW + LEASE),
            )
            assert settled is (leased.tasks == [])
            assert await look(store, late) == (None if settled else leased.tasks[0])

        await in_batches(self.races, race)

    async def test_a_late_extend_against_the_next_lease(self, store: Store, rival: Store) -> None:
        async def race(number: int, topic: str) -> None:
            late = await put_and_take(store, new(topic=topic))
            extended, leased = await both(
                number,
                lambda: extend(store, late, until=NOW + HOUR, now=NOW + LEASE),
                lambda: lease(rival, topic=topic, now=NOW + LEASE),
            )
            assert extended is (leased.tasks == [])

        await in_batches(self.races, race)

    async def test_a_settle_against_a_cancel(self, store: Store, rival: Store) -> None:
        async def race(number: int, topic: str) -> None:
            held = await put_and_take(store, new(topic=topic))
            outcome = (done(held, keep_until=KEPT), retry(held, In(0)), dead(held))[number % 3]
            settled, cancelled = await both(
                number, lambda: settle(store, outcome), lambda: do(rival, Cancel(topic, "k", KEPT))
            )
            now_is: Record = await see(store, held)
            if not settled:
                assert cancelled.result is Result.CANCELLED_WHILE_LEASED
                assert now_is.state is State.CANCELLED
            elif number % 3 == 1:
                assert (cancelled.result, now_is.state) == (Result.CANCELLED, State.CANCELLED)
            else:
                assert cancelled.result is Result.FINISHED
                assert now_is == cancelled.record

        await in_batches(self.races, race)

    async def test_many_schedules_of_one_free_key_make_one_task(self, store: Store, rival: Store) -> None:
        tasks = [new(on_conflict=OnConflict.KEEP) for _ in range(100)]
        answers = await asyncio.gather(
            *(add_all(rival if number % 2 else store, [task]) for number, task in enumerate(tasks))
        )
        results = [answer.result for [answer] in answers]
        assert (results.count(Result.CREATED), results.count(Result.KEPT)) == (1, 99)
        winner = tasks[results.index(Result.CREATED)]
        assert (await see(store, Ref("t", "k"))).id == winner.id


NAMES = [
    "a/b", "a:b", "a b", "a%b?c#d&e=f", "..", "-", "_", "%", "_%", "\\", "\\'", "'", '"', "''; drop table tasks; --",
    "`", "{tag}", "{}", "[x]", "*", "?", "a,b", "0", "null", "None", "é", "日本語", "🐝", "👩‍👩‍👧", "ا", "e\u0301",
    "\ufeff", "\u00a0", "x" * 200, "é" * 100,
]  # fmt: skip
PAYLOADS = [b"", b"\x00", b"a\x00b\x00", b"\xff\xfe\x80", b"'; --", bytes(range(256)), b"\n\r\t", b"\xc3\x28" * 1_000]
FAR = [2**31 - 1, 2**31, 2**31 + 1, 2**32 - 1, 2**32, 2**32 + 1, 3 * 2**33, 1_000 * 366 * DAY]


class Batches(SuiteBase):
    """Every verb takes batches: the answers have the length and order of the argument."""

    async def test_an_empty_batch_is_answered_with_nothing(self, store: Store) -> None:
        assert await add_all(store, []) == []
        assert await change_all(store, []) == []
        assert await store.get([]) == []
        assert await store.extend([], now=NOW, until=NOW + LEASE) == []
        assert await settle_all(store, []) == []
        assert await store.purge(now=NOW, limit=100) == 0

    async def test_many_in_one_call_through_a_whole_life(self, store: Store) -> None:
        many = self.many
        tasks = [new(f"{number:06}", due=At(NOW + number % 97), group="g") for number in range(many)]
        answers = await add_all(store, tasks)
        assert [record_of(answer).id for answer in answers] == [task.id for task in tasks]
        assert {answer.result for answer in answers} == {Result.CREATED}
        records = await store.get([Ref(task.topic, task.key) for task in tasks])
        assert records == [answer.record for answer in answers]
        moved = await change_all(store, [Move(task.topic, task.key, At(NOW)) for task in tasks])
        assert {answer.result for answer in moved} == {Result.MOVED}
        held = (await lease(store, many)).tasks
        assert len({record.key for record in held}) == many
        assert all(await store.extend([hold(record) for record in held], now=NOW, until=NOW + HOUR))
        half = many // 2
        outcomes = [done(record) for record in held[:half]] + [dead(record) for record in held[half:]]
        assert all(await settle_all(store, outcomes))
        assert counted(await store.tally(), "t", State.DEAD).number <= many - half
        assert len(await listed(store, Filter(group="g", state=State.DEAD))) == many - half
        assert await store.purge(now=KEPT, limit=many) == many - half
        assert await listed(store, Filter()) == []

    async def test_optional_fields_may_differ_within_one_batch(self, store: Store) -> None:
        tasks = [
            new("1", group="g"),
            new("2", deadline=NOW + DAY),
            new("3", options=b"\x80", payload=b""),
            new("4"),
            new("5", group="g", deadline=NOW + HOUR, options=b"\x81"),
        ]
        records = await put(store, *tasks)
        assert await store.get([Ref("t", task.key) for task in tasks]) == records
        assert [record.group for record in records] == ["g", None, None, None, "g"]
        assert [record.deadline for record in records] == [None, NOW + DAY, None, None, NOW + HOUR]
        assert [record.options for record in records] == [b"", b"", b"\x80", b"", b"\x81"]

    async def test_one_key_changed_twice_in_one_batch_goes_in_order(self, store: Store) -> None:
        record = await put_one(store)
        first, second, third = await change_all(
            store,
            [Move("t", "k", In(HOUR), record.token), Move("t", "k", In(DAY)), Cancel("t", "k", KEPT, record.token)],
        )
        assert (first.result, second.result, third.result) == (Result.MOVED, Result.MOVED, Result.STALE_TOKEN)
        assert second.was == NOW + HOUR
        assert third.record == second.record == await see(store, record)


class OddInput(SuiteBase):
    """Every value that passes the checks of the core is stored and returned unchanged."""

    async def test_names_of_every_kind_go_through_a_whole_life(self, store: Store) -> None:
        await put(store, *(new(name, topic=name, group=name) for name in NAMES))
        for name in NAMES:
            held = await take(store, topic=name, holder=name)
            assert (held.topic, held.key, held.group, held.holder) == (name, name, name, name)
            assert await see(store, Ref(name, name)) == held
            assert await listed(store, Filter(group=name)) == [held]
            assert await listed(store, Filter(topic=name, state=State.LEASED)) == [held]
            assert await settle(store, retry(held, In(0), error=name))
            assert (await see(store, held)).error == name
            assert (await do(store, Cancel(name, name))).result is Result.CANCELLED
            assert await look(store, held) is None
        assert await listed(store, Filter()) == []

    async def test_names_are_listed_in_the_order_of_their_characters(self, store: Store) -> None:
        await put(store, *(new(name) for name in NAMES))
        assert [record.key for record in await listed(store, Filter(topic="t"), limit=5)] == sorted(NAMES)

    async def test_the_same_letters_in_another_form_are_another_key(self, store: Store) -> None:
        names = ["é", "e\u0301", "E\u0301", "É", "a", "A"]
        await put(store, *(new(name) for name in names))
        assert len(await listed(store, Filter(topic="t"))) == len(names)

    async def test_a_topic_and_a_key_never_run_together(self, store: Store) -> None:
        pairs = [("a", "b:c"), ("a:b", "c"), ("a:b:c", "d"), ("ab", "c"), ("a", "bc")]
        await put(store, *(new(key, topic=topic, payload=f"{topic}|{key}".encode()) for topic, key in pairs))
        for topic, key in pairs:
            assert (await see(store, Ref(topic, key))).payload == f"{topic}|{key}".encode()

    @pytest.mark.parametrize("payload", PAYLOADS, ids=lambda payload: repr(payload[:8]))
    async def test_a_payload_comes_back_byte_for_byte(self, store: Store, payload: bytes) -> None:
        held = await put_and_take(store, new(payload=payload, options=payload))
        assert (held.payload, held.options) == (payload, payload)
        assert type(held.payload) is bytes
        assert await settle(store, dead(held))
        [ended] = await listed(store, Filter(state=State.DEAD))
        assert (ended.payload, ended.options) == (payload, payload)

    async def test_a_payload_of_a_mebibyte_comes_back_byte_for_byte(self, store: Store) -> None:
        payload = bytes(range(256)) * 4_096
        await put(store, new("big", payload=payload), new("small"))
        held = {record.key: record for _ in range(2) for record in (await lease(store, 5)).tasks}
        assert held["big"].payload == payload
        assert held["small"].payload == b"{}"

    async def test_an_error_of_any_text_and_length_is_kept(self, store: Store) -> None:
        await put_one(store)
        for error in ("", "line\nline", "日本語 🐝", "'; --", "x" * 8_000, "\ttab", "E\n\x1fTrace\n  x\n"):
            held = await take(store)
            assert await settle(store, retry(held, In(0), error=error))
            assert (await see(store, held)).error == error

    @pytest.mark.parametrize("delay", FAR)
    async def test_a_long_delay_is_neither_early_nor_lost(self, store: Store, delay: int) -> None:
        record = await put_one(store, new(due=In(delay)))
        assert record.wake_at == NOW + delay
        await self.rests_until(store, NOW + delay, now=NOW + delay - 1)
        held: Record = await take(store, now=NOW + delay)
        assert held.planned_at == NOW + delay
        assert await extend(store, held, until=NOW + delay + HOUR, now=NOW + delay)

    async def test_long_and_short_delays_each_come_at_their_time(self, store: Store) -> None:
        delays = sorted({0, 1, 5, 63, 64, 65, 999, 1_000, 4_095, 4_096, 2**16, 2**20 + 1, 2**24, *FAR})
        await put(store, *(new(str(delay), due=In(delay)) for delay in delays))
        for earlier, delay in zip([-1, *delays], delays, strict=False):
            asked = await lease(store, 0, now=NOW + max(earlier, 0))
            assert self.wakes_at(asked.next_wake, NOW + delay, NOW + max(earlier, 0))
            if delay:
                assert (await lease(store, 5, now=NOW + delay - 1, lasts=KEPT)).tasks == []
            held = await take(store, now=NOW + delay, lasts=KEPT)
            assert held.key == str(delay)
            assert await settle(store, done(held), now=NOW + delay)

    async def test_a_task_of_every_state_survives_a_look_at_everything(self, store: Store) -> None:
        for state in State:
            await bring(store, state, topic=state.value, deadline=None if state is State.DONE else NOW + DAY)
        shown: list[Record] = await listed(store, Filter())
        assert await store.get([record.ref for record in shown]) == shown

    async def test_a_damaged_task_stops_no_other(self, store: Store, tmp_path: Path) -> None:
        await put(store, new("damaged", due=At(NOW - HOUR), group="g"), new("sound", group="g"), now=NOW - DAY)
        await self.damage(tmp_path, Ref("t", "damaged"))
        leased = await lease(store, 5)
        assert "sound" in keys(leased.tasks)
        outcomes = [done(record) for record in leased.tasks if record.key == "sound"]
        assert await settle_all(store, outcomes) == [True]
        # it must neither be leased endlessly nor keep a worker awake
        for _ in range(3):
            assert (await lease(store, 5)).tasks == []
        assert (await lease(store, 5)).next_wake in (None, NOW + LEASE)

    async def test_a_damaged_task_is_seen_and_can_be_replaced(self, store: Store, tmp_path: Path) -> None:
        await put(store, new("damaged", group="g"), new("sound", group="g"))
        await self.damage(tmp_path, Ref("t", "damaged"))
        for where in (Filter(), Filter(topic="t"), Filter(group="g"), Filter(state=State.WAITING), Filter(wake_from=0)):
            assert "sound" in keys(await listed(store, where, limit=1))
        assert (await store.get([Ref("t", "damaged"), Ref("t", "sound")]))[1] is not None
        assert counted(await store.tally(), "t", State.WAITING).number >= 1
        [answer] = await add_all(store, [new("damaged", payload=b"again")])
        assert answer.result in (Result.REPLACED, Result.CREATED)
        assert sorted(record.payload for record in (await lease(store, 5)).tasks) == [b"again", b"{}"]
