"""The thread that notices what other processes commit, and tells this one's listeners.

A commit shows in two ways: the kernel tells that the WAL was written to (where it can), and `PRAGMA data_version`
changes once the commit is visible. The first comes up to a disk flush before the second, so after each of the kernel's
tidings the version is looked at again and again, at growing distances. The version is read on the *writer's* own
connection: there it changes for commits by others alone, so that our own commits, which also wake this thread, cost one
look and no more. Only when others have committed are the heads of the topics read, and told where they differ.

While nothing is written this thread sleeps: with inotify for ever, else 54 ms at a time (0.2 % of a processor).
"""

from __future__ import annotations

import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from bide.core.errors import BadInput
from bide.core.instants import Millis
from bide.core.records import Token, Topic
from bide.stores.sqlite.connection import connect
from bide.stores.sqlite.listening import Listeners
from bide.stores.sqlite.queries import QUERIES

POLL_EVERY = 0.054
"""Seconds: a listener is to hear within 60 ms, and half of what polling costs is waking up."""
AGAIN_AFTER = (0.0003, 0.0006, 0.0012, 0.0025, 0.005, 0.010, 0.020, 0.040)
"""Seconds between looks after tidings: most commits are visible within a millisecond, a slow disk takes forty."""
TOGETHER = 0.0005
"""Seconds that a look costs, in the long run: a busy file is looked at 2,000 times a second at most."""
_AT_ONCE = 8.0
"""Looks that may follow each other without such a pause: one commit comes as several tidings."""

_HEADS = (QUERIES["waiting_head"], QUERIES["leased_head"])


class Tidings(Protocol):
    """What wakes the watcher."""

    def wait(self, timeout: float | None) -> bool: ...
    def drain(self) -> bool: ...
    def stop(self) -> None: ...
    def close(self) -> None: ...


class Polling:
    """Tidings every 54 ms, whether or not there are any."""

    def __init__(self) -> None:
        self._stop = threading.Lock()  # waiting for one with a time limit costs half of what an Event does
        self._stop.acquire()

    def wait(self, timeout: float | None) -> bool:
        self._stop.acquire(timeout=POLL_EVERY)
        return True

    def drain(self) -> bool:
        return False

    def stop(self) -> None:
        self._stop.release()

    def close(self) -> None:
        """Nothing to let go of."""


def tidings_of(wal: str, watch: str) -> Tidings:
    """The kind that `watch` asks for. Raises BadInput for one that this system has not."""
    if watch == "poll" or (watch == "auto" and sys.platform != "linux"):
        return Polling()
    if sys.platform != "linux":
        raise BadInput("watch", watch, '"poll" or "auto": only Linux has inotify')
    from bide.stores.sqlite.inotify import Inotify

    try:
        return Inotify(wal)
    except OSError:
        if watch == "inotify":
            raise
        return Polling()  # the user's share of watches is used up


class Watcher:
    """Watches one file for as long as somebody listens. `stop`, then `join`."""

    def __init__(self, path: str, watch: str, listeners: Listeners, foreign_version: Callable[[], int | None]) -> None:
        self._path = path
        self._listeners = listeners
        self._foreign_version = foreign_version
        self._tidings = tidings_of(f"{path}-wal", watch)
        self._again: Sequence[float] = () if isinstance(self._tidings, Polling) else AGAIN_AFTER
        self._stopping = False
        self._version: int | None = None
        """What was last seen. None: the first look tells all heads, since something may have come before it."""
        self._told: dict[Topic, tuple[Millis, Token]] = {}
        self._thread = threading.Thread(target=self._run, name=f"bide watcher of {path}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        if not self._stopping:
            self._tidings.stop()  # first: once the thread knows, it lets go of what this writes to
            self._stopping = True

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        connection = connect(self._path, cache_kib=256)
        try:
            connection.execute("PRAGMA query_only = ON")
            self._watch(connection.cursor())
        finally:
            connection.close()
            self._tidings.close()

    def _watch(self, cursor: sqlite3.Cursor) -> None:
        step, looked, credit = 0, time.monotonic(), _AT_ONCE
        self._look(cursor)
        while True:
            moved = self._tidings.wait(self._again[step] if step < len(self._again) else None)
            if self._stopping:
                return
            step = 0 if moved else step + 1
            now = time.monotonic()
            credit = min(_AT_ONCE, credit + (now - looked) / TOGETHER)
            looked = now
            if credit < 1.0:
                time.sleep(TOGETHER)
                # only what is new begins the looks anew: else a busy file would be looked at for ever afterwards
                if self._tidings.drain():
                    step = 0
            credit -= 1.0
            if not self._look(cursor):
                step = max(0, min(step, len(self._again) - 1))

    def _look(self, cursor: sqlite3.Cursor) -> bool:
        """Tell what others have committed; false when that cannot be seen just now, being written to by us."""
        try:
            version = self._foreign_version()
            if version is None:
                return False
            if version != self._version:
                self._tell(cursor)
                self._version = version
                self._listeners.committed()
        except sqlite3.Error:
            # Whoever reads or writes meets the same error and is told; tidings may be lost.
            return True
        return True

    def _tell(self, cursor: sqlite3.Cursor) -> None:
        """Tell the head of each topic that is not the one that was told last.

        Which one it is, its token says: another task may have come with the very same wake.
        """
        wakes: dict[Topic, Millis] = {}
        for topic in self._listeners.topics():
            heads = [head for query in _HEADS if (head := cursor.execute(query, (topic,)).fetchone()) is not None]
            if not heads:
                self._told.pop(topic, None)
                continue
            head = min(heads)
            if head != self._told.get(topic):
                self._told[topic] = head
                wakes[topic] = head[0]
        if wakes:
            self._listeners.tell(wakes)
