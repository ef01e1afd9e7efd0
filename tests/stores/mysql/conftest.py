"""What the tests of the MySQL store share: see `tests/stores/sql/fixtures.py`."""

from __future__ import annotations

import pytest
from tests.stores.sql.database import MySql
from tests.stores.sql.fixtures import *  # noqa: F403 - fixtures


@pytest.fixture(scope="session")
def database(mysql_url: str) -> MySql:
    return MySql(mysql_url)
