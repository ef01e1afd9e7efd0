"""How a store is reached, who may, and what lies in it: addresses, rights, layouts, upgrades."""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import sha1
from pathlib import Path

import pytest
from redis.crc import key_slot
from tests.servers.fixtures import StartsRedis
from tests.stores.redis.conftest import OpensStore
from tests.stores.sql.everything import everything

from bide import BadInput
from bide.core.errors import StoreUnavailable
from bide.core.instants import In
from bide.core.names import new_id
from bide.core.records import Cancel, Lease, Move, NewTask, OutcomeKind, Ref, Result, Settlement
from bide.stores.redis import RedisStore, runtime
from bide.stores.redis.address import Address, address_of
from bide.stores.redis.layout import Layout, flags_of, packed_id, seed_of
from bide.stores.redis.script_client import Script, script
from bide_proofs.servers.redis import RedisServer
from bide_proofs.servers.redis_replicas import RedisCluster


def test_the_keys_of_a_shard_share_a_slot() -> None:
    layout = Layout("shop", 16)
    for shard in range(16):
        keys = [*layout.fixed(shard, b"caller"), *layout.topic(shard, "a{b}c"), layout.wake_channel(shard)]
        assert len({key_slot(key) for key in keys}) == 1
        assert len(set(keys)) == len(keys)
    assert len({key_slot(layout.counts[shard]) for shard in range(16)}) > 10, "and the shards are spread"


def test_the_shard_of_a_task_never_changes() -> None:
    """These figures are in servers by now: another hash would not find the tasks."""
    layout = Layout("any", 16)
    assert [layout.shard_of("order.close", str(number)) for number in range(8)] == [11, 13, 7, 1, 2, 4, 14, 8]
    assert layout.shard_of("löschen", "ключ") == 4


def test_a_plain_task_takes_43_bytes_and_its_payload() -> None:
    new = NewTask("t", "k", new_id(), In(0), b"x" * 100)
    flags_token_and_three_times = 1 + 7 + 3 * 6
    assert flags_token_and_three_times + len(seed_of(new, flags_of(new))) == 143
    assert len(packed_id(new.id)) == 17


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


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://localhost", Address(kind="single", hosts=(("localhost", 6379),))),
        ("redis://h:7000/3", Address(kind="single", hosts=(("h", 7000),), db=3)),
        ("redis://u:p%40ss@h", Address(kind="single", hosts=(("h", 6379),), username="u", password="p@ss")),
        ("redis://:secret@h", Address(kind="single", hosts=(("h", 6379),), password="secret")),
        ("rediss://[::1]:1", Address(kind="single", hosts=(("::1", 1),), tls=True)),
        ("unix:///run/r.sock?db=2", Address(kind="single", path="/run/r.sock", db=2)),
        ("unix://u:p@/run/r.sock", Address(kind="single", path="/run/r.sock", username="u", password="p")),
        (
            "redis+sentinel://a,b:2/main/1?sentinel_password=s",
            Address(kind="sentinel", hosts=(("a", 26379), ("b", 2)), service="main", db=1, sentinel_password="s"),
        ),
        (
            "rediss://h?ssl_ca_certs=/ca.pem&ssl_check_hostname=0",
            Address(
                kind="single",
                hosts=(("h", 6379),),
                tls=True,
                tls_options={"ssl_ca_certs": "/ca.pem", "ssl_check_hostname": False},
            ),
        ),
        ("redis+cluster://a:1,b:2?tls=1", Address(kind="cluster", hosts=(("a", 1), ("b", 2)), tls=True)),
        (
            "redis://h?namespace=shop&shards=4&wait_replicas=2",
            Address(kind="single", hosts=(("h", 6379),), namespace="shop", shards=4, wait_replicas=2),
        ),
    ],
)
def test_a_url_says_where_and_how(url: str, expected: Address) -> None:
    assert address_of(url) == expected


@pytest.mark.parametrize(
    "url",
    [
        "redis://a,b", "redis://h:port", "redis://h:999999", "redis://h/zero", "redis://h/0/1", "redis://h#here",
        "redis://h?shard=3", "rediss://h?ssl_foo=1", "rediss://h?ssl_check_hostname=perhaps",
        "rediss://h?ssl_cert_reqs=maybe", "redis://h?shards=0", "redis://h?shards=many", "redis://h?namespace=",
        "redis://h?namespace=a{b}", "redis://h?wait_replicas=-1", "redis+sentinel://h", "redis+sentinel://h/main/0/1",
        "redis+cluster://h/3", "redis+cluster://h?db=3", "redis://h/1?db=3", "redis+sentinel://h/main/1?db=3",
        "unix://relative.sock", "rediss+cluster://h",
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused(url: str) -> None:
    with pytest.raises(BadInput) as caught:
        address_of(url)
    assert caught.value.accepted


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


async def test_a_database_that_the_server_does_not_have_is_refused(redis_url: str) -> None:
    with pytest.raises(StoreUnavailable, match="the server has no database of this number: DB index is out of range"):
        await RedisStore(f"{redis_url.rpartition('/')[0]}/4999").open()


async def test_another_namespace_is_out_of_reach(acl_lines: Sequence[list[str]], redis_server: StartsRedis) -> None:
    server = redis_server()
    server.ask(*acl_lines[0])
    for other in ("bid", "bide2", "bide.test", "shop"):
        store = RedisStore(f"{url_for(server)}?namespace={other}")
        with pytest.raises(StoreUnavailable, match=r"lacks rights.*docs/redis\.md"):
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
