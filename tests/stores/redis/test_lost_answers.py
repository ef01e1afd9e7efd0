"""Whatever becomes of a call or of its answer on the way: it is done once, and answered right."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from functools import partial

import pytest
from tests.servers.fixtures import StartsRedis
from tests.stores.redis.conftest import OpensStore
from tests.stores.redis.deployments import DEPLOYMENTS, Servers
from tests.stores.redis.proxies import Proxies
from tests.waiting import PATIENCE, not_before, pause, until

from bide.core.errors import OutcomeUnknown, StoreFull, StoreUnavailable
from bide.core.instants import At
from bide.core.records import Cancel, Filter, Move, OnConflict, Record, Ref, Result, State
from bide.stores.clocks import ServerTime
from bide.stores.redis import RedisStore
from bide.stores.redis.script_client import Call, script
from bide.stores.redis.store import LONGEST_PATIENCE
from bide.testing.proxy import Act, Chunk, FaultProxy
from bide.testing.store_suite.base import (
    HOUR,
    MINUTE,
    NOW,
    do,
    done,
    extend,
    keys,
    lease,
    listed,
    look,
    new,
    put,
    put_one,
    retry,
    see,
    settle,
    take,
)
from bide_proofs.servers.process import HOST
from bide_proofs.servers.redis import Connection

Opens = Callable[..., Awaitable[RedisStore]]
Story = Callable[[RedisStore, Callable[[], None]], Awaitable[None]]
"""Prepares, says when the fault is to come, acts, and checks that the act was done once and answered right."""


def asks(kind: str) -> Callable[[bytes], bool]:
    """Whether a chunk carries a call of this kind."""
    shas = [script(kind, flags=flags).sha.encode() for flags in (True, False)]
    return lambda data: any(sha in data for sha in shas)


REF = Ref("t", "k")


async def schedules(store: RedisStore, now_it_fails: Callable[[], None]) -> None:
    now_it_fails()
    [answer] = await store.add([new()], now=NOW)
    assert answer.result is Result.CREATED
    assert answer.record == await look(store, REF)


async def replaces(store: RedisStore, now_it_fails: Callable[[], None]) -> None:
    before = await put_one(store, new(due=At(NOW + HOUR)))
    now_it_fails()
    [answer] = await store.add([new(due=At(NOW + 2 * HOUR))], now=NOW + 1)
    assert (answer.result, answer.was) == (Result.REPLACED, NOW + HOUR), "what was, not what is"
    assert answer.record == await look(store, before)


async def schedules_many(store: RedisStore, now_it_fails: Callable[[], None]) -> None:
    await put(store, *(new(f"{number}") for number in range(0, 200, 4)))
    now_it_fails()
    tasks = [new(f"{number}", on_conflict=OnConflict.KEEP) for number in range(200)]
    answers = await store.add(tasks, now=NOW)
    assert [answer.result for answer in answers] == [
        Result.KEPT if number % 4 == 0 else Result.CREATED for number in range(200)
    ]
    assert [answer.record for answer in answers] == await store.get([Ref("t", task.key) for task in tasks])


async def cancels(store: RedisStore, now_it_fails: Callable[[], None]) -> None:
    await put_one(store)
    now_it_fails()
    answer = await do(store, Cancel("t", "k"))
    assert answer.result is Result.CANCELLED, "and not that it was never there"
    assert await look(store, REF) is None


async def moves(store: RedisStore, now_it_fails: Callable[[], None]) -> None:
    before = await put_one(store)
    now_it_fails()
    answer = await do(store, Move("t", "k", At(NOW + HOUR), if_token=before.token))
    assert (answer.result, answer.was) == (Result.MOVED, NOW), "its own doing has not made its token stale"
    assert answer.record == await see(store, before)


async def leases(store: RedisStore, now_it_fails: Callable[[], None]) -> None:
    await put(store, *(new(f"{number:03}") for number in range(100)))
    now_it_fails()
    leased = await lease(store, 1_000)
    assert sorted(keys(leased.tasks)) == [f"{number:03}" for number in range(100)]
    assert {(task.attempt, task.losses) for task in leased.tasks} == {(1, 0)}, "nothing was leased in vain"
    assert sorted(leased.tasks, key=by_key) == sorted(await listed(store, Filter(state=State.LEASED)), key=by_key)


async def extends(store: RedisStore, now_it_fails: Callable[[], None]) -> None:
    await put_one(store)
    held = await take(store)
    now_it_fails()
    assert await extend(store, held, until=NOW + HOUR)
    assert (await see(store, held)).wake_at == NOW + HOUR


async def settles(store: RedisStore, now_it_fails: Callable[[], None]) -> None:
    await put_one(store)
    held = await take(store)
    now_it_fails()
    assert await settle(store, done(held)), "and not that the lease is gone, which this call itself has ended"
    assert await look(store, held) is None


async def settles_many(store: RedisStore, now_it_fails: Callable[[], None]) -> None:
    await put(store, *(new(f"{number}") for number in range(100)))
    held = (await lease(store, 100)).tasks
    now_it_fails()
    outcomes = [retry(one, At(NOW + HOUR)) if number % 2 else done(one) for number, one in enumerate(held)]
    assert await store.settle(outcomes, now=NOW) == [True] * 100
    left = await listed(store, Filter(topic="t"))
    assert len(left) == 50
    assert {record.failures for record in left} == {1}, "a retry counts once"


async def purges(store: RedisStore, now_it_fails: Callable[[], None]) -> None:
    await put(store, *(new(f"{number}") for number in range(30)))
    held = (await lease(store, 30)).tasks
    assert all(await store.settle([done(one, keep_until=NOW + MINUTE) for one in held], now=NOW))
    now_it_fails()
    assert await store.purge(now=NOW + MINUTE, limit=100) == 30
    assert await listed(store, Filter()) == []


STORIES: list[tuple[str, Story]] = [
    ("add", schedules), ("add", replaces), ("add", schedules_many), ("change", cancels), ("change", moves),
    ("lease", leases), ("extend", extends), ("settle", settles), ("settle", settles_many), ("purge", purges),
]  # fmt: skip
OF_MANY: list[tuple[str, Story]] = [
    ("add", schedules_many), ("lease", leases), ("settle", settles_many), ("purge", purges),
]  # fmt: skip
"""Stories of calls to many shards: where the servers are several, these are what may go otherwise."""


def told(*places: tuple[str, list[tuple[str, Story]]]) -> pytest.MarkDecorator:
    cases = [(deployment, kind, story) for deployment, stories in places for kind, story in stories]
    names = [f"{deployment}-{story.__name__}" for deployment, _, story in cases]
    return pytest.mark.parametrize(("deployment", "kind", "story"), cases, ids=names)


every_story = told(*((deployment, STORIES) for deployment in DEPLOYMENTS))
stories_of_many = told(("single", STORIES), ("sentinel", OF_MANY), ("cluster", OF_MANY))


def by_key(record: Record) -> str:
    return record.key


@every_story
@pytest.mark.parametrize("act", [Act.CUT, Act.LOSE_REPLY], ids=lambda act: act.value)
async def test_a_call_that_meets_a_fault_is_done_once(
    through: Opens, proxies: Proxies, kind: str, story: Story, act: Act
) -> None:
    """Cut before the call arrives; its answer lost."""
    await meets_a_fault(await through(), proxies, kind, story, act)


@stories_of_many
async def test_a_call_on_a_half_open_connection_is_done_once(
    through: Opens, proxies: Proxies, kind: str, story: Story
) -> None:
    """Nothing ever comes."""
    store = await through(silence=1.0)
    store._open().clients["extend"]._patience = LONGEST_PATIENCE  # however slow it is; else it is `silence`
    await meets_a_fault(store, proxies, kind, story, Act.HOLD)


@stories_of_many
async def test_a_call_that_loses_three_answers_in_a_row_is_done_once(
    through: Opens, proxies: Proxies, kind: str, story: Story
) -> None:
    await meets_a_fault(await through(), proxies, kind, story, Act.LOSE_REPLY, times=3)


async def meets_a_fault(
    store: RedisStore, proxies: Proxies, kind: str, story: Story, act: Act, *, times: int = 1
) -> None:
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


@stories_of_many
async def test_slow_is_only_slow(through: Opens, proxies: Proxies, kind: str, story: Story) -> None:
    store = await through()
    await story(store, lambda: proxies.delay(0.02))
    assert all(caller.resent == 0 for caller in store._open().clients.values()), "nothing was given up"


async def test_a_connection_that_falls_silent_is_given_up_after_silence(through: Opens, proxies: Proxies) -> None:
    store = await through(silence=1.0)
    await put_one(store, new("before"))
    proxies.hold()
    loop = asyncio.get_running_loop()
    began = loop.time()
    scheduling = loop.create_task(put_one(store))
    await until(lambda: store._open().clients["add"].resent > 0, "being given up")
    not_before(loop.time(), began + 1.0, "giving it up")
    await proxies.heal()
    await scheduling


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
        store = await open_store(proxies.url, query="&wait_replicas=1")
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


async def test_a_cancelled_call_leaves_no_trace_in_the_next(through: Opens, proxies: Proxies) -> None:
    """The next call of the same kind gets its own answer, and not that of the one that nobody waits for any more."""
    store = await through()
    for number in range(30):
        call = asyncio.create_task(put(store, *(new(f"{number}-{key}") for key in range(20))))
        for _ in range(4 * (number % 8)):
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        record = await put_one(store, new(f"after-{number}", payload=f"{number}".encode()))
        assert record == await see(store, record)


async def test_a_call_that_is_cancelled_beside_a_lost_connection_gives_its_turns_back(
    through: Opens, proxies: Proxies
) -> None:
    """At whichever step after the loss: the next call to those shards has its turn, and is answered."""
    store = await through()
    nodes, turns = store._open().topology, store._open().clients["add"]._turns
    proxies.delay(0.02)
    for steps in range(12):
        await put(store, *(new(f"{key}") for key in range(40)))
        call = asyncio.create_task(put(store, *(new(f"{key}") for key in range(40))))
        await until(lambda: any(turn.locked() for turn in turns), "the call to be on its way")
        drops = [asyncio.create_task(link.drop("lost by the test")) for link in await nodes.masters()]
        for _ in range(steps):
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(call, *drops, return_exceptions=True)
        await until(
            lambda: not any(turn.locked() for turn in turns), f"every turn, cancelled {steps} steps after the loss"
        )


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
