"""The pytest plugin, as users meet it: in a project of their own, in a pytest of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SHOP = """
from bide import Bide, Task

app = Bide("sqlite:////nowhere/that/exists.db")
closed = []

@app.handler("order.close")
async def close(task: Task[int]) -> None:
    closed.append(task.payload)

def number_of_the_next_order():
    return 42
"""
CONFTEST = """
import pytest
import shop

@pytest.fixture
def bide_app():
    return shop.app
"""
CLOSES = """
import shop

async def test_it_closes_after_15_minutes(bide_time):
    await shop.close.schedule(42, key="42", delay="15m")
    assert await bide_time.advance("14m59s") == []
    fired = await bide_time.advance("1s")
    assert [task.ref for task in fired] == [("order.close", "42")]
    assert shop.closed == [42]

async def test_each_test_begins_with_nothing(bide_time):
    assert await bide_time.waiting() == []
"""
PLAIN = """
import shop

def test_what_has_nothing_to_do_with_time():
    assert shop.number_of_the_next_order() == 42
"""
WITHOUT_ASYNC_PLUGIN = """
import sys
sys.modules["pytest_asyncio"] = None  # as if it were not installed
import pytest
sys.exit(pytest.main(["-q", "-W", "error", "-p", "no:cacheprovider", "-p", "bide.testing.plugin", *sys.argv[1:]]))
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(SHOP, encoding="utf-8")
    (tmp_path / "conftest.py").write_text(CONFTEST, encoding="utf-8")
    return tmp_path


def run(project: Path, test: str, *command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """The tests of the project, run as its owner would."""
    (project / "test_shop.py").write_text(test, encoding="utf-8")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("BIDE_", "PYTEST_", "COV_"))}
    return subprocess.run(
        [sys.executable, *(command or ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "asyncio_mode=auto"))],
        cwd=project,
        env={**kept, "PYTHONPATH": str(project), **environ},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_time_moves_in_a_users_project_with_nothing_switched_on(project: Path) -> None:
    done = run(project, CLOSES)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout
    assert "warning" not in done.stdout.lower()


def test_without_a_bide_app_it_says_what_to_write(project: Path) -> None:
    (project / "conftest.py").unlink()
    done = run(project, CLOSES)
    assert done.returncode != 0
    assert "define a fixture `bide_app` that returns your Bide app" in done.stdout


def test_a_failing_test_shows_what_fired(project: Path) -> None:
    done = run(project, CLOSES.replace('== [("order.close", "42")]', "== []"))
    assert done.returncode == 1
    assert "('order.close', '42')" in done.stdout


def test_without_an_async_plugin_a_project_runs_as_before(project: Path) -> None:
    done = run(project, PLAIN, "-c", WITHOUT_ASYNC_PLUGIN, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


def test_a_project_that_does_not_use_it_loads_next_to_nothing(project: Path) -> None:
    (project / "conftest.py").unlink()
    loaded = """
import sys

def test_loaded():
    assert not {"sqlite3", "click", "rich", "bide.testing.time_machine", "bide.stores.memory"} & set(sys.modules)
"""
    done = run(project, loaded)
    assert done.returncode == 0, done.stdout + done.stderr
