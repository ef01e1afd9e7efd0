"""Instances of the service for the tests of its API: one on each store, shared by all tests."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from tests.engine.conftest import store_url
from tests.service.calling import Api, Running, fresh_store, running

__all__ = ["store_url"]

KEPT: dict[str, Any] = {"keep_done": "1h", "keep_cancelled": "1h"}
"""As `bide serve` has it."""


@pytest.fixture(scope="module", params=["memory", "sqlite", "redis", "postgres"])
def service(request: pytest.FixtureRequest) -> Iterator[Running]:
    """An instance on each store. It looks again where it is told to, and not because some time has passed."""
    with fresh_store(request) as url, running(url, max_sleep="1h", **KEPT) as found:
        yield found


@pytest.fixture(scope="module")
def small() -> Iterator[Running]:
    """One on a store in memory, for what has nothing to do with the store."""
    with running("memory:", **KEPT) as found:
        yield found


@pytest.fixture
def api(service: Running) -> Iterator[Api]:
    """Calls the instance on each store."""
    with closing(Api(service.url)) as found:
        yield found


@pytest.fixture
def plain(small: Running) -> Iterator[Api]:
    """Calls the one on a store in memory."""
    with closing(Api(small.url)) as found:
        yield found


@pytest.fixture
def topic() -> str:
    """One that no other test has."""
    return f"topic.{secrets.token_hex(6)}"
