"""`ssl_mode`: encrypted, and with a server that can prove who it is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from tests.servers.fixtures import StartsMariaDb, not_installed
from tests.stores.certificates import certify
from tests.stores.sql.fixtures import OpensStore

from bide.core.errors import StoreUnavailable
from bide.stores.mysql import MySqlStore
from bide.testing.store_suite.base import done, put_one, settle, take
from bide_proofs.servers.mariadb import MariaDbServer
from bide_proofs.servers.process import ServerMissing


@pytest.fixture(scope="module")
def secure() -> Iterator[tuple[MariaDbServer, Path]]:
    """A server that speaks nothing but TLS, and where the certificates are: it runs as a user of its own."""
    with TemporaryDirectory(prefix="bide-tls-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        certify(folder)
        for file in folder.iterdir():
            file.chmod(0o644)
        yield from serving(folder)


def serving(folder: Path) -> Iterator[tuple[MariaDbServer, Path]]:
    options = {
        "ssl-ca": str(folder / "ca.crt"),
        "ssl-cert": str(folder / "server.crt"),
        "ssl-key": str(folder / "server.key"),
        "require-secure-transport": "ON",
    }
    try:
        with MariaDbServer(folder / "data", options=options) as server:
            yield server, folder
    except ServerMissing as error:
        not_installed(error)


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
