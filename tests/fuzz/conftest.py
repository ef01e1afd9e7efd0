"""An event loop for cases that need one, and silence: what is refused would be told in the log, thousands of times."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import pytest
from tests.waiting import PATIENCE

T = TypeVar("T")


class Loop:
    """Runs one case after the other, so that what was opened before them stays open."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self._runner = runner

    def finish(self, case: Coroutine[Any, Any, T]) -> T:
        """What it returns; a case that still waits for something when patience is over hangs."""
        return self._runner.run(asyncio.wait_for(case, PATIENCE))


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    with asyncio.Runner() as runner:
        yield Loop(runner)


@pytest.fixture(autouse=True, scope="module")
def silence() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
