"""The heads: what is known of where something is due may be too early, never too late."""

from __future__ import annotations

from collections import Counter
from math import inf

from bide.stores.redis.leasing import GRACE, NEVER, HeadCache, owned, owner_of


def test_what_is_not_known_is_asked_for() -> None:
    heads = HeadCache(3)
    assert heads.due(0) == [0, 1, 2]
    assert heads.next_wake() == 0
    for shard in range(3):
        heads.answered(shard, -1, -1, 10.0, plenty=False)
    assert heads.due(10**12) == []
    assert heads.next_wake() is None
    assert heads.stale(10.0) == []
    assert heads.stale(10.1) == [0, 1, 2]


def test_the_oldest_head_is_that_of_no_server_that_is_away() -> None:
    heads = HeadCache(3)
    for shard in range(3):
        heads.answered(shard, -1, -1, 10.0 + shard, plenty=False)
    assert heads.oldest(()) == 10.0
    assert heads.oldest({0: "its answer is still to come"}) == 11.0
    assert heads.oldest({0, 1, 2}) == inf


def test_what_was_told_while_a_call_was_under_way_counts_whatever_it_answers() -> None:
    heads = HeadCache(1)
    heads.asking(0)
    heads.note_wake(0, 500)
    heads.answered(0, -1, -1, 1.0, plenty=False)
    assert heads.next_wake() == 500
    heads.asking(0)
    heads.answered(0, -1, -1, 2.0, plenty=False)
    assert heads.next_wake() is None, "and once it was asked for after that, the answer is the truth"


def test_what_was_told_only_ever_brings_the_wake_forward() -> None:
    heads = HeadCache(1)
    heads.answered(0, 300, 700, 1.0, plenty=False)
    heads.note_wake(0, 500)
    assert heads.next_wake() == 300
    heads.note_wake(0, 100)
    assert heads.next_wake() == 100


def test_who_does_not_go_first_waits_a_moment() -> None:
    heads = HeadCache(2)
    heads.mine = [True, False]
    for shard in (0, 1):
        heads.answered(shard, 1_000, -1, 1.0, plenty=False)
    assert heads.due(1_000) == [0]
    assert heads.due(1_000 + GRACE) == [0, 1]
    heads.answered(1, -1, -1, 1.0, plenty=False)
    assert heads.wake(1) == NEVER, "and there is nothing to wait for"


def test_the_most_overdue_comes_first() -> None:
    heads = HeadCache(3)
    for shard, wake in enumerate((30, 10, 20)):
        heads.answered(shard, wake, -1, 1.0, plenty=False)
    assert heads.due(25) == [1, 2]


def test_room_is_shared_out_and_never_exceeded() -> None:
    heads = HeadCache(16)
    for room in (1, 5, 16, 100, 1000):
        shares = heads.shares(list(range(16)), room)
        assert sum(shares.values()) == room
        assert all(shares.values())
    heads.plenty[3] = True
    assert len(heads.shares(list(range(16)), 100)) == 1, "where there is plenty, few shards are asked for much"


def test_every_shard_has_one_owner_and_few_change_hands() -> None:
    workers = [f"worker-{number}" for number in range(5)]
    before = {(topic, shard): owner_of(topic, shard, workers) for topic in ("a", "b", "c", "d") for shard in range(64)}
    shares = Counter(before.values())
    assert set(shares) == set(workers)
    assert max(shares.values()) < 2.5 * min(shares.values())
    after = {place: owner_of(*place, workers[:-1]) for place in before}
    moved = [place for place in before if before[place] != after[place]]
    assert all(before[place] == workers[-1] for place in moved), "only what the one that went had"


def test_only_workers_of_the_topic_count_and_oneself_always() -> None:
    live = {"one": ["a"], "two": ["a", "b"], "three": ["b"]}
    of = {worker: owned("a", 32, live, {worker}) for worker in ("one", "two")}
    assert [one + two for one, two in zip(of["one"], of["two"], strict=True)] == [1] * 32
    assert all(owned("c", 32, live, {"one"}))
    assert any(owned("a", 32, {}, {"newcomer"}))
