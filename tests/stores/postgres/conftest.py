"""What the tests of the PostgreSQL store share: see `tests/stores/sql/fixtures.py`."""

from __future__ import annotations

import pytest
from tests.stores.sql.database import Postgres
from tests.stores.sql.fixtures import fresh_url as fresh_url
from tests.stores.sql.fixtures import open_store as open_store
from tests.stores.sql.fixtures import own_server as own_server
from tests.stores.sql.fixtures import own_servers as own_servers
from tests.stores.sql.fixtures import own_url as own_url
from tests.stores.sql.fixtures import proxy as proxy
from tests.stores.sql.fixtures import shop as shop
from tests.stores.sql.fixtures import starts as starts
from tests.stores.sql.fixtures import through as through
from tests.stores.sql.fixtures import url as url


@pytest.fixture(scope="session")
def database(postgres_url: str) -> Postgres:
    return Postgres(postgres_url)
