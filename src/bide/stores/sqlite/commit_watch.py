"""Notifies waiting workers of earlier wakes, whichever process committed them.

The writer notifies of this process's own commits. A thread, the `Watcher`, detects commits by other connections. A
commit shows in two ways: the kernel signals a write to the WAL (if it can), and `PRAGMA data_version` changes once the
commit is visible. The signal comes up to a disk flush earlier, so after each signal the watcher reads the version
repeatedly, at growing intervals; once it has seen a commit it skips the shortest ones. It reads the version on the
*writer's* connection, where it only changes for commits by other connections. So this process's own commits, which also
wake the thread, cost a single check. After a commit by another connection the watcher reads the wakes that were noted
since: each writer notes a wake that comes before all others of its topic. So a commit costs the same however many
topics are listened to. Only if notes are missing, because the watcher has just begun or was too slow, does it read the
heads of all topics.

While nothing is written the thread sleeps: indefinitely with inotify, else 54 ms at a time (0.2 % of a processor).
"""

from __future__ import annotations

import asyncio
import os
import random
import select
import sqlite3
import struct
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress

from msgspec import Struct, field

from bide.core.errors import BadInput
from bide.core.instants import NEVER, Millis
from bide.core.records import Topic
from bide.ports import OnTaken, OnWake
from bide.stores.batches import Drained, earliest
from bide.stores.sqlite.connection import WriteLock, connect
from bide.stores.sqlite.rows import QUERIES, heads

POLL_EVERY = 0.054
"""Seconds between polls: a listener must be notified within 60 ms, and waking up is half the cost of a poll."""
AGAIN_AFTER = (0.0003, 0.0006, 0.0012, 0.0025, 0.005, 0.010, 0.020, 0.040)
"""Seconds between checks after a signal: most commits are visible within 1 ms, on a slow disk within 40 ms."""
PAUSE = 0.0005
"""The average seconds between checks of a busy file, which is checked at most 2,000 times a second."""
_AT_ONCE = 8.0
"""The number of checks allowed without such a pause, because one commit sends several signals."""

_NOTHING: Mapping[Topic, Drained] = {}
COMMITTED: Topic = ""
"""A pseudo-topic (no topic has this name): another connection has committed something."""


class Listener(Struct, eq=False):
    """One subscription, called on the event loop that made it, until it is closed."""

    topics: frozenset[Topic]
    on_wake: OnWake
    on_taken: OnTaken | None
    closed: Callable[[Listener], None]
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _open: bool = True

    async def close(self) -> None:
        self.end()

    def end(self) -> None:
        self._open = False
        self.closed(self)

    def post(self, wakes: Mapping[Topic, Millis], taken: Mapping[Topic, Drained]) -> None:
        """Notify the listener of the leases and then of these wakes, from any thread, by one call into its loop."""
        try:
            self._loop.call_soon_threadsafe(self._hear, wakes, taken)
        except RuntimeError:  # the loop was closed, but this listener was not
            self.closed(self)

    def _hear(self, wakes: Mapping[Topic, Millis], taken: Mapping[Topic, Drained]) -> None:
        for topic, (by, head) in taken.items():
            if self._open and topic in self.topics and self.on_taken is not None:
                self.on_taken(topic, by, head, "")
        for topic, wake_at in wakes.items():
            if self._open and topic in self.topics:
                self.on_wake(topic, wake_at)


class Notifier(Struct, eq=False):
    """All subscriptions of a store, and a watcher while there are any."""

    path: str
    how: str
    """One of "inotify", "poll" and "auto"."""
    connection: sqlite3.Connection
    """The writer's, only used while holding `lock`."""
    lock: WriteLock
    number: int = field(default_factory=lambda: random.getrandbits(62) + 1)
    """The number of this process as a writer of wakes."""
    others: bool = False
    """True if there were several live workers when the last one of this process announced itself."""
    listeners: tuple[Listener, ...] = ()
    """Replaced, never mutated, so that `notify` needs no lock."""
    _changing: threading.Lock = field(default_factory=threading.Lock)
    _watcher: Watcher | None = None
    _ended: list[Watcher] = []

    def listen(self, topics: Collection[Topic], on_wake: OnWake, on_taken: OnTaken | None = None) -> Listener:
        """Call `on_wake`, on the running loop, when one of `topics` wakes earlier; see `ports.Notifies`."""
        listener = Listener(frozenset(topics), on_wake, on_taken, self._remove)
        with self._changing:
            self.listeners = (*self.listeners, listener)
            if self._watcher is None:
                self._watcher = Watcher(self)
        return listener

    def on_commit(self, committed: Callable[[], None]) -> Listener:
        """Call `committed`, on the running loop, after each commit by another connection, whatever it changed."""
        return self.listen((COMMITTED,), lambda topic, wake: committed())

    def _remove(self, listener: Listener) -> None:
        with self._changing:
            self.listeners = tuple(one for one in self.listeners if one is not listener)
            if not self.listeners:
                self._end_watcher()

    def _end_watcher(self) -> None:
        if self._watcher is not None:
            self._watcher.stop()
            self._ended = [one for one in self._ended if one.thread.is_alive()]
            self._ended.append(self._watcher)
            self._watcher = None

    def close(self) -> None:
        """End the watcher. Blocks."""
        with self._changing:
            self._end_watcher()
            ended, self._ended = self._ended, []
        for watcher in ended:
            watcher.thread.join()

    def topics(self) -> set[Topic]:
        """The topics that have a listener."""
        return set[Topic]().union(*(listener.topics for listener in self.listeners)) - {COMMITTED}

    def notify(self, wakes: Mapping[Topic, Millis], taken: Mapping[Topic, Drained] = _NOTHING) -> None:
        """Notify the listeners of what other processes took, and of each topic's earliest wake, from any thread."""
        for listener in self.listeners:
            if not (listener.topics.isdisjoint(wakes) and listener.topics.isdisjoint(taken)):
                listener.post(wakes, taken)

    def foreign_version(self) -> int | None:
        """A number that changes when another connection commits; None while this process is writing."""
        if not self.lock.try_acquire():
            return None
        try:
            version: int = self.connection.execute("PRAGMA data_version").fetchone()[0]
            return version
        finally:
            self.lock.release()


class Polling:
    """A signal every 54 ms, whether or not the file was written to."""

    def __init__(self) -> None:
        self._stop = threading.Lock()  # a timed wait costs half as much as that of an Event
        self._stop.acquire()

    def wait(self, timeout: float | None) -> bool:
        self._stop.acquire(timeout=POLL_EVERY)
        return True

    def drain(self) -> bool:
        return False

    def stop(self) -> None:
        self._stop.release()

    def close(self) -> None:
        """There is nothing to close."""


class Inotify:
    """The Linux kernel's signal that a file was written to, even after the file was deleted and created again.

    Raises OSError if the kernel has no more watches.
    """

    MODIFY, MOVED_TO, CREATE = 0x2, 0x80, 0x100
    HEAD = struct.Struct("iIII")  # watch, mask, cookie, length of the name that follows
    FINE = 0.005
    """Timeouts below this many seconds use `select`, which counts microseconds; `poll` rounds up to 1 ms."""
    SELECTABLE = 1024
    """`select` only takes descriptors below this number."""

    def __init__(self, path: str) -> None:
        import ctypes  # here, because a program that only schedules does not need it

        self._path = os.fsencode(path)
        self._name = os.path.basename(self._path)
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._errno = ctypes.get_errno
        self._queue = self._checked(self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        self._stop_read, self._stop_write = os.pipe2(os.O_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._queue, select.POLLIN)
        self._poll.register(self._stop_read, select.POLLIN)
        try:
            # The folder signals that the file was created again, which cannot happen while a store is open.
            self._folder = self._watch(os.path.dirname(self._path), self.CREATE | self.MOVED_TO)
            self._watch_file()
        except OSError:
            self.close()
            raise

    def wait(self, timeout: float | None) -> bool:
        """Block until the file is written to (true), the timeout in seconds passes, or `stop` is called."""
        if timeout is not None and timeout < self.FINE and max(self._queue, self._stop_read) < self.SELECTABLE:
            signalled = self._queue in select.select((self._queue, self._stop_read), (), (), max(timeout, 0.0))[0]
        else:
            ready = self._poll.poll(None if timeout is None else timeout * 1000.0)
            signalled = any(descriptor == self._queue for descriptor, _ in ready)
        return signalled and self.drain()

    def drain(self) -> bool:
        """Read the kernel's events; return true if one was about the file."""
        try:
            events = os.read(self._queue, 65_536)
        except BlockingIOError:
            return False
        ours = False
        position = 0
        while position < len(events):
            watch, _, _, length = self.HEAD.unpack_from(events, position)
            position += self.HEAD.size + length
            if watch != self._folder:
                ours = True
            elif events[position - length : position].rstrip(b"\0") == self._name:
                self._watch_file()
                ours = True
        return ours

    def stop(self) -> None:
        """Make `wait` return, from any thread."""
        os.write(self._stop_write, b"x")

    def close(self) -> None:
        for descriptor in (self._queue, self._stop_read, self._stop_write):
            os.close(descriptor)

    def _watch_file(self) -> None:
        with suppress(FileNotFoundError):
            self._watch(self._path, self.MODIFY)

    def _watch(self, path: bytes, mask: int) -> int:
        return self._checked(self._libc.inotify_add_watch(self._queue, path, mask))

    def _checked(self, answer: int) -> int:
        if answer < 0:
            number = self._errno()
            raise OSError(number, os.strerror(number))
        return answer


def signal_of(wal: str, how: str) -> Polling | Inotify:
    """The signal that `how` selects. Raises BadInput if this system does not have it."""
    if how == "poll" or (how == "auto" and sys.platform != "linux"):
        return Polling()
    if sys.platform != "linux":
        raise BadInput("watch", how, '"poll" or "auto": only Linux has inotify')
    try:
        return Inotify(wal)
    except OSError:
        if how == "inotify":
            raise
        return Polling()  # the user's inotify watches are used up


class Watcher:
    """The thread that watches one file while there are listeners, until `stop`."""

    def __init__(self, notifier: Notifier) -> None:
        self._notifier = notifier
        self._signal = signal_of(f"{notifier.path}-wal", notifier.how)
        self._again: Sequence[float] = () if isinstance(self._signal, Polling) else AGAIN_AFTER
        self._stopping = False
        self._version: int | None = None
        """The last version seen; None at first."""
        self._line = -1
        """The last note read; -1 at first, so that the first check notifies of all heads: some may be new."""
        self._guard = threading.Lock()
        self.thread = threading.Thread(target=self._run, name=f"bide watcher of {notifier.path}", daemon=True)
        self.thread.start()

    def stop(self) -> None:
        if not self._stopping:
            self._signal.stop()  # before the flag: once the thread sees the flag, it closes what `stop` writes to
            self._stopping = True

    def _run(self) -> None:
        with self._guard:
            connection = connect(self._notifier.path, cache_kib=256, guard=self._guard)
            connection.execute("PRAGMA query_only = ON")
        try:
            self._watch(connection.cursor())
        finally:
            connection.close()
            self._signal.close()

    def _watch(self, cursor: sqlite3.Cursor) -> None:
        step, checked, credit = 0, time.monotonic(), _AT_ONCE
        self._check(cursor)
        while True:
            moved = self._signal.wait(self._again[step] if step < len(self._again) else None)
            if self._stopping:
                return
            step = 0 if moved else step + 1
            now = time.monotonic()
            credit = min(_AT_ONCE, credit + (now - checked) / PAUSE)
            checked = now
            if credit < 1.0:
                time.sleep(PAUSE)
                # only a new signal restarts the checks, otherwise a busy file would be checked endlessly
                if self._signal.drain():
                    step = 0
            credit -= 1.0
            before = self._version
            if not self._check(cursor):
                step = max(0, min(step, len(self._again) - 1))
            elif self._version != before:  # rarely has another commit signalled already
                step = max(step, len(self._again) // 2)

    def _check(self, cursor: sqlite3.Cursor) -> bool:
        """Notify of commits by other connections; return false if this process is writing, so none can be seen now."""
        with suppress(sqlite3.Error):  # the next verb raises it to its caller; a notification may be lost
            version = self._notifier.foreign_version()
            if version is None:
                return False
            if version != self._version:
                with self._guard:
                    self._notify_of_wakes(cursor)
                self._version = version
                self._notifier.notify({COMMITTED: 0})
        return True

    def _notify_of_wakes(self, cursor: sqlite3.Cursor) -> None:
        """Notify of what other processes have noted since the last call, or of all heads."""
        notes = cursor.execute(QUERIES["wakes_after"], (self._line,)).fetchall() if self._line >= 0 else []
        topics = self._notifier.topics()
        wakes: dict[Topic, Millis] = {}
        taken: dict[Topic, Drained] = {}
        if self._line < 0 or (notes and notes[0][0] > self._line + 1) or any(not note[2] for note in notes):
            [self._line] = cursor.execute(QUERIES["last_wake"]).fetchone()
            wakes = heads(cursor, topics)
        else:
            for self._line, writer, topic, at, head in notes:  # in the order of the commits
                if writer == self._notifier.number or topic not in topics:
                    continue
                if head is None:
                    earliest(wakes, topic, at)
                else:
                    taken[topic] = at, head
                    if wakes.get(topic, NEVER) <= at:
                        del wakes[topic]
        if wakes or taken:
            self._notifier.notify(wakes, taken)
