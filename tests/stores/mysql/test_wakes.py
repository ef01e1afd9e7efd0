"""How workers on MySQL and MariaDB notice what others commit: by the position of the redo log."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from tests.stores.sql.fixtures import OpensStore
from tests.waiting import elapse, forever, in_virtual_time, until

from bide.core.errors import StoreUnavailable
from bide.core.instants import In
from bide.core.records import Ref
from bide.stores.listeners import Listeners
from bide.stores.mysql.queries import queries_of
from bide.stores.mysql.wakes import CommitWatch
from bide.stores.sql.leasing import POLL, SLACK
from bide.testing.store_suite.base import HOUR, NOW, add_all, lease, new, see
from bide.testing.virtual import VirtualLoop

Work = Callable[[Any], Awaitable[None]]
A_POLL = POLL / 1000


class Server:
    """Stands for the server, and for the runtime of a store with a listener of the topics "t" and "u"."""

    def __init__(self) -> None:
        self.by_server = True
        self.look_every: int | None = POLL
        self.position: int | None = 5
        """None: the server does not tell it."""
        self.heads = {"t": 70, "u": 90}
        self.fails: Exception | None = None
        self.hangs = False
        self.asked: Counter[str] = Counter()
        self.heard: list[dict[str, int]] = []
        self.listeners = Listeners(logging.getLogger("bide.mysql"))
        self.listener = self.listeners.listen(["t", "u"], lambda topic, wake: None)
        self.connections = {"read": self}
        self.watch = CommitWatch(self)

    def about(self, now: int) -> int:
        return int(asyncio.get_running_loop().time() * 1000)

    def notify(self, wakes: dict[str, int]) -> None:
        if wakes:
            self.heard.append(wakes)

    async def read(self, work: Work) -> None:
        self.asked["read"] += 1
        if self.fails is not None:
            raise self.fails
        if self.hangs:
            await forever()
        await work(SimpleNamespace(ask=self.ask))

    async def ask(self, query: str, **values: Any) -> list[tuple[Any, int]]:
        self.asked[query] += 1
        if query == "next_wakes":
            return [(place, self.heads[topic]) for place, topic in enumerate("tu") if topic in self.heads]
        return [] if self.position is None else [(b"", self.position)]


def watched(test: Callable[[Server], Awaitable[None]]) -> Callable[[], None]:
    async def told(loop: VirtualLoop) -> None:
        server = Server()
        server.watch.start()
        await test(server)
        await server.watch.close()

    return in_virtual_time(told)


async def _watches(server: Server) -> None:
    """In which the watch sees a quiet server."""
    await elapse(10 * A_POLL)
    server.asked.clear()
    server.heard.clear()


@watched
async def test_a_quiet_server_is_asked_one_statement_a_poll(server: Server) -> None:
    await _watches(server)
    await elapse(10 * A_POLL)
    assert server.asked == {"read": 10, "log_position": 10}
    assert server.look_every == SLACK


@watched
async def test_what_becomes_visible_after_it_was_logged_is_noticed(server: Server) -> None:
    await _watches(server)
    server.position = 6
    await elapse(A_POLL)
    assert server.heard == []
    server.heads["t"] = 60
    await elapse(9 * A_POLL)
    assert server.heard == [{"t": 60}]
    assert server.asked["next_wakes"] == 2


@watched
async def test_a_failed_reading_falls_back_to_polling(server: Server) -> None:
    await _watches(server)
    server.fails = StoreUnavailable("away")
    await elapse(10 * A_POLL)
    assert server.look_every == POLL
    assert server.asked == {"read": 10}, "it is not asked in a tight loop"
    server.fails, server.heads = None, {"u": 80}
    await elapse(A_POLL)
    assert server.look_every == SLACK
    assert server.heard == [{"u": 80}], "what was written meanwhile is noticed"


@watched
async def test_a_slow_reading_falls_back_to_polling(server: Server) -> None:
    await _watches(server)
    server.hangs = True
    await elapse(2 * A_POLL + SLACK / 1000)
    assert server.look_every == POLL


def test_failures_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "bide.mysql")

    @watched
    async def fails_twice(server: Server) -> None:
        for _ in range(2):
            server.fails = StoreUnavailable("away")
            await elapse(10 * A_POLL)
            server.fails = None
            await elapse(10 * A_POLL)

    fails_twice()
    assert [one.getMessage() for one in caplog.records] == [
        "the position of the redo log cannot be read, so workers poll: away"
    ] * 2


@watched
async def test_of_a_server_that_does_not_tell_it_is_asked_once(server: Server) -> None:
    server.position = None
    await elapse(10 * A_POLL)
    server.watch.start()
    await elapse(10 * A_POLL)
    assert server.asked == {"read": 1, "log_position": 1}
    assert server.look_every == POLL


@watched
async def test_it_runs_while_there_are_listeners(server: Server) -> None:
    await _watches(server)
    await server.listener.close()
    await elapse(10 * A_POLL)
    assert server.asked["read"] <= 1
    assert server.look_every == POLL
    server.listeners.listen(["t"], lambda topic, wake: None)
    server.watch.start()
    await elapse(A_POLL)
    assert server.look_every == SLACK


def test_each_kind_of_server_is_asked_by_its_own_name() -> None:
    assert b"'Innodb_lsn_current'" in queries_of("bide", "bide_")["log_position"].write()
    assert b"'Innodb_redo_log_current_lsn'" in queries_of("bide", "bide_", mariadb=False)["log_position"].write()


@pytest.mark.parametrize("joined", [False, True], ids=["a call", "a transaction of the application"])
async def test_a_commit_of_another_process_is_noticed(url: str, open_store: OpensStore, joined: bool) -> None:
    store, other = await open_store(url, clock="server"), await open_store(url, clock="server")
    unwatched = await lease(store)
    assert unwatched.again_by == unwatched.now + POLL
    heard: dict[str, int] = {}
    listening = await store.listen(["t", "u"], heard.__setitem__)

    async def watches() -> bool:
        leased = await lease(store)
        return leased.again_by == leased.now + SLACK

    await until(watches, "the first reading")
    tasks = [new("late", due=In(2 * HOUR)), new("early", due=In(HOUR)), new(topic="u", due=In(0)), new(topic="v")]
    if joined:
        async with other.transaction() as transaction:
            await transaction.add(tasks, now=NOW)
    else:
        await add_all(other, tasks, now=NOW)
    await until(lambda: len(heard) == 2, "both topics")
    assert heard["t"] == (await see(store, Ref("t", "early"))).wake_at
    await listening.close()
    assert (await lease(store, topic="u")).tasks
