"""What the demo remembers in its own tables of the file: when it began, what was done, and what happened to whom.

So that Ctrl-C, or worse, and a new start go on where it was. The tasks themselves need none of this.
"""

from __future__ import annotations

import queue
import sqlite3
import threading
from contextlib import closing
from typing import NamedTuple

from bide.core.instants import Millis

_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS demo_run (one INTEGER PRIMARY KEY CHECK (one = 1), began_at INTEGER, speed REAL, "
    "ended INTEGER)",
    "CREATE TABLE IF NOT EXISTS demo_act (name TEXT PRIMARY KEY)",
    "CREATE TABLE IF NOT EXISTS demo_line (line INTEGER PRIMARY KEY, story TEXT, thing TEXT, words TEXT, mark TEXT, "
    "at INTEGER, due_at INTEGER, late REAL)",
)


class Line(NamedTuple):
    """One thing that happened."""

    story: str
    thing: str
    words: str
    mark: str
    at: Millis
    due_at: Millis | None = None
    late: float | None = None
    """Milliseconds from when it was due until its handler began; None where nothing was fired."""


class Run(NamedTuple):
    began_at: Millis
    speed: float
    ended: bool


class Ledger:
    """Written on a thread of its own: an event loop that waits for a disk fires late."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._todo: queue.SimpleQueue[tuple[str, tuple[object, ...]] | None] = queue.SimpleQueue()
        with closing(self._connect()) as connection:
            for statement in _SCHEMA:
                connection.execute(statement)
        self._thread = threading.Thread(target=self._write, name="bide demo ledger", daemon=True)
        self._thread.start()

    def run(self) -> Run | None:
        with closing(self._connect()) as connection:
            row = connection.execute("SELECT began_at, speed, ended FROM demo_run").fetchone()
        return None if row is None else Run(row[0], row[1], bool(row[2]))

    def begin(self, began_at: Millis, speed: float) -> None:
        """Forget the run before, with the tables of its stories, and begin another."""
        with closing(self._connect()) as connection:
            names = [row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE name GLOB 'demo_*'")]
            for name in names:
                connection.execute(f'DROP TABLE "{name}"')
            for statement in _SCHEMA:
                connection.execute(statement)
            connection.execute("INSERT INTO demo_run VALUES (1, ?, ?, 0)", (began_at, speed))

    def end(self) -> None:
        self._todo.put(("UPDATE demo_run SET ended = 1", ()))

    def acts(self) -> set[str]:
        """The names of what people have done already."""
        with closing(self._connect()) as connection:
            return {row[0] for row in connection.execute("SELECT name FROM demo_act")}

    def acted(self, name: str) -> None:
        self._todo.put(("INSERT OR IGNORE INTO demo_act VALUES (?)", (name,)))

    def lines(self) -> list[Line]:
        with closing(self._connect()) as connection:
            rows = connection.execute(
                "SELECT story, thing, words, mark, at, due_at, late FROM demo_line ORDER BY line"
            ).fetchall()
        return [Line(*row) for row in rows]

    def put(self, line: Line) -> None:
        self._todo.put(
            ("INSERT INTO demo_line (story, thing, words, mark, at, due_at, late) VALUES (?, ?, ?, ?, ?, ?, ?)", line)
        )

    def close(self) -> None:
        self._todo.put(None)
        self._thread.join()

    def _write(self) -> None:
        with closing(self._connect()) as connection:
            while (found := self._todo.get()) is not None:
                connection.execute(*found)

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, isolation_level=None, timeout=30)
        connection.execute("PRAGMA synchronous = NORMAL")  # of the board, a power cut may take the last line
        return connection
