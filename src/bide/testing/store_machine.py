"""A game against a store: Hypothesis makes calls, and requires the answers of a model.

    def test_my_store_is_right(tmp_path):
        assert play(lambda: MyStore(tmp_path / new_id()), games=200, moves=100) >= 20_000

The model is a dictionary of records, which the pure functions of the lifecycle change. Ids and the time are arguments,
and the tokens of new versions are the store's, so answers can be compared field by field; the machine checks that the
tokens of a task rise. It does not check what no store promises: the order among equal wake times, and which of several
equal tasks a limited lease takes (it raises the limit until there is no choice).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby, pairwise, product
from typing import ClassVar

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from bide.core import lifecycle
from bide.core.answers import Answer
from bide.core.instants import At, Due, In, Millis
from bide.core.records import (
    Cancel,
    Change,
    Count,
    Filter,
    Lease,
    Leased,
    Move,
    NewTask,
    OnConflict,
    OutcomeKind,
    Record,
    Redrive,
    Ref,
    Settlement,
    State,
    Token,
)
from bide.ports import Store
from bide.testing.clock import FIRST_INSTANT
from bide.testing.store_suite.base import add_all, change_all, effect, matches, pages, place, settle_all

TOPICS, KEYS, GROUPS = ("a", "b"), ("k", "l", "m", "n"), (None, "g", "h")
REFS = [Ref(topic, key) for topic, key in product(TOPICS, KEYS)]

refs = st.sampled_from(REFS)
offsets = st.sampled_from([0, 1, 2, 3, 5, 10, 60, 100, 1_000, 65_536, 2**32 + 1, -1, -10, -(2**33)])
dues = st.tuples(st.booleans(), offsets)
keeps = st.sampled_from([None, 0, 3, 50, 1_000])
pasts = st.sampled_from([None, None, -1, -1, -1, -2, -3])
"""The choice of a task's token: none, the newest (-1) or an earlier one."""
new_tasks = st.tuples(
    refs, dues, st.sampled_from(GROUPS), st.sampled_from([None, None, 5, 1_000]), st.sampled_from(OnConflict),
    st.sampled_from([b"", b"\x00\xff", b"{}"]), pasts,
)  # fmt: skip
changes = st.tuples(st.sampled_from(["move", "move", "cancel", "redrive"]), refs, dues, keeps, pasts)
verdicts = st.sampled_from(["done", "done", "again", "retry", "retry", "defer", "dead", "dead"])
settlements = st.tuples(st.integers(0, 7), verdicts, dues, keeps, st.sampled_from([None, "", "it failed"]))
ranges = st.one_of(st.none(), st.sampled_from([-10, 0, 1, 5, 100, 2**32]))
filters = st.tuples(
    st.sampled_from([None, *TOPICS]), st.sampled_from([None, *State]), st.sampled_from(GROUPS), ranges, ranges
)

Offset = tuple[bool, Millis]
"""An offset from now; true: passed as a relative time."""
AskedTask = tuple[Ref, Offset, str | None, Millis | None, OnConflict, bytes, int | None]
AskedChange = tuple[str, Ref, Offset, Millis | None, int | None]
AskedOutcome = tuple[int, str, Offset, Millis | None, str | None]
AskedFilter = tuple[str | None, State | None, str | None, Millis | None, Millis | None]


class StoreMachine(RuleBasedStateMachine):
    """The store, the model of its tasks, the time, and the callers' knowledge: leases and all tokens seen."""

    compared: ClassVar[int] = 0
    """The number of moves made so far, over all games of the class."""
    exact_wakes: ClassVar[bool] = True
    """True if the store's `next_wake` is exact; else it may be earlier."""
    exact_ends: ClassVar[bool] = True
    """True if `next_wake` changes when a lease is extended or ends early; else it may be the lease's original end."""
    exact_order: ClassVar[bool] = True

    def make_subject(self) -> Store:
        raise NotImplementedError

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.wait = self.runner.get_loop().run_until_complete  # `run` would set SIGINT's handler before each call
        self.store = self.make_subject()
        self.records: dict[Ref, Record] = {}
        """The tasks as they must be."""
        self.now: Millis = FIRST_INSTANT
        self.lives = 0
        self.tokens: dict[Ref, list[Token]] = {}
        self.leases: list[Lease] = []
        self.ends: set[Millis] = set()
        """All ends that leases were given so far, also by extends."""
        self.wait(self.store.open())

    def teardown(self) -> None:
        try:
            self.all_are_as_they_must_be()
        finally:
            self.wait(self.store.close())
            self.runner.close()

    # time

    @rule(step=st.sampled_from([1, 2, 3, 5, 10, 60, 100, 1_000, 70_000, 2**32, -1, -7]))
    def time_passes(self, step: Millis) -> None:
        self.now += step

    # clients

    @rule(asked=st.lists(new_tasks, min_size=1, max_size=4))
    def schedule(self, asked: list[AskedTask]) -> None:
        batch = [
            NewTask(
                ref.topic, ref.key, self.life(), self.due(due), payload, group, b"\x80" if payload else b"",
                None if deadline is None else self.now + deadline, on_conflict, self.token(ref, past),
            )
            for ref, due, group, deadline, on_conflict, payload, past in asked
        ]  # fmt: skip
        self.answered(batch, self.wait(add_all(self.store, batch, now=self.now)))

    @rule(asked=st.lists(changes, min_size=1, max_size=4))
    def change(self, asked: list[AskedChange]) -> None:
        batch: list[Change] = []
        for verb, ref, due, keep, past in asked:
            token = self.token(ref, past)
            if verb == "move":
                batch.append(Move(*ref, self.due(due), token, self.now + 50 * keep if keep else None))
            elif verb == "cancel":
                batch.append(Cancel(*ref, self.keep(keep), token))
            else:
                batch.append(Redrive(*ref, self.life(), self.due(due), token))
        self.answered(batch, self.wait(change_all(self.store, batch, now=self.now)))

    def answered(self, batch: Sequence[NewTask | Change], answers: Sequence[Answer]) -> None:
        """Check the answers, and make the same of the model."""
        for asked, answer in zip(batch, answers, strict=True):
            ref = Ref(asked.topic, asked.key)
            old = self.records.get(ref)
            token = 0 if answer.record is None else answer.record.token
            expected, after = effect(asked, old, self.now, token)
            assert answer == expected, asked
            if answer.record is not None and effect(asked, old, self.now, -1)[0] != answer:
                self.is_new(answer.record)
            self.keep_record(ref, after)

    # workers

    @rule(
        wants=st.dictionaries(st.sampled_from([*TOPICS, "nobody"]), st.integers(0, 5)),
        lasts=st.sampled_from([10, 10, 1_000, 3, 0]),
    )
    def lease(self, wants: dict[str, int], lasts: Millis) -> None:
        due = {topic: [one for one in self.live(topic) if one.wake_at <= self.now] for topic in wants}
        fair = {topic: fair_want(due[topic], want, self.exact_order) for topic, want in wants.items()}
        until, holder = self.now + lasts, f"worker {lasts}"
        leased = self.wait(self.store.lease(fair, now=self.now, until=until, holder=holder))
        self.ends.update({until} if leased.tasks else ())
        taken = {record.ref for record in leased.tasks}
        assert len(taken) == len(leased.tasks), "no task is given out twice"
        assert taken == {one.ref for topic, want in fair.items() for one in due[topic][:want]}
        for topic in wants:
            order = [self.records[record.ref].wake_at for record in leased.tasks if record.topic == topic]
            assert order == sorted(order), "oldest first"
        for record in leased.tasks:
            assert record == lifecycle.lease(self.records[record.ref], self.now, until, holder, record.token)
            self.records[record.ref] = record
            self.is_new(record)
            self.leases.append(Lease(*record.ref, record.token))
        self.leases = self.leases[-8:]
        self.right_wake(leased, {topic for topic, want in fair.items() if want <= 0 or len(due[topic]) < want})

    def right_wake(self, leased: Leased, asked: set[str]) -> None:
        """Check the next wake: the earliest of the topics that gave less than was wanted."""
        wake = min([one.wake_at for topic in asked for one in self.live(topic)], default=None)
        told = leased.next_wake
        if not self.exact_ends and told in self.ends:
            assert wake is None or told <= wake
        elif self.exact_wakes or wake is None or wake <= self.now:
            assert told == wake
        else:
            assert told is not None
            assert self.now < told <= wake

    @rule(which=st.lists(st.integers(0, 7), min_size=1, max_size=3), lasts=st.sampled_from([10, 1_000, 1]))
    def extend(self, which: list[int], lasts: Millis) -> None:
        held = [self.leases[-1 - number] for number in which if number < len(self.leases)]
        until = self.now + lasts
        self.ends.add(until)
        accepted = self.wait(self.store.extend(held, now=self.now, until=until))
        for one, ok in zip(held, accepted, strict=True):
            ref, old = Ref(one.topic, one.key), self.records.get(Ref(one.topic, one.key))
            assert ok is lifecycle.holds(old, one.token)
            if ok and old is not None:
                self.records[ref] = lifecycle.extend(old, until)

    @rule(asked=st.lists(settlements, min_size=1, max_size=3))
    def settle(self, asked: list[AskedOutcome]) -> None:
        batch: list[Settlement] = []
        for number, verdict, due, keep, error in asked:
            if number < len(self.leases):
                ends = verdict in ("done", "dead")
                batch.append(
                    Settlement(
                        *self.leases[-1 - number], OutcomeKind("done" if verdict == "again" else verdict),
                        None if ends else self.due(due), self.keep(keep) if ends else 0,
                        error if verdict in ("retry", "dead") else None, self.life() if verdict == "again" else "",
                    )
                )  # fmt: skip
        accepted = self.wait(settle_all(self.store, batch, now=self.now))
        refs = [Ref(one.topic, one.key) for one in batch]
        now_are = dict(zip(refs, self.wait(self.store.get(refs)), strict=True))
        for ref, one, ok in zip(refs, batch, accepted, strict=True):
            now_is = now_are[ref]
            expected, after = effect(one, self.records.get(ref), self.now, 0 if now_is is None else now_is.token)
            assert ok is expected, one
            if ok and after is not None:
                self.is_new(after)
            self.keep_record(ref, after)
        self.are_as_they_must_be(now_are)

    @rule(limit=st.sampled_from([1, 2, 100]))
    def purge(self, limit: int) -> None:
        """Purge until nothing is left, since no store promises which tasks a limited purge takes."""
        gone = [ref for ref, one in self.records.items() if lifecycle.gone(one, self.now)]
        for start in range(0, len(gone), limit):
            assert self.wait(self.store.purge(now=self.now, limit=limit)) == len(gone[start : start + limit])
        assert self.wait(self.store.purge(now=self.now, limit=limit)) == 0
        for ref in gone:
            del self.records[ref]

    # queries

    @rule(asked=filters, limit=st.sampled_from([1, 2, 3, 100]))
    def find(self, asked: AskedFilter, limit: int) -> None:
        topic, state, group, low, high = asked
        first, end = (None if step is None else self.now + step for step in (low, high))
        where = Filter(topic=topic, state=state, group=group, wake_from=first, wake_before=end)

        async def all_pages() -> list[list[Record]]:
            return [page async for page in pages(self.store, where, limit)]

        found = self.wait(all_pages())
        assert all(len(page) == limit for page in found[:-1])
        assert len(found) == 1 or found[-1], "the last page but one says so"
        shown = [record for page in found for record in page]
        expected = [record for record in self.records.values() if matches(record, where)]
        assert sorted(shown, key=lambda one: one.ref) == sorted(expected, key=lambda one: one.ref)
        places = [place(record, where) for record in shown]
        assert places == sorted(places)

    @rule(steps=st.lists(st.sampled_from([0, 1, 5, 100, 70_000, 2**33]), max_size=4))
    def tally(self, steps: list[Millis]) -> None:
        edges = [self.now + sum(steps[:number]) for number in range(len(steps))] or None
        told = self.wait(self.store.tally(edges))
        numbers = Counter((one.topic, one.state) for one in self.records.values())
        assert {each: one for each, one in told.counts.items() if one.number} == {
            each: Count(number) for each, number in numbers.items()
        }
        for topic in TOPICS:
            wakes = [one.wake_at for one in self.live(topic) if one.state is State.WAITING]
            ahead = [Count(sum(low <= wake < high for wake in wakes)) for low, high in pairwise(edges or ())]
            assert list(told.forecast.get(topic, [Count(0)] * len(ahead))) == ahead

    @rule()
    def look(self) -> None:
        self.all_are_as_they_must_be()

    # internals

    @invariant()
    def count(self) -> None:
        """Run after each move, and once before the first."""
        type(self).compared += 1

    def life(self) -> str:
        self.lives += 1
        return f"00000000-0000-7000-8000-{self.lives:012x}"

    def token(self, ref: Ref, past: int | None) -> Token | None:
        seen = self.tokens.get(ref, [])
        return None if past is None or len(seen) < -past else seen[past]

    def due(self, asked: Offset) -> Due:
        return In(asked[1]) if asked[0] else At(self.now + asked[1])

    def keep(self, asked: Millis | None) -> Millis:
        return 0 if asked is None else self.now + asked

    def live(self, topic: str) -> list[Record]:
        """The live tasks of the topic as they must be, the earliest first."""
        live = [one for one in self.records.values() if one.topic == topic and one.state.live]
        return sorted(live, key=lambda one: one.wake_at)

    def keep_record(self, ref: Ref, record: Record | None) -> None:
        if record is None:
            self.records.pop(ref, None)
        else:
            self.records[ref] = record

    def is_new(self, version: Record) -> None:
        """Check that the token of a new version is higher than each before it."""
        tokens = self.tokens.setdefault(version.ref, [])
        assert not tokens or version.token > tokens[-1], f"the token of {version.ref} has to rise"
        tokens.append(version.token)

    def all_are_as_they_must_be(self) -> None:
        self.are_as_they_must_be(dict(zip(REFS, self.wait(self.store.get(REFS)), strict=True)))

    def are_as_they_must_be(self, now_are: Mapping[Ref, Record | None]) -> None:
        for ref, now_is in now_are.items():
            assert now_is == self.records.get(ref)


def fair_want(due: Sequence[Record], want: int, exact: bool) -> int:
    """`want`, raised until no choice is left: among equal wake times, or among all if the order is not `exact`."""
    if want <= 0 or not exact:
        return max(want, len(due)) if want > 0 else 0
    total = 0
    for _, equal in groupby(due, key=lambda record: record.wake_at):
        total += len(list(equal))
        if total >= want:
            return total
    return want


def play(
    make_subject: Callable[[], Store],
    *,
    games: int = 100,
    moves: int = 100,
    exact_wakes: bool = True,
    exact_ends: bool = True,
    exact_order: bool = True,
) -> int:
    """Play games of at most `moves` each; return the number of moves compared. Fails at the first difference."""

    class Game(StoreMachine):
        def make_subject(self) -> Store:
            return make_subject()

    Game.compared = 0
    Game.exact_wakes, Game.exact_ends, Game.exact_order = exact_wakes, exact_ends, exact_order
    run_state_machine_as_test(
        Game,
        settings=settings(
            max_examples=games,
            stateful_step_count=moves,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, Phase.shrink],
        ),
    )
    return Game.compared
