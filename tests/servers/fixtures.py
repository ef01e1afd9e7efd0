"""The fixtures that give tests real servers: shared ones by URL, private ones to be killed.

A shared server is started at its first use, or is the one that TEST_REDIS_URL, TEST_REDIS_CLUSTER_URL,
TEST_REDIS_SENTINEL_URL, TEST_POSTGRES_URL, TEST_MYSQL_URL or TEST_RABBITMQ_URL names; who uses it keeps to keys with
`redis_namespace` in them, to schemas whose names begin with `postgres_schema` or `mysql_schema`, or to queues with
names of its own. Where the programs are missing a test is skipped with the reason, and fails where the variable CI is
set: there nothing may be passed over in silence. RocketMQ alone has to be named, by TEST_ROCKETMQ_URL, wherever it is.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeAlias, TypeVar

import pytest
from tests.servers.clean_schemas import CleanSchemas, MySqlSchemas, PostgresSchemas
from tests.servers.keyspace import client_of, delete_by
from tests.servers.sharing import LentServers, servers_of

from bide_proofs.servers import mariadb
from bide_proofs.servers.mariadb import MariaDbServer
from bide_proofs.servers.postgres import PostgresServer, ask
from bide_proofs.servers.process import ServerMissing
from bide_proofs.servers.redis import RedisServer
from bide_proofs.servers.redis_replicas import RedisCluster
from bide_proofs.servers.server import Running, ServerClock
from bide_proofs.servers.services import OF_REDIS, SharedServers

Server = TypeVar("Server", bound=Running)
Server_co = TypeVar("Server_co", bound=Running, covariant=True)


class Starts(Protocol[Server_co]):
    """Starts a private server, with the options of its class, which the test may pause and kill; it ends with it."""

    def __call__(self, **options: Any) -> Server_co: ...


StartsRedis: TypeAlias = Starts[RedisServer]
StartsPostgres: TypeAlias = Starts[PostgresServer]
StartsMariaDb: TypeAlias = Starts[MariaDbServer]


class Borrowed:
    """What a test took of clean schemas, to be given back when it is over."""

    def __init__(self, schemas: CleanSchemas) -> None:
        self._schemas = schemas
        self._taken: dict[object, str] = {}

    def url(self, place: object = None) -> str:
        """Of the schema for this place: the same for the same place."""
        if place not in self._taken:
            self._taken[place] = self._schemas.take()
        return self._taken[place]

    def give_back(self, place: object) -> None:
        """Before the test is over; another test, or the same, gets it empty."""
        self._schemas.give_back(self._taken.pop(place))

    def close(self) -> None:
        for place in list(self._taken):
            self.give_back(place)


def not_installed(error: ServerMissing) -> NoReturn:
    if os.environ.get("CI"):
        pytest.fail(str(error))
    pytest.skip(str(error))


@contextmanager
def running(server: Server) -> Iterator[Server]:
    """The server while it runs. Where its program is missing the test is skipped."""
    try:
        with server:
            yield server
    except ServerMissing as error:
        not_installed(error)


@pytest.fixture(scope="session")
def shared_servers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SharedServers | LentServers]:
    servers = servers_of(request.config, tmp_path_factory.mktemp("servers"))
    yield servers
    servers.stop()


def _shared(kind: str) -> Any:
    """A fixture: the URL of a server that others use too."""

    @pytest.fixture(scope="session")
    def url(shared_servers: SharedServers | LentServers) -> str:
        try:
            return shared_servers.url(kind)
        except ServerMissing as error:
            not_installed(error)

    return url


redis_url = _shared("redis")
"""redis://HOST:PORT/0"""
redis_cluster_url = _shared("cluster")
"""redis+cluster://HOST:PORT,..."""
redis_sentinel_url = _shared("sentinel")
"""redis+sentinel://HOST:PORT,.../SERVICE/0"""
_REDIS_URLS = {"redis": "redis_url", "cluster": "redis_cluster_url", "sentinel": "redis_sentinel_url"}
postgres_url = _shared("postgres")
"""postgresql://USER@HOST:PORT/DATABASE"""
mysql_url = _shared("mysql")
"""mysql://USER@HOST:PORT/DATABASE"""
mysql_replica_url = _shared("mysql_replica")
"""mysql://USER@HOST:PORT/DATABASE?replica=HOST:PORT, of a server and one that follows it."""
rabbitmq_url = _shared("rabbitmq")
"""amqp://guest:guest@HOST:PORT/"""


def _private(make: Callable[..., Running]) -> Any:
    """A fixture: starts one private server after another, each in a folder of its own; they end with the test."""

    @pytest.fixture
    def starts(tmp_path: Path) -> Iterator[Starts[Running]]:
        with ExitStack() as started:
            numbers = count(1)

            def start(**options: Any) -> Running:
                return started.enter_context(running(make(tmp_path / f"{make.__name__}-{next(numbers)}", **options)))

            yield start

    return starts


redis_server = _private(RedisServer)
postgres_server = _private(PostgresServer)
mariadb_server = _private(MariaDbServer)
starts_cluster = _private(RedisCluster)


@pytest.fixture
def redis_cluster(starts_cluster: Starts[RedisCluster]) -> RedisCluster:
    """A private cluster, in 2 s."""
    return starts_cluster()


@pytest.fixture(scope="session")
def _redis_clients() -> Iterator[Callable[[str], Any]]:
    """A client of each URL, made at its first use: one of a cluster takes 10 ms."""
    with ExitStack() as opened:
        yield cache(lambda url: opened.enter_context(client_of(url)))


@pytest.fixture
def redis_namespace(
    request: pytest.FixtureRequest, shared_servers: SharedServers | LentServers, _redis_clients: Callable[[str], Any]
) -> Iterator[str]:
    """A name of [a-z0-9] that is nobody else's; every key with it in its name is deleted after the test.

    Of the servers whose fixtures the test has used.
    """
    name = "t" + secrets.token_hex(5)
    yield name
    for kind, url in shared_servers.urls.items():
        if kind in OF_REDIS and _REDIS_URLS[kind] in request.fixturenames:
            delete_by(_redis_clients(url), name)


@pytest.fixture
def server_clock() -> ServerClock:
    """A clock to be set: `redis_server(clock=server_clock)`."""
    try:
        return ServerClock()
    except ServerMissing as error:
        not_installed(error)


@pytest.fixture
def postgres_schema(postgres_url: str) -> Iterator[str]:
    """What the names of a test's schemas begin with, nobody else's; they are dropped after it."""
    name = "t" + secrets.token_hex(5)
    yield name
    drop = (
        # a test that failed may hold a lock, which is not waited for without end
        "DO $$ DECLARE one text; BEGIN PERFORM set_config('lock_timeout', '60s', true); "
        f"FOR one IN SELECT nspname FROM pg_namespace WHERE nspname LIKE '{name}%' LOOP "
        "EXECUTE format('DROP SCHEMA %I CASCADE', one); END LOOP; END $$"
    )
    ask(postgres_url, drop)


@pytest.fixture(scope="session")
def _postgres_schemas(postgres_url: str) -> Iterator[PostgresSchemas]:
    with closing(PostgresSchemas(postgres_url)) as schemas:
        yield schemas


@pytest.fixture
def postgres_schemas(_postgres_schemas: PostgresSchemas) -> Iterator[Borrowed]:
    """Schemas with bide's tables, empty, for a test that does not care how they came about."""
    with closing(Borrowed(_postgres_schemas)) as borrowed:
        yield borrowed


@pytest.fixture
def mysql_schema(mysql_url: str) -> Iterator[str]:
    """What the names of a test's databases begin with, nobody else's; they are dropped after it."""
    name = "t" + secrets.token_hex(5)
    yield name
    for (database,) in mariadb.ask(mysql_url, f"SHOW DATABASES LIKE '{name}%'"):
        mariadb.ask(mysql_url, f"DROP DATABASE `{database}`")


@pytest.fixture(scope="session")
def _mysql_schemas(mysql_url: str) -> Iterator[MySqlSchemas]:
    with closing(MySqlSchemas(mysql_url)) as schemas:
        yield schemas


@pytest.fixture
def mysql_schemas(_mysql_schemas: MySqlSchemas) -> Iterator[Borrowed]:
    """Databases with bide's tables, empty, for a test that does not care how they came about."""
    with closing(Borrowed(_mysql_schemas)) as borrowed:
        yield borrowed


@pytest.fixture(scope="session")
def rocketmq_url() -> str:
    """rocketmq://HOST:PORT of the proxy of a broker that runs already, or the test is skipped."""
    url = os.environ.get("TEST_ROCKETMQ_URL")
    if not url:
        pytest.skip("TEST_ROCKETMQ_URL names no broker: scripts/services --with rocketmq run -- COMMAND")
    return url
