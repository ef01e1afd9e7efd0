"""Lists and tallies of a store with one topic, with a hundred and with a thousand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bide.core.records import Cancel, Filter, Page, State
from bide.testing.store_suite.base import NOW, bring, change_all, new, put

TOPICS = (1, 100, 1_000)


async def asked_of_topics(store: Any, asked: Callable[[], int]) -> dict[int, tuple[int, int, int]]:
    """By the number of topics: what is asked of a server to find no dead task, to find one, and to tally.

    `asked`: how much was asked so far.
    """
    found: dict[int, tuple[int, int, int]] = {}
    dead = Filter(state=State.DEAD)
    there = 0
    for topics in TOPICS:
        await put(store, *(new(topic=f"t{number:04}") for number in range(there, topics)))
        there = topics
        before = asked()
        assert (await store.find(dead, Page())).tasks == []
        none = asked()
        await bring(store, State.DEAD, "dead", topic=f"u{topics:04}")
        one = asked()
        assert [task.topic for task in (await store.find(dead, Page())).tasks] == [f"u{topics:04}"]
        counting = asked()
        tally = await store.tally([0, NOW + 1])
        assert tally.number(state=State.WAITING) == topics
        assert len(tally.forecast) == topics
        found[topics] = none - before, counting - one, asked() - counting
        await put(store, new("dead", topic=f"u{topics:04}"))
        await change_all(store, [Cancel(f"u{topics:04}", "dead")])
    return found
