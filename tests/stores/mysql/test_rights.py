"""The rights in docs/sql.md are enough for everything that bide does, and none of them is idle."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.stores.sql.everything import everything

from bide.core.errors import StoreError, StoreUnavailable
from bide.stores.mysql import MySqlStore
from bide.stores.mysql.schema import SCHEMA
from bide_proofs.servers.mariadb import MariaDbServer

DATABASE = "tasks"


def statements(root: Path, who: str) -> list[str]:
    """Those of the page for one of the two users."""
    text = (root / "docs" / "sql.md").read_text(encoding="utf-8")
    [block] = re.findall(rf"^```sql\n-- on MySQL, who {who}.*?\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [one.strip() for one in block.split(";") if one.strip()]


def store(url: str) -> MySqlStore:
    return MySqlStore(url, patience=0.3, events_kept=2)


@pytest.fixture
def server(root: Path, own_server: MariaDbServer) -> Iterator[MariaDbServer]:
    """With the database of the page, and with who migrates."""
    for statement in statements(root, "migrates"):
        own_server.ask(statement)
    yield own_server
    own_server.ask(f"DROP DATABASE {DATABASE}")
    own_server.ask("DROP USER IF EXISTS bide_migrator, bide_worker, other")


async def test_the_rights_suffice_and_each_is_needed(root: Path, server: MariaDbServer) -> None:

    def url(user: str) -> str:
        return f"{server.url.replace('//bide@', f'//{user}:secret@').rpartition('/')[0]}/{DATABASE}"

    await SCHEMA.migrate(url("bide_migrator"))
    with pytest.raises(StoreUnavailable, match=r"[Aa]ccess denied"):
        await store(url("bide_worker")).open()
    grants = statements(root, "runs")
    for statement in grants:
        server.ask(statement)
    await everything(store(url("bide_worker")))

    single = [
        (right, table)
        for rights, table in re.findall(r"GRANT (.*) ON (.*) TO", "\n".join(grants))
        for right in rights.split(", ")
    ]
    assert len(single) == 27
    idle = []
    for right, table in single:
        for name in ("task", "lease", "grouped", "kept", "event", "worker"):
            server.ask(f"DELETE FROM {DATABASE}.bide_{name}")
        server.ask(f"INSERT INTO {DATABASE}.bide_kept VALUES (1, 1)")  # what is to be forgotten, as is the next
        server.ask(f"REPLACE INTO {DATABASE}.bide_caller (name, number, seen, now, micros) VALUES ('old', 0, 0, 0, 0)")
        server.ask(f"REVOKE {right} ON {table} FROM bide_worker@'%'")
        try:
            await everything(store(url("bide_worker")))
        except StoreError:
            pass
        else:
            idle.append((right, table))
        server.ask(f"GRANT {right} ON {table} TO bide_worker@'%'")
    assert not idle


async def test_who_runs_tasks_cannot_migrate(server: MariaDbServer) -> None:
    server.ask("CREATE USER other@'%' IDENTIFIED BY 'it''s @ secret'")
    url = f"{server.url.replace('//bide@', '//other:it%27s%20%40%20secret@').rpartition('/')[0]}/{DATABASE}"
    with pytest.raises(StoreUnavailable, match="grant this user"):
        await SCHEMA.migrate(url)
    with pytest.raises(StoreUnavailable, match="password"):
        await store(url.replace("other:it", "other:wrong")).open()
