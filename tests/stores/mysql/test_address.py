"""Addresses, TLS and rights on MySQL and MariaDB."""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from tests.servers.fixtures import StartsMariaDb, running
from tests.stores.certificates import certify
from tests.stores.sql.everything import everything
from tests.stores.sql.fixtures import OpensStore

from bide.core.errors import BadInput, StoreError, StoreUnavailable
from bide.stores.mysql import MySqlStore
from bide.stores.mysql.connection import Address, address_of
from bide.stores.mysql.schema import SCHEMA
from bide.testing.store_suite.base import done, put_one, settle, take
from bide_proofs.servers.mariadb import MariaDbServer


def test_every_part_is_read() -> None:
    assert address_of("mysql://u:p%40@db:3307,[::1]/shop?schema=tasks&prefix=a_&ssl_mode=required") == Address(
        hosts=(("db", 3307), ("::1", 3306)),
        user="u",
        password="p@",
        database="shop",
        schema="tasks",
        prefix="a_",
        options={"ssl_mode": "required"},
        shown="db:3307,[::1]/tasks a_*",
    )
    plain = address_of("mariadb:///shop?socket=/run/mysqld/mysqld.sock")
    assert (plain.schema, plain.prefix, plain.socket) == ("shop", "bide_", "/run/mysqld/mysqld.sock")
    assert address_of("mysql://h?schema=tasks").database == ""


@pytest.mark.parametrize(
    ("url", "field"),
    [
        ("postgresql://h/d", "store"), ("mysql://h/d#x", "store"), ("mysql://h", "store"), ("mysql://h:x/d", "store"),
        ("mysql://h:0/d", "store"), ("mysql://h/a`b", "store"), ("mysql://h/d?schema=a.b", "schema"),
        ("mysql://h/d?schema=", "schema"), ("mysql://h/d?prefix=1", "prefix"), ("mysql://h/d?prefix=", "prefix"),
        ("mysql://h/d?prefix=a-b", "prefix"), ("mysql://h/d?charset=utf8", "store"),
        ("mysql://h/d?ssl_mode=maybe", "ssl_mode"), ("mysql://h/d?ssl_mode=disabled&ssl_ca=/a", "ssl_mode"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(url: str, field: str) -> None:
    with pytest.raises(BadInput) as refused:
        address_of(url)
    assert refused.value.field == field


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(BadInput, match=r"charset=.*prefix, schema, socket, ssl_ca"):
        address_of("mysql://h/d?charset=utf8")


def test_how_a_connection_is_encrypted(tmp_path: Path) -> None:
    assert address_of("mysql://h/d").tls() is None
    required = address_of("mysql://h/d?ssl_mode=required").tls()
    assert (required.verify_mode, required.check_hostname) == (ssl.CERT_NONE, False)
    checked = address_of("mysql://h/d?ssl_mode=verify_identity").tls()
    assert (checked.verify_mode, checked.check_hostname) == (ssl.CERT_REQUIRED, True)
    with pytest.raises(BadInput, match="readable certificate files"):
        address_of(f"mysql://h/d?ssl_ca={tmp_path}/none.pem").tls()


@pytest.fixture(scope="module")
def secure() -> Iterator[tuple[MariaDbServer, Path]]:
    """A server that speaks nothing but TLS, and where the certificates are: it runs as a user of its own."""
    with TemporaryDirectory(prefix="bide-tls-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        certify(folder)
        for file in folder.iterdir():
            file.chmod(0o644)
        options = {
            "ssl-ca": str(folder / "ca.crt"),
            "ssl-cert": str(folder / "server.crt"),
            "ssl-key": str(folder / "server.key"),
            "require-secure-transport": "ON",
        }
        with running(MariaDbServer(folder / "data", options=options)) as server:
            yield server, folder


@pytest.mark.parametrize(
    "query", ["ssl_mode=required", "ssl_ca={0}/ca.crt", "ssl_mode=verify_identity&ssl_ca={0}/ca.crt"]
)
async def test_tasks_go_over_tls(secure: tuple[MariaDbServer, Path], open_store: OpensStore, query: str) -> None:
    server, folder = secure
    store = await open_store(f"{server.url}?{query.format(folder)}")
    await put_one(store)
    assert await settle(store, done(await take(store)))


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("", "Access denied"),
        ("?ssl_mode=verify_ca", "certificate verify failed"),
        ("?ssl_ca={0}/other/ca.crt", "certificate verify failed"),
    ],
    ids=["no TLS", "nobody vouches", "somebody else vouches"],
)
async def test_who_is_not_vouched_for_is_refused(
    secure: tuple[MariaDbServer, Path], open_store: OpensStore, query: str, said: str
) -> None:
    server, folder = secure
    other = folder / "other"
    if not other.exists():
        other.mkdir()
        certify(other)
    with pytest.raises(StoreUnavailable, match=said):
        await open_store(f"{server.url}{query.format(folder)}", patience=0.3)


async def test_a_server_without_tls_is_refused_where_that_is_wanted(mariadb_server: StartsMariaDb) -> None:
    store = MySqlStore(f"{mariadb_server(options={'skip-ssl': '1'}).url}?ssl_mode=required", patience=0.2)
    with pytest.raises(StoreUnavailable, match=r"TLS|SSL"):
        await store.open()


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
    assert len(single) == 28
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
