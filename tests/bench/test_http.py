"""`bench.http` without its figures: what its parts agree on, one short run, and what it says where it cannot run."""

from __future__ import annotations

import doctest
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of the benchmark by name. The folder is no part of the package, so it is put on the path."""
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: importlib.import_module(f"bench.{name}")


def _run(*words: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ) if path is None else {**os.environ, "PATH": path}
    return subprocess.run(
        [sys.executable, "-m", "bench.http", *words],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["command", "http_actors"])
def test_the_examples_in_the_docstrings_hold(part: Any, name: str) -> None:
    failed, tried = doctest.testmod(part(name))
    assert (failed, tried > 0) == (0, True)


def test_it_says_when_wrk_is_missing() -> None:
    refused = _run("--only", "single", path="/nowhere")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "wrk is not installed; on Debian: apt-get install wrk" in refused.stderr


def test_each_figure_is_a_line_of_json() -> None:
    ran = _run("--only", "webhooks", "--only", "long_poll", "--n", "50", "--seconds", "0.5", "--rate", "20")
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    assert {line["workload"] for line in lines} == {"webhooks", "long_poll"}, ran.stderr
    early = [line["value"] for line in lines if line["figure"] == "early"]
    assert early == [0, 0]
