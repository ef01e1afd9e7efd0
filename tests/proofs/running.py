"""Runs a tool of `bide_proofs` that judges real processes, and reads its report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

HANGS = 900.0
"""Seconds after which a run is taken for a hang; on a quiet machine each takes less than 30."""


def report_of(tool: str, *options: str) -> dict[str, Any]:
    """What `python -m bide_proofs.TOOL` reports. Fails the test where it found anything wrong, or could not run."""
    done = subprocess.run(
        [sys.executable, "-m", f"bide_proofs.{tool}", *options],
        capture_output=True, text=True, timeout=HANGS, check=False,
    )  # fmt: skip
    if "is not installed" in done.stderr and not os.environ.get("CI"):
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr[-8000:] + done.stdout[-8000:]
    report: dict[str, Any] = json.loads(done.stdout)
    return report
