"""What the tests of the PostgreSQL store share: see `tests/stores/sql/fixtures.py`."""

from __future__ import annotations

import pytest
from tests.stores.sql.database import Postgres
from tests.stores.sql.fixtures import *  # noqa: F403 - fixtures


@pytest.fixture(scope="session")
def database(postgres_url: str) -> Postgres:
    return Postgres(postgres_url)
