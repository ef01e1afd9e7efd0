"""What MySQL and MariaDB alone ask of a migration and of a connection: the least rights, and TLS where it is wanted."""

from __future__ import annotations

from typing import Any

import pytest
from tests.servers.fixtures import StartsMariaDb

from bide.core.errors import StoreUnavailable
from bide.stores.mysql import MySqlStore
from bide.stores.mysql.schema import SCHEMA


async def test_a_server_without_tls_is_refused_where_that_is_wanted(mariadb_server: StartsMariaDb) -> None:
    store = MySqlStore(f"{mariadb_server(options={'skip-ssl': '1'}).url}?ssl_mode=required", patience=0.2)
    with pytest.raises(StoreUnavailable, match=r"TLS|SSL"):
        await store.open()


async def test_the_least_rights_are_enough_to_migrate(own_server: Any) -> None:
    own_server.ask("CREATE OR REPLACE USER builder@'%'")
    own_server.ask("CREATE DATABASE built")
    try:
        own_server.ask("GRANT SELECT, INSERT, UPDATE, CREATE, INDEX, ALTER ON built.* TO builder@'%'")
        url = own_server.url.replace("//bide@", "//builder@").rpartition("/")[0] + "/built"
        assert await SCHEMA.migrate(url) == ["0001 tasks"]
    finally:
        own_server.ask("DROP DATABASE built")
