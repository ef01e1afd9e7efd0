"""Tests of every call on a task in every state, of batches, odd names and payloads, and of deliveries.

Deliveries: which worker gets which tasks, the next wake, tokens, and races, in which one of two calls comes first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from bide.core import lifecycle
from bide.core.answers import Answer
from bide.core.instants import LAST_INSTANT, At, Due, In, Millis
from bide.core.names import new_id
from bide.core.records import (
    Cancel,
    Change,
    Filter,
    Lease,
    Move,
    NewTask,
    OnConflict,
    OutcomeKind,
    Record,
    Redrive,
    Ref,
    Result,
    Settlement,
    State,
)
from bide.ports import Store
from bide.testing.store_suite.base import (
    DAY,
    HELD,
    HOUR,
    KEPT,
    LEASE,
    MINUTE,
    NOW,
    SECOND,
    TIMED,
    Call,
    SuiteBase,
    Take,
    add_all,
    again,
    bring,
    call,
    change_all,
    counted,
    dead,
    defer,
    do,
    done,
    effect,
    extend,
    hold,
    keys,
    lease,
    listed,
    lived,
    look,
    meant,
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

LATER = NOW + 5 * SECOND
"""The time of the call that is tested: after the task was brought into its state."""
SCHEDULES = {
    f"{how}, {name}": new(
        due=due, payload=b"after", group="after", options=b"\x80", deadline=NOW + MINUTE, on_conflict=how
    )
    for how in OnConflict
    for name, due in (("earlier", At(NOW - HOUR)), ("at the same time", At(NOW)), ("later", At(NOW + HOUR)))
}
CHANGES: dict[str, Change] = {
    "move": Move("t", "k", At(NOW + HOUR)),
    "cancel": Cancel("t", "k"),
    "cancel and keep": Cancel("t", "k", KEPT),
    "cancel and keep until now": Cancel("t", "k", LATER),
    "redrive": Redrive("t", "k", "", In(HOUR)),
}
IF_TOKEN: dict[str, NewTask | Change] = {name: one for name, one in SCHEDULES.items() if "later" in name}
IF_TOKEN |= CHANGES
SETTLES = {
    "done": done(HELD),
    "done and kept": done(HELD, keep_until=KEPT),
    "again": again(HELD, At(NOW + HOUR)),
    "retry": retry(HELD, In(MINUTE), error="another failure"),
    "retry without an error": retry(HELD, In(MINUTE), error=None),
    "defer": defer(HELD, In(MINUTE)),
    "dead": dead(HELD),
    "dead and forgotten": dead(HELD, keep_until=LATER),
    "dead by the last failure": dead(HELD, error=None),
    "dead by a failure": replace(dead(HELD), failed=True),
}
CALLS: dict[str, Call] = {
    "lease": Take("t", "another"),
    **SCHEDULES,
    **CHANGES,
    **{f"{name}, if {by:+}": replace(one, if_token=by) for name, one in IF_TOKEN.items() for by in (0, -1)},
    **{f"extend {by:+}": Lease("t", "k", by) for by in (0, -1)},
    **{f"{name} {by:+}": replace(one, token=by) for name, one in SETTLES.items() for by in (0, -1, 1)},
}
"""The tokens are counted from the task's own; see `meant`."""


class EveryCell(SuiteBase):
    """P4: every call is one transition, and does what the lifecycle says for every state of the task.

    P2: then every query and the next lease find the task as it was answered. P5: and no earlier version of it.
    P3: an extend and a settle apply to the live lease alone. P10: what has ended is purged, and nothing else. P12: the
    token of a new version is higher.
    """

    @pytest.mark.parametrize("asked", CALLS.values(), ids=CALLS)
    @pytest.mark.parametrize("state", [lifecycle.ABSENT, *State], ids=str)
    async def test_every_call_in_every_state(self, store: Store, state: State | None, asked: Call) -> None:
        old = await lived(store, state)
        await self._does(store, meant(asked, "t", old), old)

    @pytest.mark.parametrize("state", [lifecycle.ABSENT, *State], ids=str)
    async def test_every_query_finds_a_task_in_every_state(self, store: Store, state: State | None) -> None:
        """Before any of these calls, with a failure and a lost lease behind it."""
        await self.shown(store, await lived(store, state))

    @pytest.mark.parametrize("asked", [*SCHEDULES.values(), *CHANGES.values()], ids=[*SCHEDULES, *CHANGES])
    @pytest.mark.parametrize(
        ("state", "keep_until"),
        [(State.DONE, LATER), (State.CANCELLED, LATER), (State.DEAD, LATER), (State.DONE, LATER + 1)],
    )
    async def test_one_whose_retention_is_over_is_absent(
        self, store: Store, state: State, keep_until: Millis, asked: Call
    ) -> None:
        """P10: for every verb, from that millisecond on, though it was not purged."""
        old = await lived(store, state, keep_until=keep_until)
        await self._does(store, meant(asked, "t", old), old)

    @pytest.mark.parametrize(
        "due", [At(0), At(-5), At(NOW - DAY), In(-2 * NOW), In(0), In(400 * DAY), At(LAST_INSTANT), In(LAST_INSTANT)],
        ids=str,
    )  # fmt: skip
    @pytest.mark.parametrize("verb", TIMED)
    async def test_any_time_may_be_asked_for(self, store: Store, verb: str, due: Due) -> None:
        """P1: what was asked for is kept as it was. In the past it is due now; nothing lies beyond the last instant."""
        state, asked = TIMED[verb]
        old = await bring(store, state)
        await self._does(store, meant(asked(due), "t", old), old)

    @pytest.mark.parametrize(
        ("due", "deadline", "now", "moves"),
        [
            (At(NOW + HOUR), None, NOW, True),
            (At(NOW + HOUR + 1), None, NOW, False),
            (At(NOW + DAY), NOW + DAY, NOW, True),
            (At(NOW + MINUTE), NOW + SECOND, NOW, False),
            (At(NOW), None, NOW + HOUR, True),
            (In(0), None, NOW + HOUR + 1, False),
            (At(0), None, NOW + HOUR + 1, False),
        ],
    )
    async def test_a_move_past_the_deadline_is_refused(
        self, store: Store, due: Due, deadline: Millis | None, now: Millis, *, moves: bool
    ) -> None:
        """That of the task, or one that the move brings. Once it has passed, every move is refused."""
        old = await put_one(store, new(due=At(NOW + 2 * HOUR), deadline=NOW + HOUR))
        now_is = await self._does(store, Move("t", "k", due, None, deadline), old, now=now)
        assert (now_is != old) is moves

    async def _does(self, store: Store, asked: Call, old: Record | None, *, now: Millis = LATER) -> Record | None:
        """Make the call, and check that its answer, and what is stored, are as the lifecycle says; return the task."""
        answer = await call(store, asked, now)
        now_is = await look(store, Ref("t", "k"))
        answered = answer.record if isinstance(answer, Answer) else None
        token = max([one.token for one in (now_is, answered) if one is not None], default=0)
        assert (answer, now_is) == effect(asked, old, now, token)
        if now_is != old:
            assert old is None or token == 0 or token > old.token or isinstance(asked, Lease)
            await self.alone(store, now_is, now=now)
            ended = now_is is not None and not now_is.state.live
            assert await store.purge(now=KEPT, limit=10) == ended, "what lives is never purged"
            assert (await look(store, Ref("t", "k")) is None) is (now_is is None or ended)
        return now_is


class Batches(SuiteBase):
    """P4: a batch is answered in its order, and does what its calls would do one after another."""

    async def test_an_empty_batch_is_answered_with_nothing(self, store: Store) -> None:
        assert await add_all(store, []) == []
        assert await change_all(store, []) == []
        assert await store.get([]) == []
        assert await store.extend([], now=NOW, until=NOW + LEASE) == []
        assert await settle_all(store, []) == []
        assert await store.purge(now=NOW, limit=100) == 0

    async def test_schedules(self, store: Store) -> None:
        old = await put_one(store)
        over = await bring(store, State.DONE, "over", topic="d", keep_until=NOW + SECOND)
        assert over is not None
        tasks = [
            new(payload=b"first", due=In(HOUR), if_token=old.token),
            *(new(str(number), group="g", deadline=NOW + number, options=bytes([number])) for number in range(3)),
            new("bare", payload=b""),
            new("over", topic="d", if_token=over.token - 1),
            new("free", if_token=1, due=In(HOUR)),
            new(payload=b"second", if_token=old.token),
            new("free", payload=b"second", if_token=1),
            new(payload=b"third", due=In(MINUTE), on_conflict=OnConflict.KEEP),
            new(payload=b"fourth", due=In(MINUTE), on_conflict=OnConflict.LATEST),
            new(payload=b"fifth", due=In(MINUTE), on_conflict=OnConflict.EARLIEST),
            new("1", on_conflict=OnConflict.REFUSE),
        ]
        there = {old.ref: old, over.ref: over}
        answers = await add_all(store, tasks, now=NOW + SECOND)
        for task, answer in zip(tasks, answers, strict=True):
            ref, record = Ref(task.topic, task.key), record_of(answer)
            assert answer == lifecycle.schedule(task, there.get(ref), NOW + SECOND, record.token), task
            assert ref not in there or record == there[ref] or record.token > there[ref].token
            there[ref] = record
        assert [answer.result.value for answer in answers] == (
            ["replaced"] + ["created"] * 6 + ["stale_token"] * 2 + ["kept", "kept", "replaced", "refused"]
        )
        assert await store.get(list(there)) == list(there.values())

    async def test_changes(self, store: Store) -> None:
        waiting, other = await put(store, new("waiting"), new("other"))
        await bring(store, State.DEAD, "dead", topic="d")
        asked: list[tuple[Change, Result]] = [
            (Move("t", "nobody", In(0)), Result.NOT_FOUND),
            (Move("t", "waiting", At(NOW + HOUR), waiting.token), Result.MOVED),
            (Move("t", "waiting", At(NOW + DAY)), Result.MOVED),
            (Cancel("t", "waiting", KEPT, waiting.token), Result.STALE_TOKEN),
            (Cancel("t", "other", 0, other.token), Result.CANCELLED),
            (Cancel("t", "other"), Result.NOT_FOUND),
            (Redrive("d", "dead", new_id(), In(0)), Result.REDRIVEN),
            (Redrive("d", "dead", new_id(), In(0)), Result.UNDER_WAY),
        ]
        answers = await change_all(store, [change for change, _ in asked])
        assert [answer.result for answer in answers] == [result for _, result in asked]
        assert answers[2].was == NOW + HOUR
        assert answers[3].record == answers[2].record == await see(store, waiting)
        assert answers[7].record == answers[6].record == await see(store, Ref("d", "dead"))
        assert await look(store, other) is None

    async def test_extends_and_settles(self, store: Store) -> None:
        await put(store, *(new(key) for key in "abcdefg"))
        held = {record.key: record for record in (await lease(store, 7)).tasks}
        assert (await do(store, Cancel("t", "c"))).result is Result.CANCELLED_WHILE_LEASED
        extended = await store.extend([hold(held[key]) for key in "acba"], now=NOW, until=NOW + HOUR)
        assert extended == [True, False, True, True]
        outcomes = [
            done(held["a"]),
            Settlement("t", "nobody", 1, OutcomeKind.DONE),
            done(held["c"]),
            retry(held["b"], In(HOUR), error=None),
            done(held["b"]),
            dead(held["d"]),
            Settlement("nowhere", "a", held["a"].token, OutcomeKind.DEAD),
            defer(held["e"], In(HOUR)),
            again(held["f"], In(HOUR)),
        ]
        assert await settle_all(store, outcomes) == [True, False, False, True, False, True, False, True, True]
        assert await settle_all(store, [done(held[key]) for key in "gdg"]) == [True, False, False], "all are done"
        states = [None if r is None else r.state for r in await store.get([Ref("t", key) for key in "abcdefg"])]
        assert states == [None, State.WAITING, None, State.DEAD, State.WAITING, State.WAITING, None]

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


NAMES = [
    "a/b", "a:b", "a b", "a%b?c#d&e=f", "..", "-", "_", "%", "_%", "\\", "\\'", "'", '"', "''; drop table tasks; --",
    "`", "{tag}", "{}", "[x]", "*", "?", "a,b", "0", "null", "None", "é", "日本語", "🐝", "👩‍👩‍👧", "ا", "e\u0301",
    "É", "E\u0301", "a", "A", "\ufeff", "\u00a0", "x" * 200, "é" * 100,
]  # fmt: skip
PAYLOADS = [
    b"", b"\x00", b"a\x00b\x00", b"\xff\xfe\x80", b"'; --", bytes(range(256)) * 4_096, b"\n\r\t", b"\xc3\x28" * 1_000,
]  # fmt: skip
FAR = [2**31 - 1, 2**31, 2**31 + 1, 2**32 - 1, 2**32, 2**32 + 1, 3 * 2**33, 1_000 * 366 * DAY]


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

    async def test_a_topic_and_a_key_never_run_together(self, store: Store) -> None:
        pairs = [("a", "b:c"), ("a:b", "c"), ("a:b:c", "d"), ("ab", "c"), ("a", "bc")]
        await put(store, *(new(key, topic=topic, payload=f"{topic}|{key}".encode()) for topic, key in pairs))
        for topic, key in pairs:
            assert (await see(store, Ref(topic, key))).payload == f"{topic}|{key}".encode()

    @pytest.mark.parametrize("payload", PAYLOADS, ids=lambda payload: repr(payload[:8]))
    async def test_a_payload_comes_back_byte_for_byte(self, store: Store, payload: bytes) -> None:
        options = payload[:2_000]
        held = await put_and_take(store, new(payload=payload, options=options))
        assert (held.payload, held.options) == (payload, options)
        assert type(held.payload) is bytes
        assert await settle(store, dead(held))
        [ended] = await listed(store, Filter(state=State.DEAD))
        assert (ended.payload, ended.options) == (payload, options)

    async def test_an_error_of_any_text_and_length_is_kept(self, store: Store) -> None:
        await put_one(store)
        for error in ("", "line\nline", "日本語 🐝", "'; --", "x" * 8_000, "\ttab", "E\n\x1fTrace\n  x\n"):
            held = await take(store)
            assert await settle(store, retry(held, In(0), error=error))
            assert (await see(store, held)).error == error

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
            assert await extend(store, held, until=NOW + delay + KEPT, now=NOW + delay)
            assert await settle(store, done(held), now=NOW + delay)

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


class Leasing(SuiteBase):
    """P1: never early. P2: redelivered until settled. P3: one holder."""

    async def test_a_clock_that_goes_back_makes_nothing_early(self, store: Store) -> None:
        await put_one(store, new("later", due=At(NOW + HOUR)))
        await put_one(store, new("now"))
        assert keys((await lease(store, now=NOW + MINUTE)).tasks) == ["now"]
        await put_one(store, new("between", due=At(NOW + SECOND)), now=NOW)
        assert (await lease(store, 5, now=NOW)).tasks == []
        assert keys((await lease(store, 5, now=NOW + SECOND)).tasks) == ["between"]

    @pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 1_000])
    async def test_as_many_as_wanted_oldest_first_and_never_more(self, store: Store, count: int) -> None:
        await put(store, *(new(str(age), due=At(NOW - age * SECOND)) for age in (2, 3, 1)), now=NOW - HOUR)
        assert keys((await lease(store, count)).tasks) == ["3", "2", "1"][:count]
        assert len((await lease(store, 1_000)).tasks) == max(3 - count, 0)

    async def test_oldest_first_whatever_the_order_they_came_in(self, store: Store) -> None:
        ages = [(number * 7919) % 1_000 for number in range(1_000)]
        await put(store, *(new(f"{age:04}", due=At(NOW + age)) for age in ages[:500]))
        await lease(store, 0, now=NOW + 300)
        await put(store, *(new(f"{age:04}", due=At(NOW + age)) for age in ages[500:]))
        taken: list[str] = []
        while batch := (await lease(store, 64, now=NOW + 1_000)).tasks:
            assert keys(batch) == sorted(keys(batch))
            taken += keys(batch)
        if not self.exact_order:
            taken.sort()
        assert taken == sorted(f"{age:04}" for age in ages)

    async def test_a_task_whose_holders_all_died_is_still_given_out(self, store: Store) -> None:
        await put_one(store)
        for attempt in range(1, 31):
            held = await take(store, now=NOW + attempt * DAY)
            assert (held.attempt, held.losses, held.planned_at) == (attempt, attempt - 1, NOW), "late since the first"

    async def test_a_task_moved_away_and_back_is_leased_once(self, store: Store) -> None:
        await put_one(store)
        assert (await lease(store, 0)).next_wake == NOW
        for _ in range(3):
            await do(store, Move("t", "k", At(NOW + HOUR)))
            await self.rests_until(store, NOW + HOUR)
            await do(store, Move("t", "k", At(NOW)))
        assert len((await lease(store, 10)).tasks) == 1
        assert (await lease(store, 10)).tasks == []

    async def test_only_the_named_topics(self, store: Store) -> None:
        await put(store, *(new("k", topic=topic) for topic in ("a", "b", "c")))
        leased = await store.lease({"a": 5, "c": 5, "nobody": 5}, now=NOW, until=NOW + LEASE, holder="w")
        assert sorted(record.topic for record in leased.tasks) == ["a", "c"]
        assert (await see(store, Ref("b", "k"))).state is State.WAITING
        nothing = await store.lease({}, now=NOW, until=NOW + LEASE, holder="w")
        assert (nothing.tasks, nothing.next_wake, nothing.now) == ([], None, NOW)

    async def test_a_lease_that_ends_at_once_is_given_out_once_per_call(self, store: Store) -> None:
        await put_one(store)
        assert len((await lease(store, 10, lasts=0)).tasks) == 1
        assert (await take(store, lasts=0)).attempt == 2


class Fairness(SuiteBase):
    """P6: no head-of-line blocking. P8: the next wake that `lease` returns lets a worker sleep exactly."""

    async def test_next_wake_is_the_earliest_of_the_asked_topics(self, store: Store) -> None:
        await put(
            store,
            new("a", topic="a", due=At(NOW + 3 * HOUR)),
            new("b", topic="b", due=At(NOW + 2 * HOUR)),
            new("c", topic="c", due=At(NOW + 1 * HOUR)),
        )
        leased = await store.lease({"a": 1, "b": 0}, now=NOW, until=NOW + LEASE, holder="w")
        assert self.wakes_at(leased.next_wake, NOW + 2 * HOUR, NOW)

    async def test_next_wake_follows_an_extend_and_a_settle(self, store: Store) -> None:
        await put(store, new("now"), new("later", due=At(NOW + DAY)))
        held = await take(store)
        assert await extend(store, held, until=NOW + HOUR)
        told = (await lease(store, 0)).next_wake
        assert self.wakes_at(told, NOW + HOUR if self.exact_ends else NOW + LEASE, NOW)
        assert await settle(store, done(held))
        assert self.wakes_at((await lease(store, 0)).next_wake, NOW + DAY, NOW)

    async def test_next_wake_follows_when_a_lease_would_have_ended(self, store: Store) -> None:
        await put(store, new("extended"), new("cancelled"), new("later", due=At(NOW + DAY)))
        held = {task.key: task for task in (await lease(store, 2)).tasks}
        assert await extend(store, held["extended"], until=NOW + HOUR)
        await do(store, Cancel("t", "cancelled"))
        await self.rests_until(store, NOW + HOUR, now=NOW + LEASE)
        await do(store, Cancel("t", "extended"))
        await self.rests_until(store, NOW + DAY, now=NOW + HOUR)

    async def test_next_wake_sees_an_earlier_one_added_later(self, store: Store) -> None:
        for delay in (365 * DAY, DAY, HOUR, MINUTE, SECOND, 5):
            await put_one(store, new(str(delay), due=In(delay)))
            assert self.wakes_at((await lease(store, 1)).next_wake, NOW + delay, NOW)
        assert (await take(store, now=NOW + 5)).key == "5"

    async def test_wanting_none_only_asks(self, store: Store) -> None:
        record = await put_one(store, now=NOW - HOUR)
        leased = await lease(store, 0, now=NOW + HOUR)
        assert leased.tasks == []
        assert leased.next_wake == NOW, "for a topic that only asks, it may lie in the past"
        assert await see(store, record) == record

    async def test_a_full_topics_backlog_does_not_show_in_next_wake(self, store: Store) -> None:
        await put(store, *(new(str(number), topic="full") for number in range(10)))
        await put_one(store, new("k", topic="calm", due=At(NOW + HOUR)))
        leased = await store.lease({"full": 3, "calm": 3}, now=NOW, until=NOW + LEASE, holder="w")
        assert len(leased.tasks) == 3
        assert self.wakes_at(leased.next_wake, NOW + HOUR, NOW), "else the worker would spin while it is full"
        alone = await lease(store, 2, topic="full")
        assert (len(alone.tasks), alone.next_wake) == (2, None)

    async def test_a_flood_of_one_topic_does_not_delay_another(self, store: Store) -> None:
        flood = [new(str(number), topic="flood", due=At(NOW - DAY)) for number in range(2_000)]
        await put(store, *flood, now=NOW - 2 * DAY)
        await put_one(store, new("k", topic="calm"))
        leased = await store.lease({"flood": 5, "calm": 5}, now=NOW, until=NOW + LEASE, holder="w")
        taken = [record.topic for record in leased.tasks]
        assert (taken.count("flood"), taken.count("calm")) == (5, 1)

    async def test_a_flood_of_large_payloads_comes_in_order_and_leaves_no_topic_out(self, store: Store) -> None:
        """A lease may stop early. Then it says that more is due, and a topic left out comes first next time."""
        flood = [new(f"{number:02}", topic="flood", due=At(NOW - 20 + number)) for number in range(12)]
        await put(store, *(replace(one, payload=bytes(200 * 1024)) for one in flood), now=NOW - SECOND)
        await put(store, *(new(str(number), topic="calm", due=At(NOW)) for number in range(12)))
        taken: list[str] = []
        calm = [1]
        while len(taken) < 12:
            leased = await store.lease({"flood": 12, "calm": 1}, now=NOW, until=NOW + LEASE, holder="w")
            calm.append([record.topic for record in leased.tasks].count("calm"))
            assert sum(calm[-2:]) >= 1
            more = [record.key for record in leased.tasks if record.topic == "flood"]
            assert more
            taken += more
            assert len(taken) == 12 or leased.heads["flood"] <= leased.now
        assert sorted(taken) == [one.key for one in flood]

    async def test_a_task_that_keeps_being_lost_does_not_hold_up_the_others(self, store: Store) -> None:
        await put_one(store, new("lost"))
        await take(store, lasts=1)
        await put(store, *(new(str(number), due=At(NOW + 2)) for number in range(3)))
        assert sorted(keys((await lease(store, 4, now=NOW + 2)).tasks)) == ["0", "1", "2", "lost"]


class Holding(SuiteBase):
    """P2: delivered until settled. P3: a late extend or settle with an old token is refused and changes nothing."""

    async def test_an_expired_lease_that_nobody_took_can_be_extended_and_settled(self, store: Store) -> None:
        held = await put_and_take(store)
        for late in range(NOW + DAY, NOW + 50 * DAY, DAY):
            assert (await lease(store, 0, now=late)).next_wake == held.wake_at
            assert await extend(store, held, until=late + HOUR, now=late)
            assert (await lease(store, 1, now=late + HOUR - 1)).tasks == []
            held = await see(store, held)
        assert await settle(store, done(held), now=NOW + 51 * DAY)
        assert await look(store, held) is None

    async def test_a_lease_that_was_taken_over_can_be_neither_extended_nor_settled(self, store: Store) -> None:
        first = await put_and_take(store)
        second = await take(store, now=NOW + LEASE)
        assert not await extend(store, first, until=NOW + DAY, now=NOW + LEASE)
        for outcome in (done(first), retry(first, In(0)), dead(first), again(first, In(0))):
            assert not await settle(store, outcome, now=NOW + LEASE)
        assert await see(store, second) == second
        assert await settle(store, done(second), now=NOW + LEASE)
        for outcome in (done(second), retry(second, In(0)), dead(second)):
            assert not await settle(store, outcome, now=NOW + LEASE)
        assert await look(store, second) is None


FAR_OFF = 2**53 // 1_000 + SECOND
"""An instant whose microseconds exceed the exact integers of a double."""


class Tokens(SuiteBase):
    """P12: the `token` of a (topic, key) only rises, so that a receiver can refuse an old one."""

    async def test_a_token_rises_also_after_the_key_was_done_and_forgotten(self, store: Store) -> None:
        last = 0
        for _ in range(5):
            held = await put_and_take(store)
            assert held.token > last
            last = held.token
            assert await settle(store, done(held))
            assert await look(store, held) is None

    async def test_a_token_rises_also_after_a_cancel_and_a_purge(self, store: Store) -> None:
        await put_one(store)
        cancelled = record_of(await do(store, Cancel("t", "k")))
        following = await put_one(store)
        assert following.token > cancelled.token
        ended = record_of(await do(store, Cancel("t", "k", NOW + SECOND)))
        assert await store.purge(now=NOW + SECOND, limit=10) == 1
        assert (await put_one(store, now=NOW)).token > ended.token

    async def test_a_token_rises_although_the_clock_goes_back(self, store: Store) -> None:
        last = 0
        for now in (NOW, NOW - 1_000 * SECOND, NOW + SECOND, NOW - SECOND, FAR_OFF, FAR_OFF, FAR_OFF - SECOND, NOW):
            record = await put_one(store, now=now)
            assert record.token > last
            last = record.token

    async def test_a_token_is_at_least_the_clock_in_microseconds(self, store: Store) -> None:
        assert (await put_one(store)).token >= NOW * 1_000

    @pytest.mark.parametrize("if_token", [0, 1, 2**53, 2**56, 2**60, 2**63 - 1])
    async def test_a_condition_that_no_token_meets_changes_nothing(self, store: Store, if_token: int) -> None:
        before = await put_one(store)
        for change in (
            Move("t", "k", In(0), if_token),
            Cancel("t", "k", if_token=if_token),
            Redrive("t", "k", new_id(), In(0), if_token),
        ):
            [answer] = await change_all(store, [change])
            assert answer.result in (Result.STALE_TOKEN, Result.UNDER_WAY), change
        [answer] = await add_all(store, [new(if_token=if_token)])
        assert answer == Answer(Result.STALE_TOKEN, before)
        assert await see(store, Ref("t", "k")) == before


TAKE = Take("t", "one")
RACES: dict[str, tuple[State, Call, Call]] = {
    "lease, move": (State.WAITING, TAKE, Move("t", "k", At(NOW + HOUR))),
    "lease, fire now if": (State.WAITING, TAKE, Move("t", "k", In(0), 0)),
    "lease, cancel": (State.WAITING, TAKE, Cancel("t", "k", KEPT)),
    "lease, replace": (State.WAITING, TAKE, new()),
    "lease, keep": (State.WAITING, TAKE, new(on_conflict=OnConflict.KEEP)),
    "lease, earliest": (State.WAITING, TAKE, new(due=At(NOW - HOUR), on_conflict=OnConflict.EARLIEST)),
    "lease, latest": (State.WAITING, TAKE, new(due=At(NOW + 1), on_conflict=OnConflict.LATEST)),
    "lease, refuse": (State.WAITING, TAKE, new(on_conflict=OnConflict.REFUSE)),
    "lease, redrive": (State.DEAD, TAKE, Redrive("t", "k", "", In(0), 0)),
    "lease, lease of a lost one": (State.LEASED, TAKE, Take("t", "two")),
    "lease, late settle": (State.LEASED, TAKE, done(HELD)),
    "lease, late extend": (State.LEASED, TAKE, HELD),
    "cancel, done": (State.LEASED, Cancel("t", "k", KEPT), done(HELD, keep_until=KEPT)),
    "cancel, retry": (State.LEASED, Cancel("t", "k", KEPT), retry(HELD, In(0))),
    "cancel, dead": (State.LEASED, Cancel("t", "k", KEPT), dead(HELD)),
}
AT_ONCE = 50


def in_order(calls: Sequence[Call], old: Record | None, now: Millis) -> tuple[list[object], Record | None]:
    """The answers that the lifecycle gives to calls one after another, and the task after them."""
    answers = []
    for number, asked in enumerate(calls, 1):
        answer, old = effect(asked, old, now, 2**60 + number)
        answers.append(answer)
    return answers, old


def without_tokens(seen: Any) -> Any:
    """The same, but no record has a token."""
    if isinstance(seen, list | tuple) and not isinstance(seen, Call):
        return [without_tokens(one) for one in seen]
    if isinstance(seen, Answer):
        return replace(seen, record=without_tokens(seen.record))
    return replace(seen, token=0) if isinstance(seen, Record) else seen


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

    @pytest.mark.parametrize(("state", "first", "second"), RACES.values(), ids=RACES)
    async def test_of_two_calls_one_comes_first(
        self, store: Store, rival: Store, state: State, first: Call, second: Call
    ) -> None:
        """Both do what the lifecycle says, in one order or in the other."""
        now = NOW + LEASE

        async def race(number: int) -> None:
            topic = f"t{number}"
            old = await bring(store, state, topic=topic)
            one, two = meant(first, topic, old), meant(second, topic, old)
            asked = [call(store, one, now), call(rival, two, now)]
            answers = await asyncio.gather(*(asked if number % 2 else asked[::-1]))
            now_is = await look(store, Ref(topic, "k"))
            seen = [answers if number % 2 else answers[::-1], now_is]
            this, (others, last) = in_order([one, two], old, now), in_order([two, one], old, now)
            possible = [without_tokens(this), without_tokens([others[::-1], last])]
            assert without_tokens(seen) in possible, f"{seen}\nis not what either order gives:\n{possible}"
            for answer in answers:
                for version in answer if isinstance(answer, list) else [getattr(answer, "record", None)]:
                    assert version is None or now_is is None or version == now_is or version.token < now_is.token, (
                        "a newer version with a token that is not higher"
                    )

        for start in range(0, self.races, AT_ONCE):
            await asyncio.gather(*(race(number) for number in range(start, start + AT_ONCE)))

    async def test_many_schedules_of_one_free_key_make_one_task(self, store: Store, rival: Store) -> None:
        tasks = [new(on_conflict=OnConflict.KEEP) for _ in range(100)]
        answers = await asyncio.gather(
            *(add_all(rival if number % 2 else store, [task]) for number, task in enumerate(tasks))
        )
        results = [answer.result for [answer] in answers]
        assert (results.count(Result.CREATED), results.count(Result.KEPT)) == (1, 99)
        winner = tasks[results.index(Result.CREATED)]
        assert (await see(store, Ref("t", "k"))).id == winner.id
