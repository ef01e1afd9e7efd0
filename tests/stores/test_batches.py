"""How SQL stores part their batches, and what they expect of them: which keys may be there already."""

from __future__ import annotations

from bide.core.records import Ref
from bide.stores.batches import Conflicts

OURS, THEIRS = [Ref("ours", "1"), Ref("ours", "2")], [Ref("theirs", "1")]


def test_conflicts_are_likely_for_some_batches_after_one() -> None:
    conflicts = Conflicts()
    assert not conflicts.likely(OURS)
    conflicts.met(OURS, [])
    assert not conflicts.likely(OURS)
    conflicts.met(OURS, OURS[:1])
    for _ in range(Conflicts.BATCHES - 1):
        conflicts.met(OURS, [])
        assert conflicts.likely(OURS)
    conflicts.met(OURS, [])
    assert not conflicts.likely(OURS)


def test_the_conflicts_of_one_topic_are_not_those_of_another() -> None:
    conflicts = Conflicts()
    conflicts.met([*OURS, *THEIRS], THEIRS)
    assert conflicts.likely(THEIRS)
    assert conflicts.likely([*OURS, *THEIRS])
    assert not conflicts.likely(OURS)
    for _ in range(Conflicts.BATCHES):
        conflicts.met(OURS, [])
    assert conflicts.likely(THEIRS), "batches without it say nothing of it"


def test_topics_without_end_do_not_fill_the_memory() -> None:
    conflicts = Conflicts()
    for number in range(3 * Conflicts.TOPICS):
        task = [Ref(f"tenant-{number}", "1")]
        conflicts.met(task, task)
        assert conflicts.likely(task)
    assert len(conflicts._wary) <= Conflicts.TOPICS
