"""The rights in docs/sql.md are enough for everything that bide does, and none of them is idle."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import pytest
from tests.stores.sql import everything as shared

from bide.core.errors import StoreError, StoreUnavailable
from bide.stores.postgres import PostgresStore
from bide.stores.postgres.connection import address_of
from bide.stores.postgres.queries import queries_of
from bide.stores.postgres.schema import SCHEMA
from bide_proofs.servers.postgres import ask

ROLES = ("bide_migrator", "bide_worker")


class Granted:
    """The statements of the page, for a schema and for roles that are nobody else's."""

    def __init__(self, text: str, url: str, name: str) -> None:
        self.name = name
        self.admin = url
        blocks = re.findall(r"^```sql\n(-- who (?:migrates|runs).*?)^```", text, re.MULTILINE | re.DOTALL)
        assert len(blocks) == 2, "the page has one for each user"
        self.migrator, self.worker = (self._named(block) for block in blocks)

    def _named(self, block: str) -> list[str]:
        text = re.sub(r"^--.*\n", "", block, flags=re.MULTILINE)
        text = re.sub(r"\bbide_(migrator|worker)\b", rf"{self.name}_\1", text)
        text = re.sub(r"\bbide\b", self.name, text)
        return [one.strip() for one in text.split(";") if one.strip()]

    def run(self, statements: list[str]) -> None:
        for statement in statements:
            ask(self.admin, statement)

    def url(self, user: str) -> str:
        """The store, as the one or the other."""
        return f"{self.admin.replace('//bide@', f'//{self.name}_{user}@')}?schema={self.name}"


@pytest.fixture
def page(root: Path, postgres_url: str, postgres_schema: str) -> Iterator[Granted]:
    yield Granted((root / "docs" / "sql.md").read_text(encoding="utf-8"), postgres_url, postgres_schema)
    for role in ROLES:
        mine = role.replace("bide", postgres_schema)
        if ask(postgres_url, f"SELECT FROM pg_roles WHERE rolname = '{mine}'"):
            ask(postgres_url, f"DROP OWNED BY {mine} CASCADE")
            ask(postgres_url, f"DROP ROLE {mine}")


async def everything(url: str) -> None:
    await shared.everything(PostgresStore(url, events_kept=2))


async def test_the_rights_suffice_and_each_is_needed(page: Granted, postgres_url: str) -> None:
    page.run(page.migrator)
    await SCHEMA.migrate(page.url("migrator"))
    page.run(page.worker)
    await everything(page.url("worker"))
    grants = [one for one in page.worker if one.startswith("GRANT")]
    single = [
        f"{right} ON {'SEQUENCE ' if 'SEQUENCE' in grant else ''}{name}"
        for grant in grants
        if "SCHEMA" not in grant
        for rights, names in re.findall(r"GRANT (.*) ON (?:SEQUENCE )?(.*) TO", grant)
        for right in rights.split(", ")
        for name in names.split(", ")
    ]
    assert len(single) == 18
    single.append(f"USAGE ON SCHEMA {page.name}")
    for right in single:
        ask(postgres_url, f"DELETE FROM {page.name}.task")
        ask(postgres_url, f"REVOKE {right} FROM {page.name}_worker")
        with pytest.raises(StoreError):
            await everything(page.url("worker"))
        ask(postgres_url, f"GRANT {right} TO {page.name}_worker")
    ask(postgres_url, f"DELETE FROM {page.name}.task")
    await everything(page.url("worker"))


async def test_whoever_runs_tasks_sees_which_transactions_of_others_write(page: Granted, postgres_url: str) -> None:
    page.run(page.migrator)
    await SCHEMA.migrate(page.url("migrator"))
    page.run(page.worker)
    ours = await asyncpg.connect(address_of(page.url("worker")).dsn)
    theirs = await asyncpg.connect(address_of(postgres_url).dsn)
    seen = []
    try:
        for statement in (
            "BEGIN", f"SELECT FROM {page.name}.task", "COMMIT",
            "BEGIN", f"SELECT FROM {page.name}.task FOR UPDATE", "COMMIT",
            "BEGIN", f"DELETE FROM {page.name}.task", "ROLLBACK",
        ):  # fmt: skip
            await theirs.execute(statement)
            [row] = await ours.fetch(queries_of(page.name, "")["writers"])
            seen.append(len(row["writers"]))
    finally:
        await theirs.close()
        await ours.close()
    assert seen == [0, 0, 0, 0, 1, 0, 0, 1, 0]


async def test_whoever_runs_tasks_cannot_migrate(page: Granted) -> None:
    page.run(page.migrator)
    await SCHEMA.migrate(page.url("migrator"))
    page.run(page.worker)
    ask(page.admin, f"DELETE FROM {page.name}.migration")
    with pytest.raises(StoreUnavailable, match=r"docs/sql\.md"):
        await SCHEMA.migrate(page.url("worker"))


async def test_who_may_make_the_schema_needs_a_right_on_the_database(page: Granted) -> None:
    page.run(page.migrator[:1])
    with pytest.raises(StoreUnavailable, match=r"docs/sql\.md"):
        await SCHEMA.migrate(page.url("migrator"))
    ask(page.admin, f"GRANT CREATE ON DATABASE postgres TO {page.name}_migrator")
    assert await SCHEMA.migrate(page.url("migrator"))


async def test_doctor_says_what_it_may_not_see(page: Granted) -> None:
    """Old transactions of others, which only shows to whoever may read all statistics."""
    page.run(page.migrator)
    await SCHEMA.migrate(page.url("migrator"))
    page.run(page.worker)

    async def said() -> list[tuple[bool, str]]:
        store = PostgresStore(page.url("worker"))
        await store.open()
        try:
            return [(one.ok, one.what) for one in await store.diagnose()]
        finally:
            await store.close()

    assert any(not ok and "may not see" in what for ok, what in await said())
    ask(page.admin, f"GRANT pg_read_all_stats TO {page.name}_worker")
    assert not any("may not see" in what for _, what in await said())
