"""`bide demo` (`bide serve --demo`): the service, with a town's live traffic; in real time, and in virtual."""

from __future__ import annotations

import logging
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import CommandLine
from tests.waiting import elapse, wait_until

from bide import Bide, StoreUnavailable
from bide.cli.demo.ahead import AUDIENCE, GUESTS, SUMMER
from bide.cli.demo.orders import SALE, is_paid
from bide.cli.demo.town import Town, uneventful
from bide.cli.exits import Exit
from bide.core.records import State
from bide.stores.memory import MemoryStore
from bide.testing.faults import FaultyStore
from bide.testing.virtual import VirtualClock, VirtualLoop, run_virtual

AT_ONCE = {
    "order.remind", "order.close", "payment.notify", "post.publish", "coupon.remind", "subscription.renew",
    "event.remind",
}  # fmt: skip


class Shown:
    """A running `bide demo`, and what it has said first."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert process.stdout is not None
        self.said = ""
        while "event-summer" not in self.said:
            line = process.stdout.readline()
            assert line, f"it ended: {process.communicate()}"
            self.said += line
        [self.url] = re.findall(r"^The console is at (http://127\.0\.0\.1:\d+)$", self.said, re.MULTILINE)

    def page(self, path: str) -> tuple[int, str]:
        with urllib.request.urlopen(self.url + path, timeout=60) as reply:
            return reply.status, reply.read().decode()

    def interrupt(self) -> tuple[int, str]:
        """Ctrl-C: the exit code, and what was on stderr."""
        self.process.send_signal(signal.SIGINT)
        _, complaints = self.process.communicate(timeout=60)
        return self.process.returncode, complaints


@contextmanager
def shown(*options: str) -> Iterator[Shown]:
    command = [sys.executable, "-m", "bide", "demo", "--port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield Shown(process)
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def asked(path: Path, query: str) -> list[Any]:
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=60)) as connection:
        return connection.execute(query).fetchall()


def test_it_serves_delivers_ends_and_goes_on(line: CommandLine) -> None:
    path = line.directory / "bide-console-demo.db"

    def waits(topic: str) -> int:
        [(number,)] = asked(path, f"SELECT count(*) FROM bide_task WHERE topic = '{topic}' AND state = 0")
        return int(number)

    with shown() as first:
        assert first.page("/readyz")[0] == 200
        assert first.page("/")[0] == 200
        wait_until(lambda: waits("coupon.remind") == AUDIENCE, "a reminder for each of the audience")
        wait_until(lambda: waits("event.remind") >= GUESTS, "one for each guest")
        topics = "SELECT DISTINCT topic FROM bide_task"
        wait_until(lambda: {topic for (topic,) in asked(path, topics)} >= AT_ONCE, "all that begins at once")
        delivered = "SELECT count(*) FROM bide_task WHERE topic = 'payment.notify' AND state = 2"
        wait_until(lambda: asked(path, delivered)[0][0], "a delivery")
        assert first.page("/healthz")[0] == 200
        assert first.interrupt() == (0, "")

    orders = "SELECT max(CAST(key AS INTEGER)) FROM bide_task WHERE topic = 'order.close'"
    [(before,)] = asked(path, orders)
    with shown() as second:
        wait_until(lambda: asked(path, orders)[0][0] > before, "another order")
        assert waits("coupon.remind") == AUDIENCE
        assert second.interrupt() == (0, "")


def test_a_port_that_is_taken(line: CommandLine) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = line.error("serve", "--demo", "--port", str(port), code=Exit.SETUP)
    assert f"--port {port}: cannot listen there" in said
    assert "or --port 0 for any that is free" in said
    assert [file.name for file in line.directory.glob("*.db")] == ["tasks.db"]


def test_a_store_of_others_is_left_alone(line: CommandLine) -> None:
    line.run("schedule", "order.close", "--key", "theirs", "--delay", "0s")
    said = line.error("serve", "--demo", "--port", "0", "--store", line.url)
    assert said.startswith("bide: --store: ")
    assert "this one holds order.close" in said
    assert line.one("show", "order.close", "theirs")["task"]["state"] == "waiting"


# --- in virtual time


def in_town(
    story: Callable[[Town, Bide, VirtualLoop], Awaitable[None]], said: list[str], store: Any = None, **settings: Any
) -> None:
    """Play `story` in a town on a store in memory, its handlers at work."""

    async def play(loop: VirtualLoop) -> None:
        app = Bide(MemoryStore() if store is None else store, clock=VirtualClock(loop), **settings)
        town = Town(app, shown_store="memory:", say=said.append)
        await town.prepare()
        async with app, app.worker(), town.running("http://here"):
            await story(town, app, loop)

    run_virtual(play)


def test_six_minutes() -> None:
    said: list[str] = []

    async def story(town: Town, app: Bide, loop: VirtualLoop) -> None:
        last, ends = town.orders.last_of_the_sale, town.orders.sale_ends
        assert 50_000 < ends - app.clock.now() <= 66_000
        assert ends % 10_000 == 0
        await town.orders.until(ends + 10_000)

        # the first question: why was this order closed late
        closed = await app.get("order.close", str(last))
        assert closed is not None
        assert closed.state is State.DONE
        assert closed.record.due_at == ends
        assert closed.record.started_at is not None
        assert 800 <= closed.record.started_at - ends <= 3_000
        paid = next(number for number in range(last, 0, -1) if is_paid(number))
        cancelled = await app.get("order.close", str(paid))
        assert cancelled is not None
        assert cancelled.state is State.CANCELLED
        assert [event.who for event in await app.events("order.close", str(paid))] == ["shop"]

        await town.orders.until(ends + 300_000)  # the second sale
        counts = await app.tally()
        assert counts.number("coupon.remind") >= AUDIENCE - 10
        assert counts.number("order.archive") > 100
        assert counts.number("subscription.renew", State.WAITING) == 20_000
        assert 0 < counts.number("payment.notify", State.DEAD) < 100
        party = [task async for task in app.find(group=SUMMER)]
        assert len(party) == GUESTS
        assert len({task.due_at for task in party}) == 1

        errors = Counter([task.error async for task in app.find(topic="payment.notify", state="dead")])
        assert len(errors) == 3
        assert any("no outcome within 0.5 s" in str(error) for error in errors)
        who = {event.who for event in await app.events(limit=10_000)}
        assert {"shop", "anna", "bo"} <= who

    in_town(story, said, keep_done="1h", keep_cancelled="15m")
    opening, *minutes = said
    assert "http://here/tasks?group=event-summer" in opening
    assert re.search(r"http://here/tasks/order\.close/\d+", opening)
    assert max(map(len, opening.splitlines())) <= 110
    assert 5 <= len(minutes) <= 7
    assert any(re.fullmatch(r"\d\d:\d\d  [\d,]+ delivered, .* \(order\.close\)", one) for one in minutes)


def test_the_next_run_knows_the_customers_of_the_last() -> None:
    said: list[str] = []

    async def play(loop: VirtualLoop) -> None:
        store = MemoryStore()
        numbers, ends = range(0), 0
        for run in range(2):
            app = Bide(store, clock=VirtualClock(loop), keep_cancelled="15m", keep_done="1h")
            town = Town(app, shown_store="memory:", say=said.append)
            await town.prepare()
            async with app, app.worker(), town.running("http://here"):
                if run == 0:
                    numbers, ends = town.orders.sale, town.orders.sale_ends
                    await town.orders.until(ends - 38_000)  # all have ordered, few have paid
                    ordered = await states(app, numbers)
                    assert ordered.total() == SALE
                    assert ordered[State.WAITING] > SALE * 2 // 3
                    continue
                assert not set(numbers) & set(town.orders.sale)
                await town.orders.until(ends + 5_000)
                assert await states(app, numbers) == {State.CANCELLED: 2 * SALE // 3, State.DONE: SALE // 3}
                assert (await app.tally()).number("coupon.remind") == AUDIENCE
            await elapse(2)

    async def states(app: Bide, numbers: range) -> Counter[State]:
        found = await app.get_many([("order.close", str(number)) for number in numbers])
        return Counter(one.state for one in found if one is not None)

    run_virtual(play)


def test_a_store_that_is_away_for_a_while(caplog: pytest.LogCaptureFixture) -> None:
    said: list[str] = []
    away = False
    store = FaultyStore(MemoryStore(), fault=lambda _: StoreUnavailable("it is away") if away else None)

    async def story(town: Town, app: Bide, loop: VirtualLoop) -> None:
        nonlocal away
        await elapse(5)
        away = True
        await elapse(30)
        away = False
        before = (await app.tally()).number("order.close")
        await elapse(20)
        assert (await app.tally()).number("order.close") > before + 20
        assert (await app.tally()).number("coupon.remind") == AUDIENCE

    in_town(story, said, store)
    told = [record.getMessage() for record in caplog.records if record.name == "bide.demo"]
    assert "in the demo orders cannot go on: it is away" in told
    assert len(told) == len(set(told)), "each story says so once"
    assert not [one for one in told if "defect" in one]


def test_what_the_terminal_need_not_tell() -> None:
    def is_told(name: str, *args: object) -> bool:
        return uneventful(logging.LogRecord(name, logging.WARNING, "", 0, "%s/%s failed", args, None))

    assert not is_told("bide.worker", "payment.notify", "1")
    assert is_told("bide.worker", "order.close", "1")
    assert not is_told("bide.audit", "anna", "1")
    assert uneventful(logging.LogRecord("bide.worker", logging.ERROR, "", 0, "a defect", None, None))
