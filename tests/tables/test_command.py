"""`bide work` on an app that has no handlers, only a table."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

from tests.waiting import PATIENCE, wait_until

APP = """
from bide import Bide, TableSource

app = Bide("sqlite:///blog.db")
posts = app.watch(TableSource(table="posts", due="due", where="status = 2", changes={"status": 3}))
"""


def test_bide_work_watches_tables(tmp_path: Path) -> None:
    (tmp_path / "blog.py").write_text(APP)
    with closing(sqlite3.connect(tmp_path / "blog.db", isolation_level=None)) as blog:
        blog.execute("CREATE TABLE posts (id INTEGER PRIMARY KEY, status INTEGER, due TEXT)")
        blog.execute("CREATE INDEX posts_by_due ON posts (due) WHERE status = 2")
        blog.execute("INSERT INTO posts (status, due) VALUES (2, '2020-01-01 08:00:00')")
        command = [sys.executable, "-m", "bide", "work", "blog:app"]
        with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as worker:
            try:
                wait_until(lambda: worker.poll() is not None or status(blog) == 3, "the row to fire")
                worker.send_signal(signal.SIGTERM)
                _, said = worker.communicate(timeout=PATIENCE)
            finally:
                worker.kill()
        assert worker.returncode == 0, said
        assert "table posts" in said
        assert status(blog) == 3


def status(blog: sqlite3.Connection) -> int:
    [(found,)] = blog.execute("SELECT status FROM posts")
    return int(found)
