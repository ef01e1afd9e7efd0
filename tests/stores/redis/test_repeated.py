"""A repeated answer to a lease: what the call was given, less what has changed hands since."""

from __future__ import annotations

from typing import Any

from tests.stores.redis.conftest import OpensStore

from bide.core.instants import In
from bide.core.records import Cancel, Lease, NewTask, OutcomeKind, Ref, Settlement
from bide.stores.redis.script_client import Call

KEYS = [f"k{number}" for number in range(5)]


async def test_a_late_answer_gives_nothing_that_is_no_longer_held(shared_url: str, open_store: OpensStore) -> None:
    store = await open_store(shared_url, query="&shards=1")
    now = await store.time()
    await store.add([NewTask("t", key, key, In(0), key.encode(), "g", b"options") for key in KEYS], now=now)
    caller = store._open().clients["lease"]
    call = Call(0, ["nobody", "t"], [60_000, "w", 2**53, 3, 10])
    replies: list[list[Any]] = []
    await caller.run([call], lambda _, reply: replies.append(reply))
    tokens = {record.key: record.token for record in await store.get([Ref("t", key) for key in KEYS]) if record}

    await store.change([Cancel("t", "k1")], now=now)
    retry = Settlement("t", "k3", tokens["k3"], OutcomeKind.RETRY, In(60_000))
    assert await store.settle([retry], now=now) == [True]
    longer = [Lease("t", "k4", tokens["k4"])]
    assert await store.extend(longer, now=now, until=now + 90_000) == [True]

    caller._numbers[0] -= 1  # the same call once more, as after a lost answer
    await caller.run([call], lambda _, reply: replies.append(reply))
    first, again = replies
    assert again[:9] == first[:9], "the same heads and the same count"
    bodies = {key.decode(): body for key, _, body in zip(*[iter(again[9:])] * 3, strict=True)}
    assert {key for key, body in bodies.items() if not body} == {"k1", "k3"}
    assert len(bodies) == len(KEYS)
    assert all(key.encode() in bodies[key] for key in ("k0", "k2", "k4"))
