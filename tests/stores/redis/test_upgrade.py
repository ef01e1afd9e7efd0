"""A rolling upgrade: clients of two versions of bide work side by side as long as the layout's version is the same."""

from __future__ import annotations

from hashlib import sha1

import pytest
from tests.stores.redis.conftest import OpensStore

from bide.core.instants import In
from bide.core.records import Lease, Move, NewTask, OutcomeKind, Ref, Result, Settlement
from bide.stores.redis import runtime
from bide.stores.redis.script_client import Script, script


def of_the_next_version(name: str, *, flags: bool) -> Script:
    """Another text, and so another name at the server."""
    here = script(name, flags=flags)
    text = f"{here.text}\n-- of the next version"
    return Script(name, text, sha1(text.encode(), usedforsecurity=False).hexdigest())


async def test_each_version_goes_on_with_what_the_other_began(
    redis_url: str, open_store: OpensStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = await open_store(redis_url)
    monkeypatch.setattr(runtime, "script", of_the_next_version)
    newer = await open_store(redis_url)
    versions = (older, newer)
    for turn in range(8):
        first, second = versions[turn % 2], versions[1 - turn % 2]
        now = await first.time()
        key = f"task-{turn}"
        [made] = await first.add([NewTask("t", key, f"life-{turn}", In(60_000), b"{}")], now=now)
        assert made.result is Result.CREATED
        [moved] = await second.change([Move("t", key, In(0))], now=now)
        assert moved.result is Result.MOVED
        assert moved.record is not None
        assert made.record is not None
        assert moved.record.token > made.record.token
        [held] = (await first.lease({"t": 5}, now=now, until=now + 60_000, holder="first")).tasks or (
            await second.lease({"t": 5}, now=now, until=now + 60_000, holder="second")
        ).tasks
        assert held.key == key
        assert await second.extend([Lease("t", key, held.token)], now=now, until=now + 90_000) == [True]
        assert await first.settle([Settlement("t", key, held.token, OutcomeKind.DONE)], now=now) == [True]
        assert await second.get([Ref("t", key)]) == [None]
