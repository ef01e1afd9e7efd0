"""Tests of both SQL servers: each runs once for either."""

from __future__ import annotations

import pytest
from tests.stores.sql.database import Database, MySql, Postgres
from tests.stores.sql.fixtures import *  # noqa: F403 - fixtures


@pytest.fixture(scope="session", params=["postgres", "mysql"])
def database(request: pytest.FixtureRequest) -> Database:
    kinds: dict[str, type[Database]] = {"postgres": Postgres, "mysql": MySql}
    return kinds[request.param](request.getfixturevalue(f"{request.param}_url"))
