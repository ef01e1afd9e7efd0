"""What another client does is heard of, and an idle watcher costs nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import block, until

from bide.core.errors import BadInput
from bide.core.instants import In
from bide.stores.sqlite import SqliteStore
from bide.stores.sqlite.watch import Polling, signal_of
from bide.testing.store_suite.base import NOW, SECOND, new, put_one

WAYS = ["inotify", "poll"] if sys.platform == "linux" else ["poll"]


@pytest.mark.skipif(sys.platform != "linux", reason="inotify is Linux's")
@pytest.mark.parametrize("commits", [0, 300], ids=["from the beginning", "after a busy time"])
async def test_an_idle_watcher_waits_for_the_kernel_alone(
    path: str, commits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bide.stores.sqlite.watch import Inotify

    waits, wait = list[float | None](), Inotify.wait

    def note(signal: Inotify, timeout: float | None) -> bool:
        waits.append(timeout)
        return wait(signal, timeout)

    monkeypatch.setattr(Inotify, "wait", note)
    store = SqliteStore(path, watch="inotify")
    await store.open()
    listening = await store.listen(["t"], lambda topic, wake: None)
    for number in range(commits):
        await put_one(store, new(f"{number}", due=In(SECOND)))
    await until(lambda: waits[-1:] == [None], "a wait without an end")
    await listening.close()
    await store.close()


@pytest.mark.parametrize("way", WAYS)
async def test_another_clients_commit_is_told_once_and_ones_own_head_not_again(path: str, way: str) -> None:
    store, other = SqliteStore(path, watch=way), SqliteStore(path)
    await store.open()
    await other.open()
    heard: list[tuple[str, int]] = []
    listening = await store.listen(["t"], lambda topic, wake: heard.append((topic, wake)))
    await put_one(other, new(due=In(50 * SECOND)))
    await until(lambda: heard == [("t", NOW + 50 * SECOND)], "the first task")
    await put_one(other, new("later", due=In(90 * SECOND)))
    await put_one(other, new("of another topic", topic="u"))
    for sooner in range(20):
        await put_one(other, new(f"{sooner}", due=In((20 - sooner) * SECOND)))
        await until(lambda: len(heard) == sooner + 2, "the next head")  # noqa: B023
    assert heard[1:] == [("t", NOW + (20 - sooner) * SECOND) for sooner in range(20)], "the heads, and nothing else"
    await listening.close()
    await other.close()
    await store.close()


async def test_the_watcher_comes_and_goes_with_its_listeners(store: SqliteStore) -> None:
    assert store._open().notifier._watcher is None
    first = await store.listen(["t"], lambda topic, wake: None)
    watcher = store._open().notifier._watcher
    assert watcher is not None
    second = await store.listen(["u"], lambda topic, wake: None)
    assert store._open().notifier._watcher is watcher
    await first.close()
    assert not watcher._stopping
    await second.close()
    await second.close()
    await asyncio.to_thread(watcher.join)
    heard = asyncio.Event()
    third = await store.listen(["t"], lambda topic, wake: heard.set())
    await put_one(store)
    await until(heard.is_set, "the task")
    await third.close()


async def test_a_store_may_be_closed_with_somebody_listening(path: str) -> None:
    store = SqliteStore(path)
    await store.open()
    listening = await store.listen(["t"], lambda topic, wake: None)
    await store.close()
    await listening.close()


def test_without_inotify_it_polls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(signal_of(str(tmp_path / "x-wal"), "poll"), Polling)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert isinstance(signal_of(str(tmp_path / "x-wal"), "auto"), Polling)
    with pytest.raises(BadInput, match="only Linux"):
        signal_of(str(tmp_path / "x-wal"), "inotify")


@pytest.mark.skipif(sys.platform != "linux", reason="inotify is Linux's")
def test_the_kernel_tells_of_this_file_alone_also_when_it_is_made_anew(tmp_path: Path) -> None:
    from bide.stores.sqlite.watch import Inotify

    wal = tmp_path / "tasks.db-wal"
    signal = Inotify(str(wal))
    assert not signal.wait(0)
    (tmp_path / "other").write_bytes(b"x")
    assert not signal.wait(0.01)
    wal.write_bytes(b"x")
    assert signal.wait(1)
    signal.drain()
    with wal.open("r+b") as file:
        file.write(b"y")
        file.flush()
        assert signal.wait(1)
        assert not signal.wait(0)
    os.unlink(wal)
    signal.drain()
    wal.write_bytes(b"z")
    assert signal.wait(1)
    signal.stop()
    assert not signal.wait(None)
    signal.close()


@pytest.mark.skipif(sys.platform != "linux", reason="inotify is Linux's")
def test_when_the_watches_are_used_up_it_polls(tmp_path: Path) -> None:
    nowhere = str(tmp_path / "nowhere" / "tasks.db-wal")
    assert isinstance(signal_of(nowhere, "auto"), Polling)
    with pytest.raises(OSError, match="No such file"):
        signal_of(nowhere, "inotify")


@pytest.mark.parametrize("way", WAYS)
async def test_a_watcher_that_is_just_waking_up_can_be_stopped(
    path: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lets go of the descriptors when it knows of the end: not while somebody still writes to them to tell it so."""
    store = SqliteStore(path, watch=way)
    await store.open()
    listening = await store.listen(["t"], lambda topic, wake: None)
    signal = signal_of(f"{path}-wal", way)
    kind, stop = type(signal), type(signal).stop
    signal.close()

    def slow_stop(signal: Any) -> None:
        with contextlib.closing(sqlite3.connect(path)) as other, other:
            other.execute("UPDATE bide_token SET last = last + 1")
        block(0.1, why="the thread gets to know of the end meanwhile")
        stop(signal)

    monkeypatch.setattr(kind, "stop", slow_stop)
    await listening.close()
    await store.close()
