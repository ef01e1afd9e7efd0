"""`rediss://`: everything over TLS, notifications too; a server that cannot prove who it is, is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from tests.servers.fixtures import running
from tests.stores.certificates import certify
from tests.stores.redis.conftest import OpensStore
from tests.waiting import until

from bide.core.errors import StoreUnavailable
from bide.core.instants import In
from bide.core.names import new_id
from bide.core.records import NewTask, OutcomeKind, Settlement
from bide_proofs.servers.process import HOST, free_port
from bide_proofs.servers.redis import RedisServer

NOW = 0
"""Which the server's own clock goes before."""


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The URL of a server that wants certificates of its clients, and where these are."""
    folder = tmp_path_factory.mktemp("tls")
    certify(folder)
    port = free_port()
    options = {
        "tls-port": str(port),
        "tls-cert-file": str(folder / "server.crt"),
        "tls-key-file": str(folder / "server.key"),
        "tls-ca-cert-file": str(folder / "ca.crt"),
    }
    with running(RedisServer(folder / "data", options=options)):
        yield f"rediss://{HOST}:{port}/0", folder


@pytest_asyncio.fixture(autouse=True)
async def no_socket_left() -> AsyncIterator[None]:
    """TLS may say goodbye after its store has closed: a loop that ends before leaves a socket to a later test."""
    yield
    sockets = asyncio.get_running_loop()._selector.get_map()  # type: ignore[attr-defined]
    await until(lambda: len(sockets) <= 1, "every socket to be closed but the loop's own")


def proofs(folder: Path) -> str:
    return f"&ssl_ca_certs={folder / 'ca.crt'}&ssl_certfile={folder / 'server.crt'}&ssl_keyfile={folder / 'server.key'}"


async def test_tasks_and_notifications_go_over_tls(secure: tuple[str, Path], open_store: OpensStore) -> None:
    url, folder = secure
    store = await open_store(url, query=proofs(folder))
    writing = await open_store(url, query=proofs(folder))
    heard: list[str] = []
    await store.listen(["t"], lambda topic, wake: heard.append(topic))
    await writing.add([NewTask("t", "k", new_id(), In(0), b"{}")], now=NOW)
    await until(lambda: bool(heard), "being told")
    [held] = (await store.lease({"t": 10}, now=NOW, until=NOW + 60_000, holder="w")).tasks
    assert await store.settle([Settlement("t", "k", held.token, OutcomeKind.DONE)], now=NOW) == [True]


@pytest.mark.parametrize(
    ("query", "said"),
    [("", "certificate verify failed"), ("&ssl_cert_reqs=none", HOST)],  # the server just hangs up on us
    ids=["nobody vouches for the server", "nobody vouches for us"],
)
async def test_who_is_not_vouched_for_is_refused(
    secure: tuple[str, Path], open_store: OpensStore, query: str, said: str
) -> None:
    with pytest.raises(StoreUnavailable, match=said):
        await open_store(secure[0], query=query, patience=0.3)


async def test_no_tls_there(secure: tuple[str, Path], open_store: OpensStore) -> None:
    """As if the port were mistaken: an error that names it, not a hang."""
    plain = secure[0].replace("rediss://", "redis://")
    with pytest.raises(StoreUnavailable, match=plain.removeprefix("redis://").removesuffix("/0")):
        await open_store(plain, patience=0.3, silence=5.0)
