"""Counting by interval: one call for each shard and topic, and what it says is what is there."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from tests.stores.redis.conftest import OpensStore
from tests.stores.redis.deployments import Servers
from tests.stores.redis.test_costs import scripts_run

from bide.core.records import At, State
from bide.testing.store_suite.acts import HOUR, NOW, new, take


async def test_intervals_are_counted_in_one_call_for_each_shard_and_topic(
    servers: Servers, open_store: OpensStore
) -> None:
    store = await open_store(servers.url, query="&shards=4", clock="caller")
    wakes = [NOW + number * number % 9_973 for number in range(300)]
    tasks = [new(f"{number}", topic="ab"[number % 2], due=At(wake)) for number, wake in enumerate(wakes)]
    await store.add([*tasks, new("far", topic="c", due=At(NOW + 9 * HOUR))], now=NOW - 1)
    edges = [NOW, NOW + 1, NOW + 2_000, NOW + 2_000, NOW + 5_000, NOW + 9_000]

    await store.tally()  # the servers know the script
    before = scripts_run(servers)
    found = await store.tally(edges)
    assert scripts_run(servers) - before == 4 + 4 + 1, "each topic, where there is any of it"
    for place, topic in enumerate("ab"):
        mine = wakes[place::2]
        assert [count.number for count in found.forecast[topic]] == [
            sum(low <= wake < high for wake in mine) for low, high in pairwise(edges)
        ]
        assert found.number(topic, State.WAITING) == 150
    assert [count.number for count in found.forecast["c"]] == [0] * 5
    assert all(count.exact for counts in found.forecast.values() for count in counts)

    servers.ask("SCRIPT", "FLUSH")
    assert await store.tally(edges) == found, "a server that was restarted knows no script"

    fine = range(NOW, NOW + 2_500)
    many = (await store.tally(fine)).forecast
    expected = Counter(wake for wake in wakes if wake < NOW + 2_499)
    assert [sum(counts) for counts in zip(*([c.number for c in many[t]] for t in "ab"), strict=True)] == [
        expected[wake] for wake in fine[:-1]
    ], "more edges than one call takes"

    [one] = [await take(store, topic="c", now=NOW + 10 * HOUR)]
    after = await store.tally([NOW, NOW + 10 * HOUR])
    assert "c" not in after.forecast, f"{one.key} is leased, and nothing of its topic waits"
    assert after.counts["c", State.LEASED].number == 1
