"""The shipped suites live outside the tests, and their assertions are to be explained all the same."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.register_assert_rewrite("bide.testing.store_suite", "bide.testing.store_machine")

from bide.testing.store_suite.base import SuiteBase  # noqa: E402 - once its assertions are rewritten

SuiteBase.races = int(os.environ.get("RACES", "100"))
"""A tenth of what the suite plays by itself; `make proofs-long` plays all."""


def pytest_itemcollected(item: pytest.Item) -> None:
    if "open_postgres" in getattr(item, "fixturenames", ()):  # the suite's own mark has no scope, and would come first
        item.add_marker(pytest.mark.asyncio(loop_scope="class"), append=False)


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A directory in memory where there is one: these tests are about answers, not about the disk."""
    memory = Path("/dev/shm")
    place = Path(tempfile.mkdtemp(prefix="bide-", dir=memory if memory.is_dir() else None))
    yield place
    shutil.rmtree(place)
