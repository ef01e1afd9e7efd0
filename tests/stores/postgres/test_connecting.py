"""Addresses, connections, poolers and rights on PostgreSQL, and docs/postgres.md, which says them."""

from __future__ import annotations

import asyncio
import gc
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import asyncpg
import psycopg
import pytest
import pytest_asyncio
from tests.servers.fixtures import running
from tests.servers.pooler import PostgresPooler
from tests.stores.sql import everything as shared
from tests.stores.sql.fixtures import OpensStore
from tests.waiting import until

from bide.core.errors import BadInput, StoreError, StoreUnavailable
from bide.core.instants import In
from bide.core.names import new_id
from bide.core.records import Cancel, Filter, Move, NewTask, Ref, Result, State
from bide.stores.postgres import PostgresStore
from bide.stores.postgres.connection import Address, address_of, connect
from bide.stores.postgres.queries import queries_of
from bide.stores.postgres.schema import SCHEMA
from bide.testing.store_suite.base import NOW, add_all, do, done, extend, lease, listed, new, retry, settle
from bide_proofs.servers.postgres import ask

_VALUES = [[1 << 40, None], [b"\xff"], ["text"], [1, -1], [True, None], [-3]]
_SELECT = "SELECT $1::bigint[], $2::bytea[], $3::text[], $4::integer[], $5::boolean[], $6::smallint[]"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """The types that the driver asks a server about."""
    asked: list[set[int]] = []
    ask = asyncpg.Connection._introspect_types

    async def counted(self: Any, typeoids: Collection[int], timeout: float | None) -> Any:
        asked.append(set(typeoids))
        return await ask(self, typeoids, timeout)

    monkeypatch.setattr(asyncpg.Connection, "_introspect_types", counted)
    return asked


async def test_arrays_are_asked_about_once(url: str, asked: list[set[int]]) -> None:
    for place in range(3):
        connection = await connect(address_of(url), within=10)
        try:
            if place == 1:
                asked.clear()
            assert [*await connection.fetchrow(_SELECT, *_VALUES)] == _VALUES
        finally:
            await connection.close()
    assert asked == []


async def test_types_of_somebodys_own_are_asked_about_each_time(url: str, asked: list[set[int]]) -> None:
    """Another database may have others under the same number."""
    for _ in range(2):
        connection = await connect(address_of(url), within=10)
        try:
            await connection.fetchrow(_SELECT, *_VALUES)
            asked.clear()
            await connection.execute("CREATE TYPE pg_temp.mood AS ENUM ('glad')")
            assert await connection.fetchval("SELECT ARRAY['glad']::pg_temp.mood[]") == ["glad"]
            assert len(asked) == 1
        finally:
            await connection.close()


async def test_a_connection_that_is_given_up_while_it_gets_its_settings_is_closed(url: str) -> None:
    """One that is left open is told of when it is collected, as a ResourceWarning, and those are errors here."""
    address, name = address_of(url), f"slow {new_id()}"
    watching = await asyncpg.connect(address.dsn)
    try:
        slow = {"application_name": f"'{name}'; SELECT pg_sleep(600)"}
        connecting = asyncio.create_task(connect(address, within=60, session=slow))
        sleeping = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep' AND query ~ $1"
        await until(lambda: watching.fetchval(sleeping, name), "the settings to take long")
        assert not connecting.done()
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting
        del connecting
        gc.collect()
        await watching.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = $1", name
        )
    finally:
        await watching.close()


def test_what_is_ours_is_taken_out_and_the_rest_is_the_drivers() -> None:
    assert address_of("postgres://u:p%40@db:5433/shop?schema=tasks&prefix=a_&sslmode=require") == Address(
        dsn="postgresql://u:p%40@db:5433/shop?sslmode=require",
        schema="tasks",
        prefix="a_",
        shown="db:5433/shop tasks.a_*",
    )
    plain = address_of("postgresql:///shop")
    assert (plain.dsn, plain.schema, plain.prefix, plain.pooled) == ("postgresql:///shop", "bide", "", False)
    assert address_of("postgresql://h/d?pooler=transaction").pooled


@pytest.mark.parametrize(
    "url",
    [
        "mysql://h/d", "postgresql://h/d#x", "postgresql://h/d?schema=A", "postgresql://h/d?schema=",
        "postgresql://h/d?schema=pg_x", "postgresql://h/d?schema=a.b", 'postgresql://h/d?schema=a"',
        "postgresql://h/d?prefix=1", "postgresql://h/d?prefix=a-b", "postgresql://h/d?pooler=statement",
        "postgresql://h/d?sslmode=require&channel_binding=require", "postgresql://h/d?connect_timeout=3",
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(url: str) -> None:
    with pytest.raises(BadInput):
        address_of(url)


@pytest.fixture
def pooled(tmp_path: Path, url: str) -> Iterator[str]:
    """The place of the test, by way of the proxy."""
    with running(PostgresPooler(tmp_path / "pooler", url)) as pooler:
        yield f"{pooler.url}?{url.partition('?')[2]}&pooler=transaction"


async def test_every_verb_works(url: str, pooled: str, open_store: OpensStore) -> None:
    store = await open_store(pooled, migrate=False)
    other = await open_store(pooled, migrate=False)

    async def live(store: PostgresStore, topic: str) -> None:
        answers = await add_all(store, [new(str(n), topic=topic) for n in range(10)] + [new("0", topic=topic)])
        assert [answer.result for answer in answers] == [Result.CREATED] * 10 + [Result.REPLACED]
        assert (await do(store, Move(topic, "1", In(5)))).result is Result.MOVED
        assert (await do(store, Cancel(topic, "2"))).result is Result.CANCELLED
        held = (await lease(store, 20, topic=topic)).tasks
        assert len(held) == 8
        assert await extend(store, held[0], until=NOW + 50_000)
        assert await settle(store, done(held[0]))
        assert await settle(store, retry(held[1], In(7)))
        assert (await store.get([Ref(topic, "2")])) == [None]
        assert len(await listed(store, Filter(topic=topic), limit=3)) == 8
        assert (await store.tally([NOW, NOW + 10])).number(topic) == 8
        assert await store.purge(now=NOW, limit=10) == 0

    for number in range(5):  # what is prepared once more, or on another's connection, would fail now
        await asyncio.gather(*(live(one, f"{name}{number}") for one, name in ((store, "a"), (other, "b"))))


async def test_tasks_join_transactions(url: str, pooled: str, open_store: OpensStore) -> None:
    """The caller's connection, and a handler's, may be another with each transaction."""
    store = await open_store(pooled, migrate=False)
    plain = pooled.partition("?")[0]
    by_asyncpg = await asyncpg.connect(plain, statement_cache_size=0)
    by_psycopg = await psycopg.AsyncConnection.connect(plain, prepare_threshold=None)
    for number in range(5):
        async with by_asyncpg.transaction():
            await store.using(by_asyncpg).add([new(f"a{number}")], now=NOW)
        await store.using(by_psycopg).add([new(f"p{number}")], now=NOW)
        await by_psycopg.commit()
        async with store.transaction() as joined:
            await joined.add([new(f"t{number}")], now=NOW)
            await joined.connection.execute("SELECT 1")
    assert len(await listed(store, Filter())) == 15
    await by_asyncpg.close()
    await by_psycopg.close()


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
    plain, schema = fresh_url.partition("?")[0], address_of(fresh_url).schema
    page = (root / "docs" / "sql.md").read_text(encoding="utf-8")
    picture = page.partition("## The schema")[2].partition("Times are")[0]
    relations = ask(
        plain,
        f"SELECT relname FROM pg_class WHERE relnamespace = to_regnamespace('{schema}') AND relkind IN ('r', 'S', 'i') "
        "AND relname !~ '_(pkey|seq)$'",
    )
    described = "SELECT column_name FROM information_schema.columns WHERE table_name = 'task' AND table_schema ="
    columns = ask(plain, f"{described} '{schema}'")
    names = {row[0] for row in relations} - {"task_name", "event_name"} | {row[0] for row in columns}
    assert {name for name in names if not re.search(rf"\b{name}\b", picture)} == set()


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


@pytest_asyncio.fixture
async def granted(page: Granted) -> Granted:
    """With tables, and a worker that has its rights."""
    page.run(page.migrator)
    await SCHEMA.migrate(page.url("migrator"))
    page.run(page.worker)
    return page


async def everything(url: str) -> None:
    await shared.everything(PostgresStore(url, events_kept=2))


async def test_the_rights_suffice_and_each_is_needed(granted: Granted, postgres_url: str) -> None:
    await everything(granted.url("worker"))
    grants = [one for one in granted.worker if one.startswith("GRANT")]
    single = [
        f"{right} ON {'SEQUENCE ' if 'SEQUENCE' in grant else ''}{name}"
        for grant in grants
        if "SCHEMA" not in grant
        for rights, names in re.findall(r"GRANT (.*) ON (?:SEQUENCE )?(.*) TO", grant)
        for right in rights.split(", ")
        for name in names.split(", ")
    ]
    assert len(single) == 18
    single.append(f"USAGE ON SCHEMA {granted.name}")
    for right in single:
        ask(postgres_url, f"DELETE FROM {granted.name}.task")
        ask(postgres_url, f"REVOKE {right} FROM {granted.name}_worker")
        with pytest.raises(StoreError):
            await everything(granted.url("worker"))
        ask(postgres_url, f"GRANT {right} TO {granted.name}_worker")
    ask(postgres_url, f"DELETE FROM {granted.name}.task")
    await everything(granted.url("worker"))


async def test_whoever_runs_tasks_sees_which_transactions_of_others_write(granted: Granted, postgres_url: str) -> None:
    ours = await asyncpg.connect(address_of(granted.url("worker")).dsn)
    theirs = await asyncpg.connect(address_of(postgres_url).dsn)
    seen = []
    try:
        for statement in (
            "BEGIN", f"SELECT FROM {granted.name}.task", "COMMIT",
            "BEGIN", f"SELECT FROM {granted.name}.task FOR UPDATE", "COMMIT",
            "BEGIN", f"DELETE FROM {granted.name}.task", "ROLLBACK",
        ):  # fmt: skip
            await theirs.execute(statement)
            [row] = await ours.fetch(queries_of(granted.name, "")["writers"])
            seen.append(len(row["writers"]))
    finally:
        await theirs.close()
        await ours.close()
    assert seen == [0, 0, 0, 0, 1, 0, 0, 1, 0]


async def test_whoever_runs_tasks_cannot_migrate(granted: Granted) -> None:
    ask(granted.admin, f"DELETE FROM {granted.name}.migration")
    with pytest.raises(StoreUnavailable, match=r"docs/sql\.md"):
        await SCHEMA.migrate(granted.url("worker"))


async def test_who_may_make_the_schema_needs_a_right_on_the_database(page: Granted) -> None:
    page.run(page.migrator[:1])
    with pytest.raises(StoreUnavailable, match=r"docs/sql\.md"):
        await SCHEMA.migrate(page.url("migrator"))
    ask(page.admin, f"GRANT CREATE ON DATABASE postgres TO {page.name}_migrator")
    assert await SCHEMA.migrate(page.url("migrator"))


async def test_doctor_says_what_it_may_not_see(granted: Granted) -> None:
    """Old transactions of others, which only shows to whoever may read all statistics."""

    async def said() -> list[tuple[bool, str]]:
        store = PostgresStore(granted.url("worker"))
        await store.open()
        try:
            return [(one.ok, one.what) for one in await store.diagnose()]
        finally:
            await store.close()

    assert any(not ok and "may not see" in what for ok, what in await said())
    ask(granted.admin, f"GRANT pg_read_all_stats TO {granted.name}_worker")
    assert not any("may not see" in what for _, what in await said())
