"""What the tests of several folders share: where the clone is, real servers, and how hard Hypothesis tries."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Without deadlines: how long an example takes says more about the machine's other work than about the code.
settings.register_profile("dev", deadline=None)
settings.register_profile(
    "ci", deadline=None, derandomize=True, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


pytest_plugins = ["tests.servers.fixtures", "tests.together"]


@pytest.fixture(scope="session")
def root() -> Path:
    """The top of the clone."""
    return Path(__file__).resolve().parent.parent
