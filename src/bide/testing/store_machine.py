"""A game of two stores: Hypothesis makes the same calls to both and requires the same answers.

    def test_my_store_is_right(tmp_path):
        assert play(lambda: MyStore(tmp_path / new_id()), games=200, moves=100) >= 20_000

The model is the memory store, which decides everything by the pure functions of the lifecycle. Ids and the time are
arguments, so answers can be compared field by field. Tokens cannot be compared, since each store has its own counter;
the machine checks that one store's token rises when the other's rises. The machine does not compare what no store
promises: the order among equal wake times, and which of several equal tasks a limited lease takes (it raises the limit
until there is no choice).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from itertools import groupby, product
from typing import Any, ClassVar, NamedTuple, TypeVar

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
from msgspec.structs import replace

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
    Page,
    Record,
    Redrive,
    Ref,
    Settlement,
    State,
    Tally,
    Token,
)
from bide.ports import Store
from bide.stores.memory import MemoryStore
from bide.testing.clock import FIRST_INSTANT
from bide.testing.store_suite.base import add_all, change_all, pages, place, settle_all

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

Answered = TypeVar("Answered")
Asked = TypeVar("Asked")


class Tokens(NamedTuple):
    """The tokens that the two stores give to the same version."""

    model: Token
    subject: Token


class StoreMachine(RuleBasedStateMachine):
    """The two stores, the time, and the callers' knowledge: leases and all tokens seen."""

    compared: ClassVar[int] = 0
    """The number of moves made so far, over all games of the class."""
    exact_wakes: ClassVar[bool] = True
    """True if the subject's `next_wake` is exact; else it may be earlier."""
    exact_ends: ClassVar[bool] = True
    """True if `next_wake` changes when a lease is extended or ends early; else it may be the lease's original end."""
    exact_order: ClassVar[bool] = True

    def make_subject(self) -> Store:
        raise NotImplementedError

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.wait = self.runner.get_loop().run_until_complete  # `run` would set SIGINT's handler before each call
        self.model, self.subject = MemoryStore(), self.make_subject()
        self.now: Millis = FIRST_INSTANT
        self.lives = 0
        self.tokens: dict[Ref, list[Tokens]] = {}
        self.leases: list[tuple[Ref, Tokens]] = []
        self.ends: set[Millis] = set()
        """All ends that leases were given so far, also by extends."""
        self.both(lambda store: store.open())

    def teardown(self) -> None:
        try:
            self.everything_is_the_same()
        finally:
            self.both(lambda store: store.close())
            self.runner.close()

    # time

    @rule(step=st.sampled_from([1, 2, 3, 5, 10, 60, 100, 1_000, 70_000, 2**32, -1, -7]))
    def time_passes(self, step: Millis) -> None:
        self.count()
        self.now += step

    # clients

    @rule(asked=st.lists(new_tasks, min_size=1, max_size=4))
    def schedule(self, asked: list[AskedTask]) -> None:
        self.count()
        batch: list[tuple[NewTask, NewTask]] = []
        for ref, due, group, deadline, on_conflict, payload, past in asked:
            token = self.token(ref, past)
            task = NewTask(
                ref.topic, ref.key, self.life(), self.due(due), payload, group, b"\x80" if payload else b"",
                None if deadline is None else self.now + deadline, on_conflict, token and token.model,
            )  # fmt: skip
            batch.append((task, replace(task, if_token=token and token.subject)))
        mine, theirs = self.each(partial(add_all, now=self.now), batch)
        self.same_answers([ref for ref, *_ in asked], mine, theirs)

    @rule(asked=st.lists(changes, min_size=1, max_size=4))
    def change(self, asked: list[AskedChange]) -> None:
        self.count()
        batch: list[tuple[Change, Change]] = []
        for verb, ref, due, keep, past in asked:
            token = self.token(ref, past)
            mine: Token | None = None if token is None else token.model
            change: Change
            if verb == "move":
                change = Move(ref.topic, ref.key, self.due(due), mine, self.now + 50 * keep if keep else None)
            elif verb == "cancel":
                change = Cancel(ref.topic, ref.key, self.keep(keep), mine)
            else:
                change = Redrive(ref.topic, ref.key, self.life(), self.due(due), mine)
            batch.append((change, replace(change, if_token=None if token is None else token.subject)))
        ours, theirs = self.each(partial(change_all, now=self.now), batch)
        self.same_answers([ref for _, ref, *_ in asked], ours, theirs)

    # workers

    @rule(
        wants=st.dictionaries(st.sampled_from([*TOPICS, "nobody"]), st.integers(0, 5)),
        lasts=st.sampled_from([10, 10, 1_000, 3, 0]),
    )
    def lease(self, wants: dict[str, int], lasts: Millis) -> None:
        self.count()
        due = {topic: self.due_tasks(topic) for topic in wants}
        fair = {topic: fair_want(due[topic], want, self.exact_order) for topic, want in wants.items()}
        mine, theirs = self.both(
            lambda store: store.lease(fair, now=self.now, until=self.now + lasts, holder=f"worker {lasts}")
        )
        self.ends.update({self.now + lasts} if mine.tasks else ())
        self.same_leases(mine, theirs, due)

    def same_leases(self, mine: Leased, theirs: Leased, due: Mapping[str, Sequence[Record]]) -> None:
        by_ref = {record.ref: record for record in theirs.tasks}
        assert len(by_ref) == len(theirs.tasks), "no task is given out twice"
        assert set(by_ref) == {record.ref for record in mine.tasks}
        for record in mine.tasks:
            self.same_record(record.ref, record, by_ref[record.ref])
            self.leases.append((record.ref, self.tokens[record.ref][-1]))
        self.leases = self.leases[-8:]
        woke = {record.ref: record.wake_at for records in due.values() for record in records}
        for topic in due:
            order = [woke[record.ref] for record in theirs.tasks if record.topic == topic]
            assert order == sorted(order), "oldest first"
        if not self.exact_ends and theirs.next_wake in self.ends:
            assert mine.next_wake is None or theirs.next_wake <= mine.next_wake
        elif self.exact_wakes or mine.next_wake is None or mine.next_wake <= self.now:
            assert theirs.next_wake == mine.next_wake
        else:
            assert theirs.next_wake is not None
            assert self.now < theirs.next_wake <= mine.next_wake

    @rule(which=st.lists(st.integers(0, 7), min_size=1, max_size=3), lasts=st.sampled_from([10, 1_000, 1]))
    def extend(self, which: list[int], lasts: Millis) -> None:
        self.count()
        chosen = [self.leases[-1 - number] for number in which if number < len(self.leases)]
        held = [(Lease(*ref, token.model), Lease(*ref, token.subject)) for ref, token in chosen]
        until = self.now + lasts
        self.ends.add(until)
        mine, theirs = self.each(lambda store, leases: store.extend(leases, now=self.now, until=until), held)
        assert theirs == mine

    @rule(asked=st.lists(settlements, min_size=1, max_size=3))
    def settle(self, asked: list[AskedOutcome]) -> None:
        self.count()
        batch: list[tuple[Settlement, Settlement]] = []
        for number, verdict, due, keep, error in asked:
            if number >= len(self.leases):
                continue
            ref, token = self.leases[-1 - number]
            ends = verdict in ("done", "dead")
            outcome = Settlement(
                ref.topic, ref.key, token.model, OutcomeKind("done" if verdict == "again" else verdict),
                None if ends else self.due(due), self.keep(keep) if ends else 0,
                error if verdict in ("retry", "dead") else None, self.life() if verdict == "again" else "",
            )  # fmt: skip
            batch.append((outcome, replace(outcome, token=token.subject)))
        mine, theirs = self.each(partial(settle_all, now=self.now), batch)
        assert theirs == mine
        self.same_tasks([Ref(outcome.topic, outcome.key) for outcome, _ in batch])

    @rule(limit=st.sampled_from([1, 2, 100]))
    def purge(self, limit: int) -> None:
        """Purge until nothing is left, since no store promises which tasks a limited purge takes."""
        self.count()

        async def all_of(store: Store) -> list[int]:
            sizes: list[int] = []
            while not sizes or sizes[-1]:
                sizes.append(await store.purge(now=self.now, limit=limit))
            return sizes

        mine, theirs = self.both(all_of)
        assert theirs == mine

    # queries

    @rule(asked=filters, limit=st.sampled_from([1, 2, 3, 100]))
    def find(self, asked: AskedFilter, limit: int) -> None:
        self.count()
        topic, state, group, low, high = asked
        first, end = (None if step is None else self.now + step for step in (low, high))
        where = Filter(topic=topic, state=state, group=group, wake_from=first, wake_before=end)

        async def all_pages(store: Store) -> list[list[Record]]:
            return [page async for page in pages(store, where, limit)]

        mine, theirs = self.both(all_pages)
        assert [len(page) for page in theirs] == [len(page) for page in mine]
        ours, shown = [[record for page in each for record in page] for each in (mine, theirs)]
        by_ref = {record.ref: record for record in shown}
        assert len(by_ref) == len(shown), "no task is shown twice"
        assert set(by_ref) == {record.ref for record in ours}
        for record in ours:
            self.same_record(record.ref, record, by_ref[record.ref])
        assert [place(record, where) for record in shown] == [place(record, where) for record in ours]

    @rule(steps=st.lists(st.sampled_from([0, 1, 5, 100, 70_000, 2**33]), max_size=4))
    def tally(self, steps: list[Millis]) -> None:
        self.count()
        edges = [self.now + sum(steps[:number]) for number in range(len(steps))] or None
        mine, theirs = self.both(lambda store: store.tally(edges))
        assert counts(theirs) == counts(mine)
        for topic in TOPICS:
            nothing = [Count(0)] * max(len(edges or ()) - 1, 0)
            assert list(theirs.forecast.get(topic, nothing)) == list(mine.forecast.get(topic, nothing))

    @rule()
    def look(self) -> None:
        self.count()
        self.everything_is_the_same()

    # internals

    @classmethod
    def count(cls) -> None:
        cls.compared += 1

    def both(self, call: Callable[[Store], Coroutine[Any, Any, Answered]]) -> tuple[Answered, Answered]:
        return self.wait(call(self.model)), self.wait(call(self.subject))

    def each(
        self, call: Callable[[Store, list[Asked]], Coroutine[Any, Any, Answered]], pairs: Sequence[tuple[Asked, Asked]]
    ) -> tuple[Answered, Answered]:
        """Call with the first of each pair for the model, and with the second for the subject."""
        mine = self.wait(call(self.model, [one for one, _ in pairs]))
        return mine, self.wait(call(self.subject, [other for _, other in pairs]))

    def life(self) -> str:
        self.lives += 1
        return f"00000000-0000-7000-8000-{self.lives:012x}"

    def token(self, ref: Ref, past: int | None) -> Tokens | None:
        seen = self.tokens.get(ref, [])
        return None if past is None or len(seen) < -past else seen[past]

    def due(self, asked: Offset) -> Due:
        return In(asked[1]) if asked[0] else At(self.now + asked[1])

    def keep(self, asked: Millis | None) -> Millis:
        return 0 if asked is None else self.now + asked

    def due_tasks(self, topic: str) -> list[Record]:
        found = self.wait(self.model.find(Filter(topic=topic, wake_before=self.now + 1), Page(limit=100)))
        return found.tasks

    def everything_is_the_same(self) -> None:
        self.same_tasks(REFS)

    def same_tasks(self, asked: Sequence[Ref]) -> None:
        mine, theirs = self.both(lambda store: store.get(asked))
        for ref, ours, other in zip(asked, mine, theirs, strict=True):
            self.same_record(ref, ours, other)

    def same_answers(self, asked: Sequence[Ref], mine: Sequence[Answer], theirs: Sequence[Answer]) -> None:
        for ref, ours, other in zip(asked, mine, theirs, strict=True):
            assert (other.result, other.was) == (ours.result, ours.was), ref
            self.same_record(ref, ours.record, other.record)

    def same_record(self, ref: Ref, mine: Record | None, theirs: Record | None) -> None:
        """Compare all fields except the token, and check that the tokens of both stores rise together."""
        if mine is None or theirs is None:
            assert theirs == mine, ref
            return
        seen = self.tokens.setdefault(ref, [])
        began = mine.wake_at
        if mine.finished_at is not None and theirs.wake_at != began:
            # it is the start of the last delivery, from the lease's token: stores differ if the clock was set back
            assert theirs.wake_at in {min(one.subject // 1000, mine.finished_at) for one in seen}
            began = theirs.wake_at
        assert replace(theirs, token=0) == replace(mine, token=0, wake_at=began)
        before = seen[-1] if seen else Tokens(0, 0)
        now_is = Tokens(mine.token, theirs.token)
        if now_is.model == before.model:
            assert now_is.subject == before.subject, f"the token of {ref} rose, although nothing changed"
        else:
            assert now_is.subject > before.subject, f"the token of {ref} has to rise"
            seen.append(now_is)


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


def counts(tally: Tally) -> dict[tuple[str, State], Count]:
    return {each: count for each, count in tally.counts.items() if count.number}


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
