"""Answers that are lost and calls that are interrupted: done once, and answered right."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
from tests.servers.fixtures import StartsRedis
from tests.stores.redis.conftest import OpensStore
from tests.stores.redis.deployments import Servers, master_of, slot_of
from tests.stores.redis.load import Load
from tests.stores.redis.proxies import Proxies
from tests.stores.stories import Story, extends, leases, moves, purges, replaces, schedules_many, settles_many
from tests.waiting import PATIENCE, pause, until, wait_until

from bide.core.errors import OutcomeUnknown, StoreFull, StoreUnavailable
from bide.core.instants import In
from bide.core.records import Filter, OnConflict, Result
from bide.stores.redis import RedisStore
from bide.stores.redis.script_client import Call, script
from bide.stores.server import LONGEST_PATIENCE, ServerTime
from bide.testing.proxy import Act, Chunk, FaultProxy
from bide.testing.store_suite.base import NOW, done, keys, lease, listed, new, put_one, see
from bide_proofs.servers.process import HOST
from bide_proofs.servers.redis import Connection, RedisServer, Refused
from bide_proofs.servers.redis_replicas import ClusterNode, RedisCluster

Opens = Callable[..., Awaitable[RedisStore]]


def asks(kind: str) -> Callable[[bytes], bool]:
    """Whether a chunk carries a call of this kind."""
    shas = [script(kind, flags=flags).sha.encode() for flags in (True, False)]
    return lambda data: any(sha in data for sha in shas)


STORIES: list[tuple[str, Story]] = [
    ("add", replaces), ("add", schedules_many), ("change", moves), ("lease", leases), ("extend", extends),
    ("settle", settles_many), ("purge", purges),
]  # fmt: skip
OF_MANY: list[tuple[str, Story]] = [
    ("add", schedules_many), ("lease", leases), ("settle", settles_many), ("purge", purges),
]  # fmt: skip
"""Stories of calls to many shards: where the servers are several, these are what may go otherwise."""


def told(*places: tuple[str, list[tuple[str, Story]]]) -> pytest.MarkDecorator:
    cases = [(deployment, kind, story) for deployment, stories in places for kind, story in stories]
    names = [f"{deployment}-{story.__name__}" for deployment, _, story in cases]
    return pytest.mark.parametrize(("deployment", "kind", "story"), cases, ids=names)


stories_of_many = told(("single", STORIES), ("sentinel", OF_MANY), ("cluster", OF_MANY))


@stories_of_many
@pytest.mark.parametrize(
    ("act", "times"),
    [(Act.CUT, 1), (Act.LOSE_REPLY, 1), (Act.LOSE_REPLY, 3), (Act.HOLD, 1)],
    ids=["cut before it arrives", "answer lost", "three answers lost", "half-open: nothing ever comes"],
)
async def test_a_call_that_meets_a_fault_is_done_once(
    through: Opens, proxies: Proxies, kind: str, story: Story, act: Act, times: int
) -> None:
    store = await through(silence=0.5 if act is Act.HOLD else LONGEST_PATIENCE)
    store._open().clients["extend"]._patience = LONGEST_PATIENCE  # however slow it is; else it is `silence`
    faults = []
    await story(store, lambda: faults.append(proxies.fault(act, when=asks(kind), times=times)))
    assert [fault.hits for fault in faults] == [times], "it has come about"


@stories_of_many
async def test_a_call_whose_answer_breaks_off_is_done_once(
    through: Opens, proxies: Proxies, kind: str, story: Story
) -> None:
    """The connection ends in the middle of the answers: some are read, the others asked for again."""
    store = await through()

    def breaks() -> None:
        state = {"armed": False}

        def hook(chunk: Chunk) -> Act:
            if chunk.to_server:
                state["armed"] |= asks(kind)(chunk.data)
            elif state["armed"]:
                proxies.watch(None)
                return Act.CUT
            return Act.FORWARD

        proxies.watch(hook)
        proxies.slow(200_000)

    await story(store, breaks)


async def test_a_repeated_answer_does_not_tell_the_time(
    through: Opens, proxies: Proxies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says what time it was when it was first given, which is not now."""
    store = await through(clock="server")
    seen: list[int] = []
    monkeypatch.setattr(ServerTime, "saw", lambda time, micros, sent, received: seen.append(micros))
    await put_one(store)
    assert len(seen) == 1
    fault = proxies.fault(Act.LOSE_REPLY, when=asks("add"))
    await put_one(store)
    assert fault.hits == 1
    assert len(seen) == 1


async def test_an_older_call_that_arrives_after_a_newer_one_is_refused(through: Opens, proxies: Proxies) -> None:
    """A copy of a call that was under way for long: doing it now would undo what came after it."""
    store = await through()
    seen: list[tuple[int, bytes]] = []

    def keep(port: int, chunk: Chunk) -> Act:
        if chunk.to_server and asks("add")(chunk.data):
            seen.append((port, chunk.data))
        return Act.FORWARD

    for port, proxy in proxies.each.items():
        proxy.hook = partial(keep, port)
    await put_one(store, new(payload=b"older"))
    newer = await put_one(store, new(payload=b"newer"))
    (port, first), (_, second) = seen
    shard, caller = store._open().layout.shard_of("t", "k"), store._open().clients["add"]
    answer = store._open().layout.fixed(shard, caller._name)[1].decode()
    with socket.create_connection((HOST, port)) as late, Connection(HOST, port) as beside:
        late.sendall(first)
        assert late.recv(1_000).startswith(b"-BIDEOLD")
        beside.ask("PEXPIRE", answer, 5_000)
        late.sendall(second)
        assert late.recv(1_000).startswith(b"*"), "a copy of the newest is answered as it was"
        assert int(str(beside.ask("PTTL", answer))) > 5_000, "by a write, which is what WAIT waits for"
    assert await see(store, newer) == newer, "and neither has done anything"


async def test_a_repeated_answer_waits_for_the_replicas_too(
    redis_server: StartsRedis, open_store: OpensStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a task that no replica has would be answered for, and a failover would undo it.

    From Redis 7.2 on WAIT waits for what its own connection has written: the one that had written it is gone.
    """
    master = await asyncio.to_thread(redis_server)
    async with FaultProxy(HOST, master.port) as line, Proxies(master.url, monkeypatch) as proxies:
        replica = await asyncio.to_thread(redis_server, options={"replicaof": f"{HOST} {line.port}"})
        await until(lambda: replica.info("replication")["master_link_status"] == "up", "the replica to follow")
        store = await open_store(proxies.url, query="&wait_replicas=1", silence=2.0)
        await put_one(store)
        lost = proxies.fault(Act.LOSE_REPLY, when=asks("add"))
        await put_one(store)
        assert lost.hits == 1, "and the replica has it"
        line.hold()
        store._open().clients["add"]._patience = 1.0
        proxies.fault(Act.LOSE_REPLY, when=asks("add"))
        with pytest.raises(OutcomeUnknown):
            await put_one(store, new("none-has-it"))


async def test_what_never_arrives_is_unavailable_and_what_may_have_is_unknown(through: Opens, proxies: Proxies) -> None:
    store = await through(patience=0.4)
    await put_one(store, new("before"))
    await proxies.refuse()
    proxies.cut()
    nodes, shards = store._open().topology, range(store._open().layout.shards)
    # what is sent before the store itself has noticed may have arrived, for all it knows
    await until(lambda: not any(map(nodes.ready, shards)), "the connections to be gone")
    with pytest.raises(StoreUnavailable):
        await put_one(store, new("never"))
    await proxies.heal()

    async def takes_another() -> bool:
        try:
            return await put_one(store, new("between")) is not None
        except StoreUnavailable:  # the line to it is tried again after a pause
            return False

    await until(takes_another, "the server to be found again")
    proxies.fault(Act.LOSE_REPLY, when=asks("add"), times=None)
    with pytest.raises(OutcomeUnknown):
        await put_one(store, new("maybe"))
    await proxies.heal()
    assert {"before", "between"} <= set(keys(await listed(store, Filter()))) <= {"before", "between", "maybe"}


@pytest.mark.parametrize("deployment", ["single"])  # where there are several, one of them is full as well
async def test_a_refusal_after_a_lost_answer_is_no_proof(
    servers: Servers, open_store: OpensStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was done; sent again, it is refused before anybody looks whether it was, since the memory is full by now."""
    async with Proxies(servers.url, monkeypatch) as proxies:
        store = await open_store(proxies.url, clock="caller")
        await put_one(store, new("before"))
        nodes, shards = store._open().topology, range(store._open().layout.shards)
        await proxies.refuse()
        proxies.fault(Act.LOSE_REPLY, when=asks("add"))
        adding = asyncio.create_task(put_one(store, new("done")))
        await until(lambda: not any(map(nodes.ready, shards)), "the connection to be gone")
        with servers.nearly_full(-1_000):
            await proxies.heal()
            with pytest.raises(OutcomeUnknown, match=r"an answer was lost.*maxmemory"):
                await adding
            with pytest.raises(StoreFull):
                await put_one(store, new("not done"))
        assert sorted(keys(await listed(store, Filter()))) == ["before", "done"]


@pytest.mark.parametrize("deployment", ["single"])  # it never gets to a server
async def test_a_call_that_cannot_be_written_gives_its_turn_back(through: Opens) -> None:
    store = await through()
    caller = store._open().clients["add"]
    await put_one(store)
    for shard, refused in enumerate(("\ud800", 1.5j)):
        with pytest.raises((UnicodeEncodeError, TypeError)):
            await caller.run([Call(shard, [], [refused])], lambda place, reply: None)  # type: ignore[list-item]
    assert not any(turn.locked() for turn in caller._turns)


async def test_two_hundred_callers_on_a_line_that_breaks_all_the_time(through: Opens, proxies: Proxies) -> None:
    """Connections are cut again and again, in either direction: every key is created, leased and settled once."""
    store = await through()
    created = 0

    async def breaks() -> None:
        for number in range(20):
            await until(lambda number=number: created >= 9 * number, "more to be created")  # type: ignore[misc]
            if number % 3:
                proxies.fault((Act.CUT, Act.LOSE_REPLY)[number % 2], when=lambda data: b"EVALSHA" in data)
            else:
                proxies.fault(Act.CUT, to_server=False, when=lambda data: data.startswith(b"*"))

    async def schedule(number: int) -> None:
        nonlocal created
        await pause(0.002 * number, why="the pace of the callers")
        [answer] = await store.add([new(f"{number}", on_conflict=OnConflict.REFUSE)], now=NOW)
        assert answer.result is Result.CREATED
        created += 1

    async def work() -> list[str]:
        did: list[str] = []
        while len(did) < 200:
            held = (await lease(store, 20)).tasks
            assert {one.attempt for one in held} <= {1}
            assert all(await store.settle([done(one) for one in held], now=NOW))
            did += keys(held)
            await pause(0.005, why="the pace of the worker")
        return did

    breaking = asyncio.create_task(breaks())
    async with asyncio.timeout(PATIENCE):
        working = asyncio.create_task(work())
        await asyncio.gather(*(schedule(number) for number in range(200)))
        did = await working
    await breaking
    assert sorted(did) == sorted(f"{number}" for number in range(200))


def went_well(load: Load) -> None:
    assert (load.lost, load.again, load.early, load.errors) == (set(), [], [], {}), load.report()


async def test_the_scripts_are_thrown_away_again_and_again(servers: Servers, open_store: OpensStore) -> None:
    async with Load(await open_store(servers.url)) as load:
        for _ in range(20 if servers.deployment == "single" else 10):
            await load.more(10)
            servers.ask("SCRIPT", "FLUSH")
        await load.more(10)
    went_well(load)


@pytest.mark.parametrize("kind", ["normal", "pubsub"])
async def test_connections_are_killed_again_and_again(servers: Servers, open_store: OpensStore, kind: str) -> None:
    """Those of the Sentinels too, to the master and to themselves."""
    stores = [await open_store(servers.url) for _ in range(2)]
    for store in stores:
        await store.listen(["t"], lambda topic, wake: None)
    with servers.patient():
        async with Load(*stores) as load:
            for _ in range(10 if servers.deployment == "single" else 5):
                await load.more(50)
                for one in (*servers.masters, *servers.sentinels):
                    one.ask("CLIENT", "KILL", "TYPE", kind)
            await load.more(50)
    went_well(load)
    if kind == "pubsub":
        assert load.resent == 0


# Under Sentinel and in a Cluster nobody makes a master a replica and then a master again: another is made, see below.
@pytest.mark.parametrize("deployment", ["single"])
async def test_a_server_that_may_only_be_read_for_a_while(servers: Servers, open_store: OpensStore) -> None:
    """READONLY: it was made a replica, and is made a master again."""
    async with Load(await open_store(servers.url)) as load:
        await load.more(50)
        servers.ask("REPLICAOF", HOST, 1)
        await load.noticed()
        servers.ask("REPLICAOF", "NO", "ONE")
        await load.more(50)
    went_well(load)


@pytest.mark.parametrize("deployment", ["single"])  # elsewhere there is another server to ask
async def test_a_server_that_stays_read_only_is_unavailable(servers: Servers, open_store: OpensStore) -> None:
    """Nothing was done, and it is known that nothing was done."""
    store = await open_store(servers.url, patience=0.3)
    servers.ask("REPLICAOF", HOST, 1)
    try:
        with pytest.raises(StoreUnavailable, match="read only"):
            await store.add([new()], now=0)
    finally:
        servers.ask("REPLICAOF", "NO", "ONE")


@pytest.mark.parametrize("deployment", ["sentinel", "cluster"])  # a single server has no replica to change places with
async def test_a_master_and_its_replica_change_places(servers: Servers, open_store: OpensStore) -> None:
    """As for an upgrade: the old master lives on, refuses or redirects, and has connections to it."""
    stores = [await open_store(servers.url) for _ in range(2)]
    async with Load(*stores) as load:
        await load.more(50)
        await asyncio.to_thread(servers.change_places)
        await load.more(50)
    await asyncio.to_thread(servers.await_whole)
    assert (load.early, load.errors) == ([], {}), load.report()
    if servers.deployment == "cluster":  # where the old one stops first; a Sentinel's goes on until it is told
        assert (load.lost, load.again) == (set(), []), load.report()


@contextmanager
def configured(server: RedisServer, line: str) -> Iterator[None]:
    """Add the line to its configuration for a start inside."""
    before = server.configuration.read_text(encoding="utf-8")
    server.configuration.write_text(f"{before}{line}\n", encoding="utf-8")
    try:
        yield
    finally:
        server.configuration.write_text(before, encoding="utf-8")


@pytest.mark.parametrize("deployment", ["single"])  # whoever asks for it waits, wherever it is
async def test_a_server_that_still_loads_its_data(servers: Servers, open_store: OpensStore) -> None:
    """LOADING: it answers, and is not ready yet."""
    [server] = servers.masters
    await asyncio.to_thread(server.forget_history)  # else it loads what other tests did, too
    store = await open_store(servers.url)
    for first in range(0, 2_000, 10):
        await store.add([new(f"{first + number}", due=In(0)) for number in range(10)], now=0)
    await asyncio.to_thread(server.kill)
    try:
        with configured(server, "key-load-delay 1000"):  # so that it takes long; it listens a second apart
            server.launch()
            await asyncio.to_thread(wait_until, lambda: is_loading(server), "it to load", passes=(OSError, Refused))
        adding = asyncio.create_task(store.add([new(f"after-{number}") for number in range(30)], now=0))
        await until(lambda: store._open().clients["add"].resent > 0, "a call to be refused")
        await asyncio.to_thread(server.ask, "CONFIG", "SET", "key-load-delay", 0)
        assert all(answer.ok for answer in await adding)
    finally:
        await asyncio.to_thread(server.await_ready)
    assert (await store.tally()).number() == 2_030


def is_loading(server: RedisServer) -> bool:
    try:
        server.ask("DBSIZE")
    except Refused as refused:
        return "LOADING" in str(refused)
    return False


in_a_cluster = pytest.mark.parametrize("deployment", ["cluster"])  # elsewhere there are no slots


def migrate(source: ClusterNode, target: ClusterNode, slot: int) -> None:
    """Every key that is there now."""
    while keys := source.ask("CLUSTER", "GETKEYSINSLOT", slot, 100):
        assert isinstance(keys, list)
        source.ask("MIGRATE", HOST, target.port, "", 0, 5_000, "KEYS", *(str(key) for key in keys))


@in_a_cluster
async def test_a_slot_moves_to_another_server_under_load(lasting_cluster: RedisCluster, open_store: OpensStore) -> None:
    """ASK, TRYAGAIN while it moves, and MOVED when it has."""
    stores = [await open_store(lasting_cluster.url) for _ in range(2)]
    slots = {slot_of(lasting_cluster, stores[0], shard) for shard in range(4)}
    async with Load(*stores) as load:
        for slot in sorted(slots):
            source = master_of(lasting_cluster, slot)
            target = next(node for node in lasting_cluster.masters if node is not source)
            target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", source.id)
            source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", target.id)
            for _ in range(2):  # until it has moved the load may be held up, so that nothing more of it is waited for
                await pause(0.1, why="calls meet the slot on its way")
                await asyncio.to_thread(migrate, source, target, slot)
            for node in (target, source):
                node.ask("CLUSTER", "SETSLOT", slot, "NODE", target.id)
            await load.more(30)
        await load.more(30)
    went_well(load)


@in_a_cluster
async def test_a_slot_that_nobody_serves_for_a_while(lasting_cluster: RedisCluster, open_store: OpensStore) -> None:
    """CLUSTERDOWN for its tasks, and for those of no other slot."""
    store = await open_store(lasting_cluster.url)
    slot = slot_of(lasting_cluster, store, 0)
    owner = master_of(lasting_cluster, slot)
    async with Load(store) as load:
        await load.more(50)
        for node in lasting_cluster.masters:
            node.ask("CLUSTER", "DELSLOTS", slot)
        await load.noticed()
        owner.ask("CLUSTER", "ADDSLOTS", slot)
        await load.more(50)
    went_well(load)


@in_a_cluster
async def test_servers_that_send_a_call_to_each_other_without_end(
    lasting_cluster: RedisCluster, open_store: OpensStore
) -> None:
    """ASK and MOVED in turn, of a slot on its way to a server that knows nothing of it: `patience` counts here, too."""
    store = await open_store(lasting_cluster.url, patience=1.0)
    slot = slot_of(lasting_cluster, store, store._open().layout.shard_of("t", "k"))
    source = master_of(lasting_cluster, slot)
    target = next(node for node in lasting_cluster.masters if node is not source)
    source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", target.id)
    try:
        async with asyncio.timeout(PATIENCE):
            with pytest.raises(StoreUnavailable, match=r"ASK|MOVED"):
                await store.add([new("k")], now=0)
    finally:
        source.ask("CLUSTER", "SETSLOT", slot, "STABLE")
    assert store._open().clients["add"].resent < 30, "it asks at a measured pace"
    [answer] = await store.add([new("k")], now=0)
    assert answer.ok
