"""What the tests of several folders share: where the clone is, real servers, and how hard Hypothesis tries."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from bide.core.names import storable

# Without deadlines: how long an example takes says more about the machine's other work than about the code.
settings.register_profile("dev", deadline=None)
settings.register_profile(
    "ci", deadline=None, derandomize=True, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


# Byte code is kept, whatever the environment says: every worker reads all tests, and some hundred processes that tests
# start read bide. To compile them each time is half of what it takes to begin.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A shell that runs the tests in the background lets them ignore Ctrl-C, and what they start too, to which some send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ["tests.servers.sharing", "tests.servers.fixtures"]


LONG = (
    "conformance/test_state_machine.py", "console/test_use.py", "sql/test_lost_answers.py", "TestPostgres::",
    "TestMySql::", "TestPostgresOthers::", "TestMySqlOthers::", "redis/test_lost_answers.py",
    "console/test_looks.py", "lab/test_claims.py",
    "test_docs.py", "bench/test_bench.py", "cli/test_demo.py", "conformance/test_redis.py",
    "sql/test_locked_rows.py", "test_examples.py", "redis/test_workers.py",
    "service/test_contract.py",
)  # fmt: skip
"""What takes longest goes first, that it is not left to the end for one process; `--durations` tells."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: next((place for place, name in enumerate(LONG) if name in item.nodeid), len(LONG)))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is found is there to the end: nobody need look through a million objects again and again whether it is."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, object, object]:
    """The log of a test may hold half a character, on which the process that sends it to the first one would die."""
    return _sendable((yield))


def _sendable(part: object) -> object:
    if isinstance(part, str):
        return storable(part)
    if isinstance(part, dict):
        return {key: _sendable(value) for key, value in part.items()}
    return type(part)(map(_sendable, part)) if isinstance(part, list | tuple) else part


@pytest.fixture(scope="session")
def root() -> Path:
    """The top of the clone."""
    return Path(__file__).resolve().parent.parent
