"""Turns: tests run beside each other, but for those that are marked `alone`; in a project of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import os, time
import pytest

def stay():
    for what in ("enters", "leaves"):
        with open("told.txt", "a") as told:
            told.write(f"{what} {os.getpid()}\\n")
        if what == "enters":
            time.sleep(0.05)

@pytest.mark.parametrize("number", range(6))
def test_in_company(number):
    stay()
"""
ALONE = """
@pytest.mark.alone
@pytest.mark.parametrize("number", range(3))
def test_alone(number):
    with open("told.txt", "a") as told:
        told.write("alone\\n")
    stay()
"""
SETTINGS = """
[pytest]
markers = alone
"""


def run(project: Path, root: Path, *options: str) -> str:
    """The last line of a pytest on two files: one all in company, one that ends with three alone."""
    (project / "pytest.ini").write_text(SETTINGS, encoding="utf-8")
    (project / "test_one.py").write_text(TESTS, encoding="utf-8")
    (project / "test_two.py").write_text(TESTS + ALONE, encoding="utf-8")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV_"))}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.together", "-p", "no:cacheprovider", *options],
        cwd=project, env={**kept, "PYTHONPATH": str(root)}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize("processes", [0, 2])
def test_those_that_want_to_be_alone_are(tmp_path: Path, root: Path, processes: int) -> None:
    said = run(tmp_path, root, "-n", str(processes), "--dist", "loadscope", "--no-loadscope-reorder")
    assert "15 passed" in said
    inside, alone, beside = set[str](), 0, 0
    for line in (tmp_path / "told.txt").read_text(encoding="utf-8").splitlines():
        what, _, who = line.partition(" ")
        if what == "alone":
            alone += 1
            assert not inside
        elif what == "enters":
            inside.add(who)
            beside = max(beside, len(inside))
        else:
            inside.remove(who)
        assert len(inside) <= 1 or not 0 < alone < 3
    assert alone == 3
    assert beside == (2 if processes else 1)


def test_where_there_is_no_xdist_it_does_nothing(tmp_path: Path, root: Path) -> None:
    assert "15 passed" in run(tmp_path, root, "-p", "no:xdist")
