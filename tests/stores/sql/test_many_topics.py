"""What a list and a tally ask of a server that has many topics."""

from __future__ import annotations

from typing import Any

import pytest
from tests.stores.many_topics import asked_of_topics
from tests.stores.sql.database import Database
from tests.stores.sql.fixtures import OpensStore

from bide.stores.mysql.connection import Call as MySqlCall
from bide.stores.postgres.connection import Call as PostgresCall


async def test_what_is_asked_does_not_grow_with_the_topics(
    database: Database, url: str, open_store: OpensStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P11: but for the tally, by a few statements for some hundred topics."""
    asked = 0

    def counted(kind: Any, name: str, many: bool) -> None:
        real = getattr(kind, name)

        async def call(self: Any, *of: Any, **options: Any) -> Any:
            nonlocal asked
            asked += len(of) if many else 1
            return await real(self, *of, **options)

        monkeypatch.setattr(kind, name, call)

    counted(PostgresCall, "fetch", many=False)
    counted(MySqlCall, "send", many=True)
    found = await asked_of_topics(await open_store(url), lambda: asked)
    assert found[1][:2] == found[100][:2] == found[1_000][:2]
    assert found[1_000][2] <= found[1][2] + 12
