"""How workers on MySQL and MariaDB notice what others commit: by the position of the redo log."""

from __future__ import annotations

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
from bide.ports import Listening
from bide.stores.mysql.connection import address_of
from bide.stores.mysql.queries import queries_of
from bide.stores.mysql.store import MySqlRuntime
from bide.stores.sql.leasing import POLL, SLACK
from bide.testing.store_suite.base import NOW, lease, new, put_one, record_of
from bide.testing.virtual import VirtualLoop

Work = Callable[[Any], Awaitable[bool]]
A_POLL = POLL / 1000


class Server:
    """Stands for the connection that reads, of a runtime with a listener of the topics "t" and "u"."""

    def __init__(self) -> None:
        self.position: int | None = 5
        """None: the server does not tell it."""
        self.heads: dict[str, int] = {}
        self.fails: Exception | None = None
        self.hangs = False
        self.asked: Counter[str] = Counter()
        self.heard: list[tuple[str, int]] = []
        self.listening: Listening
        self.runtime = MySqlRuntime(address_of("mysql://localhost/bide"), by_server=True, patience=1, silence=1)
        self.runtime.connections["read"] = self

    async def listen(self) -> Listening:
        return await self.runtime.listen(["t", "u"], lambda topic, wake: self.heard.append((topic, wake)))

    async def read(self, work: Work) -> bool:
        self.asked["read"] += 1
        if self.fails is not None:
            raise self.fails
        if self.hangs:
            await forever()
        return await work(SimpleNamespace(ask=self.ask, send=self.send, write=lambda query, **values: values))

    async def ask(self, query: str) -> list[tuple[Any, int]]:
        self.asked[query] += 1
        return [] if self.position is None else [(b"", self.position)]

    async def send(self, *statements: Any) -> list[list[tuple[int]]]:
        self.asked["heads"] += 1
        return [[(self.heads[one["topic"]],)] if one["topic"] in self.heads else [] for one in statements]

    async def close(self) -> None:
        """As the store closes it."""


def watched(test: Callable[[Server], Awaitable[None]]) -> Callable[[], None]:
    async def told(loop: VirtualLoop) -> None:
        server = Server()
        server.listening = await server.listen()
        await test(server)
        await server.runtime.close()

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
    assert server.asked == {"read": 10, "redo": 10}
    assert server.runtime.look_every == SLACK


@watched
async def test_what_becomes_visible_after_it_was_logged_is_noticed(server: Server) -> None:
    await _watches(server)
    server.position = 6
    await elapse(A_POLL)
    assert server.heard == []
    server.heads["t"] = 60
    await elapse(9 * A_POLL)
    assert server.heard == [("t", 60)]
    assert server.asked["heads"] == 2


@watched
async def test_where_something_is_known_to_be_due_nothing_is_asked(server: Server) -> None:
    await _watches(server)
    for server.position in (6, 7):
        server.heads["t"] = 60
        await elapse(5 * A_POLL)
    assert server.heard == [("t", 60)]
    server.position, server.heads = 8, {"u": 60}
    await elapse(5 * A_POLL)
    assert server.heard == [("t", 60), ("u", 60)]
    server.asked.clear()
    await elapse(5 * A_POLL)
    assert not server.asked["redo"], "all of them are due"


@watched
async def test_a_failed_reading_falls_back_to_polling(server: Server) -> None:
    await _watches(server)
    server.fails = StoreUnavailable("away")
    await elapse(10 * A_POLL)
    assert server.runtime.look_every == POLL
    assert server.asked == {"read": 10}, "it is not asked in a tight loop"
    server.fails, server.heads = None, {"u": 80}
    await elapse(A_POLL)
    assert server.runtime.look_every == SLACK
    assert server.heard == [("u", 80)], "what was written meanwhile is noticed"


@watched
async def test_a_slow_reading_falls_back_to_polling(server: Server) -> None:
    await _watches(server)
    server.hangs = True
    await elapse(2 * A_POLL)
    assert server.runtime.look_every == POLL


def test_failures_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "bide.mysql")

    @watched
    async def fails(server: Server) -> None:
        server.fails = StoreUnavailable("away")
        await elapse(10 * A_POLL)

    fails()
    said = "the redo log's position cannot be read, so workers poll: away"
    assert [one.getMessage() for one in caplog.records] == [said]


@watched
async def test_a_server_that_does_not_tell_it_is_asked_once(server: Server) -> None:
    server.position = None
    await elapse(10 * A_POLL)
    assert server.asked["redo"] == 1
    assert server.runtime.look_every == POLL


@watched
async def test_it_runs_while_there_are_listeners(server: Server) -> None:
    await _watches(server)
    await server.listening.close()
    await elapse(10 * A_POLL)
    assert server.asked["read"] <= 1
    assert server.runtime.look_every == POLL
    await server.listen()
    await elapse(A_POLL)
    assert server.runtime.look_every == SLACK


def test_each_kind_of_server_is_asked_by_its_own_name() -> None:
    assert b"'Innodb_lsn_current'" in queries_of("bide", "bide_")["redo"].write()
    assert b"'Innodb_redo_log_current_lsn'" in queries_of("bide", "bide_", mariadb=False)["redo"].write()


@pytest.mark.parametrize("joined", [False, True], ids=["a call", "a transaction of the application"])
async def test_a_commit_of_another_process_is_noticed(url: str, open_store: OpensStore, joined: bool) -> None:
    store, other = await open_store(url, clock="server"), await open_store(url, clock="server")
    unwatched = await lease(store)
    assert unwatched.again_by == unwatched.now + POLL
    heard: list[tuple[str, int]] = []
    listening = await store.listen(["t"], lambda *wake: heard.append(wake))

    async def watches() -> bool:
        leased = await lease(store)
        return leased.again_by == leased.now + SLACK

    await until(watches, "the first reading")
    due: set[tuple[str, int]] = set()

    async def told() -> bool:
        task = new(str(len(due)), due=In(0))
        if joined:
            async with other.transaction() as transaction:
                due.add(("t", record_of((await transaction.add([task], now=NOW))[0]).wake_at))
        else:
            due.add(("t", (await put_one(other, task)).wake_at))
        return bool(heard)

    await until(told, "a notification")
    assert set(heard) <= due
    await listening.close()
    assert (await lease(store)).tasks


async def test_after_a_lease_of_heads_alone_the_next_commit_is_noticed(url: str, open_store: OpensStore) -> None:
    store, other = await open_store(url, clock="server"), await open_store(url, clock="server")
    heard: list[tuple[str, int]] = []
    listening = await store.listen(["t"], lambda *wake: heard.append(wake))
    await put_one(other, new("first", due=In(0)))
    assert len((await lease(store)).tasks) == 1, "all that it wanted, so more may be due"
    assert not (await lease(store, 0)).tasks

    async def told() -> bool:
        await put_one(other, new("second", due=In(0)))
        return "t" in dict(heard)

    heard.clear()
    await until(told, "a notification")
    await listening.close()
