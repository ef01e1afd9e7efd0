"""What another process does is heard of in time, and an idle watcher costs nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from bide.core.errors import BadInput
from bide.core.records import In
from bide.stores.sqlite import SqliteStore
from bide.stores.sqlite.watch import POLL_EVERY, Polling, Tidings, tidings_of
from bide.testing.store_suite.acts import NOW, SECOND, new, put_one, until

WAYS = ["inotify", "poll"] if sys.platform == "linux" else ["poll"]
FAST = {"inotify": 0.020, "poll": 0.060}
"""Seconds until a listener hears of a commit by another process."""
IDLE = {"inotify": 0.5, "poll": 3.0}
"""What an idle watcher may cost, in costs of a thread that wakes as often as one that polls, and does nothing else."""

_PUT = """
import asyncio, sys, time
from bide.stores.sqlite import SqliteStore
from bide.testing.store_suite.acts import new
from bide.core.records import At

async def main():
    store = SqliteStore(sys.argv[1])
    await store.open()
    for number in range(20):
        await asyncio.sleep(0.03)
        began = time.monotonic_ns()
        await store.add([new(str(number), due=At(1000 - number))], now=0)
        print(began, time.monotonic_ns(), 1000 - number, flush=True)
    await store.close()

asyncio.run(main())
"""


@pytest.mark.real_time
@pytest.mark.alone
@pytest.mark.parametrize("way", WAYS)
async def test_a_task_put_by_another_process_is_heard_of_in_time(path: str, way: str) -> None:
    store = SqliteStore(path, watch=way)
    await store.open()
    heard: dict[int, int] = {}

    def hear(topic: str, wake: int) -> None:
        heard.setdefault(wake, time.monotonic_ns())

    listening = await store.listen(["t"], hear)
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", _PUT, path, stdout=subprocess.PIPE)
    out, _ = await process.communicate()
    await until(lambda: 981 in heard, "tidings of the last one")
    delays = []
    for line in out.decode().splitlines():
        _, answered, wake = map(int, line.split())
        # where tidings of this one and the next came together, the later one tells of both
        told = min((moment for told_wake, moment in heard.items() if told_wake <= wake), default=None)
        assert told is not None, f"never heard of {wake}"
        delays.append((told - answered) / 1e9)
    assert len(delays) == 20
    # The median alone: a machine that is busy delays some, and a disk that is makes some commits visible late.
    assert statistics.median(delays) < FAST[way]
    assert max(delays) < 1
    await listening.close()
    await store.close()


class _Bare:
    """What waking as often as a watcher that polls costs here and now: a thread that only asks for the version.

    Of a processor whose hypervisor gives its time to others, an idle thread seems to use three times as much.
    """

    def __init__(self, path: str) -> None:
        self.used = 0.0
        self._path = path
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> _Bare:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        connection = sqlite3.connect(self._path)
        began = time.thread_time()
        while not self._over.is_set():
            time.sleep(POLL_EVERY)
            connection.execute("PRAGMA data_version").fetchone()
            self.used = time.thread_time() - began
        connection.close()


@pytest.mark.real_time
@pytest.mark.alone
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("commits", [0, 300], ids=["from the beginning", "after a busy time"])
async def test_an_idle_watcher_costs_next_to_nothing(path: str, way: str, commits: int) -> None:
    store = SqliteStore(path, watch=way)
    await store.open()
    listening = await store.listen(["t"], lambda topic, wake: None)
    for number in range(commits):
        await put_one(store, new(f"{number}", due=In(SECOND)))
    costs, bare_costs = [], []
    with _Bare(path) as bare:
        await asyncio.sleep(0.5)
        for _ in range(5):
            used, bare_used = time.process_time(), bare.used
            await asyncio.sleep(0.4)
            bare_costs.append(bare.used - bare_used)
            costs.append(time.process_time() - used - bare_costs[-1])
    cost, bare_cost = statistics.median(costs), statistics.median(bare_costs)
    assert cost < IDLE[way] * bare_cost, f"{cost / 0.4:.3%} of a processor, and {bare_cost / 0.4:.3%} for barely waking"
    await listening.close()
    await store.close()


@pytest.mark.parametrize("way", WAYS)
async def test_another_clients_commit_is_told_once_and_ones_own_head_not_again(path: str, way: str) -> None:
    store, other = SqliteStore(path, watch=way), SqliteStore(path)
    await store.open()
    await other.open()
    heard = asyncio.Queue[tuple[str, int]]()
    listening = await store.listen(["t"], lambda topic, wake: heard.put_nowait((topic, wake)))
    await put_one(other, new(due=In(5 * SECOND)))
    assert await asyncio.wait_for(heard.get(), 5) == ("t", NOW + 5 * SECOND)
    await put_one(other, new("later", due=In(9 * SECOND)))
    await put_one(other, new("of another topic", topic="u"))
    await put_one(other, new("sooner", due=In(SECOND)))
    assert await asyncio.wait_for(heard.get(), 5) == ("t", NOW + SECOND), "the head, and nothing but the head"
    await listening.close()
    await other.close()
    await store.close()


async def test_the_watcher_comes_and_goes_with_its_listeners(store: SqliteStore) -> None:
    assert store._database is not None
    assert store._database._watcher is None
    first = await store.listen(["t"], lambda topic, wake: None)
    watcher = store._database._watcher
    assert watcher is not None
    second = await store.listen(["u"], lambda topic, wake: None)
    assert store._database._watcher is watcher
    await first.close()
    assert not watcher._stopping
    await second.close()
    await second.close()
    await asyncio.to_thread(watcher.join)
    heard = asyncio.Event()
    third = await store.listen(["t"], lambda topic, wake: heard.set())
    await put_one(store)
    await asyncio.wait_for(heard.wait(), 5)
    await third.close()


async def test_a_store_may_be_closed_with_somebody_listening(path: str) -> None:
    store = SqliteStore(path)
    await store.open()
    listening = await store.listen(["t"], lambda topic, wake: None)
    await store.close()
    await listening.close()


def test_without_inotify_it_polls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(tidings_of(str(tmp_path / "x-wal"), "poll"), Polling)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert isinstance(tidings_of(str(tmp_path / "x-wal"), "auto"), Polling)
    with pytest.raises(BadInput, match="only Linux"):
        tidings_of(str(tmp_path / "x-wal"), "inotify")


@pytest.mark.skipif(sys.platform != "linux", reason="inotify is Linux's")
def test_the_kernel_tells_of_this_file_alone_also_when_it_is_made_anew(tmp_path: Path) -> None:
    from bide.stores.sqlite.inotify import Inotify

    wal = tmp_path / "tasks.db-wal"
    tidings = Inotify(str(wal))
    assert not tidings.wait(0)
    (tmp_path / "other").write_bytes(b"x")
    assert not tidings.wait(0.01)
    wal.write_bytes(b"x")
    assert tidings.wait(1)
    tidings.drain()
    with wal.open("r+b") as file:
        file.write(b"y")
        file.flush()
        assert tidings.wait(1)
        assert not tidings.wait(0)
    os.unlink(wal)
    tidings.drain()
    wal.write_bytes(b"z")
    assert tidings.wait(1)
    tidings.stop()
    assert not tidings.wait(None)
    tidings.close()


@pytest.mark.skipif(sys.platform != "linux", reason="inotify is Linux's")
def test_when_the_watches_are_used_up_it_polls(tmp_path: Path) -> None:
    nowhere = str(tmp_path / "nowhere" / "tasks.db-wal")
    assert isinstance(tidings_of(nowhere, "auto"), Polling)
    with pytest.raises(OSError, match="No such file"):
        tidings_of(nowhere, "inotify")


@pytest.mark.parametrize("way", WAYS)
async def test_a_watcher_that_is_just_waking_up_can_be_stopped(
    path: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lets go of the descriptors when it knows of the end: not while somebody still writes to them to tell it so."""
    store = SqliteStore(path, watch=way)
    await store.open()
    listening = await store.listen(["t"], lambda topic, wake: None)
    tidings = tidings_of(f"{path}-wal", way)
    kind, stop = type(tidings), type(tidings).stop
    tidings.close()

    def slow_stop(tidings: Tidings) -> None:
        with contextlib.closing(sqlite3.connect(path)) as other, other:
            other.execute("UPDATE bide_token SET last = last + 1")
        time.sleep(0.1)
        stop(tidings)

    monkeypatch.setattr(kind, "stop", slow_stop)
    await listening.close()
    await store.close()
