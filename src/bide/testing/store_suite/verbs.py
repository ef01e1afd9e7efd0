"""Tests of every verb on a task in every state, of batches, and of names and payloads that broke other systems."""

from __future__ import annotations

from pathlib import Path

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
        await self.shown(store, old)
        await self._does(store, meant(asked, "t", old), old)

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
