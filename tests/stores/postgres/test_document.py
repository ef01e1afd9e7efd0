"""The SQL in docs/sql.md runs on the schema that is there, and finds what it says."""

from __future__ import annotations

import re
from pathlib import Path

import asyncpg
from tests.stores.sql.fixtures import OpensStore

from bide.core.instants import In
from bide.core.records import NewTask, State
from bide.stores.postgres.connection import address_of
from bide.stores.postgres.schema import SCHEMA
from bide.testing.store_suite.base import add_all


async def test_what_the_page_looks_at_is_there(root: Path, url: str, open_store: OpensStore) -> None:
    page = (root / "docs" / "sql.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```sql\n-- look: ([^\n]*)\n(.*?);\n```", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 5
    store = await open_store(url, clock="server")
    now = await store.time()
    named = (("order.close", "43"), ("order.remind", "1"))
    await add_all(store, [NewTask(topic, key, key, In(0), b'"paid"') for topic, key in named], now=now)
    await store.announce("worker", ["order.close"], now + 30_000, now=now)
    address = address_of(url)
    connection = await asyncpg.connect(address.dsn)
    try:
        found = {
            what: await connection.fetch(re.sub(r"\bbide\.", f"{address.schema}.", statement))
            for what, statement in blocks
        }
    finally:
        await connection.close()
    due, counts, one, workers, deleted = found.values()
    assert [row["key"] for row in due] == ["43"]
    assert {(row["topic"], row["state"], row["count"]) for row in counts} == {
        ("order.close", 0, 1), ("order.remind", 0, 1),
    }  # fmt: skip
    assert [row["payload"] for row in one] == ['"paid"']
    assert [row["holder"] for row in workers] == ["worker"]
    assert deleted == []
    assert [(topic, state) for topic, state in (await store.tally()).counts] == [("order.close", State.WAITING)]


async def test_the_picture_names_every_table_index_and_column(root: Path, fresh_url: str) -> None:
    await SCHEMA.migrate(fresh_url)
    address = address_of(fresh_url)
    picture = (
        (root / "docs" / "sql.md").read_text(encoding="utf-8").partition("## The schema")[2].partition("Times are")[0]
    )
    connection = await asyncpg.connect(address.dsn)
    try:
        relations = await connection.fetch(
            "SELECT relname FROM pg_class WHERE relnamespace = to_regnamespace($1) AND relkind IN ('r', 'S', 'i') "
            "AND relname !~ '_(pkey|seq)$'",
            address.schema,
        )
        columns = await connection.fetch(
            "SELECT column_name FROM information_schema.columns WHERE table_schema = $1 AND table_name = 'task'",
            address.schema,
        )
    finally:
        await connection.close()
    names = {row[0] for row in relations} - {"task_name", "event_name"} | {row[0] for row in columns}
    assert {name for name in names if not re.search(rf"\b{name}\b", picture)} == set()
