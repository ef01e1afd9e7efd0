"""The business rows that strategies on a broker look into when a message arrives: here a SQLite file of the cell."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bide_lab.strategy import Item

_SCHEMA = """
CREATE TABLE IF NOT EXISTS task (
    key TEXT PRIMARY KEY,
    due INTEGER NOT NULL,
    status TEXT NOT NULL DEFAULT 'scheduled'
) WITHOUT ROWID
"""


class Rows:
    """One connection, which threads may share. A broker's message knows a key and a time; only the row knows if both
    still hold. Each call takes some tens of microseconds, and longer while another process writes.
    """

    def __init__(self, folder: Path) -> None:
        self._lock = threading.Lock()
        self._file = sqlite3.connect(
            folder / "rows.db", timeout=10.0, isolation_level=None, check_same_thread=False, cached_statements=32
        )
        self._file.execute("PRAGMA journal_mode = WAL")
        self._file.execute("PRAGMA synchronous = NORMAL")
        self._file.execute(_SCHEMA)

    def close(self) -> None:
        self._file.close()

    def add(self, items: Sequence[Item]) -> None:
        with self._lock:
            self._file.execute("BEGIN IMMEDIATE")
            self._file.executemany("INSERT INTO task (key, due) VALUES (?, ?)", items)
            self._file.execute("COMMIT")

    def scheduled_for(self, key: str) -> int | None:
        """When it is due; None if it is not scheduled any more."""
        rows = self._all("SELECT due FROM task WHERE key = ? AND status = 'scheduled'", (key,))
        return int(rows[0][0]) if rows else None

    def move(self, item: Item) -> bool:
        return self._change("UPDATE task SET due = ? WHERE key = ? AND status = 'scheduled'", (item.due, item.key))

    def cancel(self, key: str) -> bool:
        return self._change("UPDATE task SET status = 'cancelled' WHERE key = ? AND status = 'scheduled'", (key,))

    def done(self, key: str, due: int) -> bool:
        """The effect of this time has been: what a second message for it then finds."""
        return self._change(
            "UPDATE task SET status = 'done' WHERE key = ? AND due = ? AND status = 'scheduled'", (key, due)
        )

    def _change(self, statement: str, values: Sequence[Any]) -> bool:
        with self._lock:
            return self._file.execute(statement, values).rowcount == 1

    def _all(self, statement: str, values: Sequence[Any]) -> list[Any]:
        with self._lock:
            return self._file.execute(statement, values).fetchall()
