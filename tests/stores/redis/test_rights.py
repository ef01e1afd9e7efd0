"""The rights in docs/redis.md are enough for everything that bide does, and none of them is idle."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.servers.fixtures import StartsRedis
from tests.stores.sql.everything import everything

from bide.core.errors import StoreUnavailable
from bide.core.instants import In
from bide.core.names import new_id
from bide.core.records import Cancel, NewTask
from bide.stores.redis import RedisStore
from bide_proofs.servers.redis import RedisServer
from bide_proofs.servers.redis_replicas import RedisCluster

PASSWORD = "SECRET"


@pytest.fixture(scope="module")
def acl_lines(root: Path) -> Sequence[list[str]]:
    """The words of each ACL SETUSER on the page: the first makes the user, the others add to it."""
    text = (root / "docs" / "redis.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```text\n(ACL SETUSER .*?)^```", text, re.MULTILINE | re.DOTALL)
    assert blocks, "the page has the line"
    return [line.split() for block in blocks for line in re.sub(r"\n +", " ", block).splitlines()]


def commands_in(words: Sequence[str]) -> set[str]:
    return {word for word in words if word.startswith("+")}


def line_with(lines: Sequence[list[str]], command: str) -> list[str]:
    return next(line for line in lines if command in line)


def url_for(server: RedisServer | RedisCluster) -> str:
    return server.url.replace("://", f"://bide:{PASSWORD}@")


async def over_time(url: str) -> None:
    """A task that waits and one whose holder was lost, both due: their times are compared. And one is forgotten."""
    store = RedisStore(url, clock="caller")
    await store.open()
    try:
        await store.add([NewTask("forgotten", "1", new_id(), In(0), b"")], now=1_000)
        await store.change([Cancel("forgotten", "1", keep_until=2_000)], now=1_000)
        assert await store.purge(now=2_000, limit=100) == 1
        await store.add([NewTask("lost", "1", new_id(), In(0), b"")], now=1_000)
        await store.lease({"lost": 1}, now=1_000, until=2_000, holder="worker")
        await store.add([NewTask("lost", "2", new_id(), In(0), b"")], now=1_000)
        both = await store.lease({"lost": 2}, now=3_000, until=4_000, holder="worker")
        assert len(both.tasks) == 2
    finally:
        await store.close()


async def damaged(server: RedisServer, url: str) -> None:
    """A body that is gone, so that its entry is set aside and counted."""
    store = RedisStore(url)
    await store.open()
    try:
        now = await store.time()
        await store.add([NewTask("damaged", "1", new_id(), In(0), b"")], now=now)
        for shard in range(16):
            server.ask("DEL", f"{{bide:{shard}}}:b:damaged")
        assert not (await store.lease({"damaged": 1}, now=now, until=now + 1_000, holder="worker")).tasks
        assert any("damaged" in finding.what for finding in await store.diagnose())
    finally:
        await store.close()


def called(server: RedisServer) -> set[str]:
    """Which commands were asked of it, as ACLs name them."""
    return {f"+{name.removeprefix('cmdstat_')}" for name in server.info("commandstats")}


async def test_the_rights_suffice_and_each_is_needed(acl_lines: Sequence[list[str]], redis_server: StartsRedis) -> None:
    server = redis_server()
    user = acl_lines[0]
    server.ask(*user)
    server.ask(*line_with(acl_lines, "+select"))
    server.ask("CONFIG", "RESETSTAT")
    await everything(RedisStore(url_for(server).replace("/0", "/1"), events_kept=2))
    await over_time(f"{url_for(server)}?shards=1")
    server.ask("FLUSHALL")
    await damaged(server, url_for(server))
    assert server.ask("ACL", "LOG") == [], "nothing was refused"
    needed = called(server)
    assert commands_in(user) - needed == set(), "nobody asked for these"
    assert "+select" in needed


async def test_another_namespace_is_out_of_reach(acl_lines: Sequence[list[str]], redis_server: StartsRedis) -> None:
    server = redis_server()
    server.ask(*acl_lines[0])
    for other in ("bid", "bide2", "bide.test", "shop"):
        store = RedisStore(f"{url_for(server)}?namespace={other}")
        with pytest.raises(StoreUnavailable, match=r"may not.*docs/redis\.md"):
            await store.open()


async def test_a_cluster_needs_a_few_more(acl_lines: Sequence[list[str]], redis_cluster: RedisCluster) -> None:
    for_cluster = line_with(acl_lines, "+cluster|slots")
    for node in redis_cluster.nodes:
        for line in (acl_lines[0], for_cluster, line_with(acl_lines, "+wait")):
            node.ask(*line)
        node.ask("CONFIG", "RESETSTAT")
    await everything(RedisStore(f"{url_for(redis_cluster)}?wait_replicas=1", events_kept=2))
    assert [node.ask("ACL", "LOG") for node in redis_cluster.nodes] == [[]] * len(redis_cluster.nodes)
    needed = set[str]().union(*(called(node) for node in redis_cluster.nodes))
    assert commands_in(for_cluster) - needed == {"+asking"}, "which is said while a slot moves"
    assert "+wait" in needed
