"""Programs that a test runs to their end."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HANGS = 600
"""Seconds after which a program hangs."""

Ended = subprocess.CompletedProcess[str]


def environment(given: Mapping[str, str] | None = None) -> dict[str, str]:
    """That of the tests, with this Python's programs first and what is given, without what bide and pytest read."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("BIDE_", "PYTEST_", "COV_"))}
    first = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", "")])
    return {**kept, "PATH": first, **(given or {})}


def run(
    *command: str | Path, cwd: Path | None = None, given: str = "", code: int | None = 0,
    environ: Mapping[str, str] | None = None,
) -> Ended:  # fmt: skip
    """What it said. `given` is on its input; `code` is how it has to end, None being any way."""
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=environment(environ), input=given, capture_output=True,
        text=True, timeout=HANGS, check=False,
    )  # fmt: skip
    assert code is None or done.returncode == code, f"{done.returncode}: {done.stdout}\n{done.stderr}"
    return done


def python(*words: str | Path, **how: Any) -> Ended:
    """The same of this Python."""
    return run(sys.executable, *words, **how)
