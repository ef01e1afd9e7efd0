"""The maintainers' scripts in `bench/`: no distribution has them, so they are found from the top of the clone."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Script = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch, root: Path) -> Callable[[str], Any]:
    """A module of `bench` by name."""
    monkeypatch.syspath_prepend(str(root))
    return lambda name: importlib.import_module(f"bench.{name}")


@pytest.fixture
def script(root: Path) -> Script:
    """Run `python -m MODULE WORD...`, with variables of the environment if any are given."""

    def run(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", *words],
            cwd=root, env={**os.environ, **environ}, capture_output=True, text=True, check=False,
        )  # fmt: skip

    return run
