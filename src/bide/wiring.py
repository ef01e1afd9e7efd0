"""The only place that names concrete stores: from a URL to a store, importing drivers when they are needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from bide.core.errors import BadInput, MissingExtra
from bide.core.table_source import TableSource
from bide.engine.terms import Retention, Terms
from bide.ports import Store, Table
from bide.settings import Settings

if TYPE_CHECKING:
    from bide.sinks.traced import Tracing
    from bide.sinks.webhook import WebhookPost

_ACCEPTED = (
    'a store URL: "sqlite:///relative.db", "sqlite:////absolute/path.db", "redis://host:6379/0", '
    '"redis+sentinel://...", "redis+cluster://...", "postgresql://host:5432/database", '
    '"mysql://host:3306/database", "http://host:8420" (a service) or "memory:"'
)
_REDIS = ("redis", "rediss", "unix", "redis+cluster", "redis+sentinel")
_POSTGRES = ("postgresql", "postgres")
_MYSQL = ("mysql", "mariadb")
_HTTP = ("http", "https")


def store_maker(url: str, settings: Settings, *, own_clock: bool = True) -> Callable[[], Store]:
    """A function that makes the store that `url` names (without opening it). Raises BadInput, MissingExtra.

    `own_clock`: a store that has a clock goes by it; else by the caller's, which may run faster.
    """
    parts = urlsplit(url)
    if parts.scheme == "memory" and not parts.netloc and not parts.path:
        return _memory()
    if parts.scheme == "sqlite":
        return _sqlite(url, settings)
    if parts.scheme in _REDIS:
        return _redis(url, own_clock=own_clock)
    if parts.scheme in _POSTGRES:
        return _postgres(url, settings, own_clock=own_clock)
    if parts.scheme in _MYSQL:
        return _mysql(url, own_clock=own_clock)
    if parts.scheme in _HTTP:
        return _http(url, settings, own_clock=own_clock)
    raise BadInput("store", without_secrets(url), _ACCEPTED)


def table_at(url: str, source: TableSource, connections: int, settings: Settings, *, own_clock: bool = True) -> Table:
    """A table to be watched in the database that `url` names, which needs nothing of bide's. As `store_maker` else."""
    scheme = urlsplit(url).scheme
    if scheme == "sqlite":
        from bide.stores.sqlite.table import SqliteTable, TableFile

        file = TableFile(_path_of(url, "database"), synchronous=settings.sqlite_synchronous)
        return SqliteTable(source, file, stores_own=False)
    if scheme in _POSTGRES:
        try:
            from bide.stores.postgres.table import PostgresTable
        except ModuleNotFoundError as error:
            if error.name != "asyncpg":
                raise
            raise MissingExtra("postgres", f"{scheme}:") from error

        return PostgresTable(url, source, connections=connections, clock="server" if own_clock else "caller")
    if scheme in _MYSQL:
        try:
            from bide.stores.mysql.table import MySqlTable
        except ModuleNotFoundError as error:
            if error.name != "asyncmy":
                raise
            raise MissingExtra("mysql", f"{scheme}:") from error

        return MySqlTable(url, source, connections=connections, clock="server" if own_clock else "caller")
    accepted = '"sqlite:///path.db", "postgresql://host:5432/database" or "mysql://host:3306/database"'
    raise BadInput("database", without_secrets(url), accepted)


def webhook_post(**options: Any) -> WebhookPost:
    """What makes the sinks of webhook routes; `options` are those of `WebhookPost`. Raises MissingExtra, BadInput."""
    try:
        from bide.sinks.webhook import WebhookPost
    except ModuleNotFoundError as error:
        if error.name != "aiohttp":
            raise
        raise MissingExtra("serve", "webhooks") from error

    return WebhookPost(**options)


def terms_of(settings: Settings) -> Terms:
    """What the engine goes by."""
    return Terms(
        lease=settings.lease,
        cap=settings.max_sleep,
        concurrency=settings.concurrency,
        grace=settings.grace,
        payload_limit=settings.payload_limit,
        retention=Retention(done=settings.keep_done, cancelled=settings.keep_cancelled, dead=settings.keep_dead),
    )


def tracer() -> Tracing:
    """What traces an app. Raises MissingExtra."""
    try:
        from bide.sinks.traced import Tracing
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "opentelemetry":
            raise
        raise MissingExtra("serve", "tracing") from error

    return Tracing()


def is_traced() -> bool:
    """Whether this program has set up an OpenTelemetry SDK, so that tracing it records anything."""
    try:
        from bide.sinks.traced import sdk_is_set_up
    except ModuleNotFoundError:
        return False
    return sdk_is_set_up()


def without_secrets(url: str) -> str:
    """`url` as it may be shown: what stands before an @ could be a password."""
    scheme, colon, rest = url.partition(":")
    return f"{scheme}{colon}...@{rest.rpartition('@')[2]}" if "@" in rest else url


def _memory() -> Callable[[], Store]:
    """One timeline for the app, however often it is opened."""
    from bide.stores.memory import MemoryStore

    store = MemoryStore()
    return lambda: store


def _sqlite(url: str, settings: Settings) -> Callable[[], Store]:
    """`sqlite:///a/b.db` is relative, `sqlite:////a/b.db` absolute, as SQLAlchemy reads them."""
    from bide.stores.sqlite import SqliteStore

    path = _path_of(url, "store")
    return lambda: SqliteStore(path, synchronous=settings.sqlite_synchronous)


def _path_of(url: str, field: str) -> str:
    parts = urlsplit(url)
    path = unquote(parts.path.removeprefix("/"))
    if parts.netloc or not path or parts.query or parts.fragment:
        raise BadInput(field, without_secrets(url), _ACCEPTED)
    return path


def _redis(url: str, *, own_clock: bool) -> Callable[[], Store]:
    try:
        from bide.stores.redis import RedisStore
    except ModuleNotFoundError as error:
        if error.name not in ("redis", "hiredis"):
            raise
        raise MissingExtra("redis", url.partition(":")[0] + ":") from error

    RedisStore(url)  # what is wrong with the URL is said now, not at the first use
    return lambda: RedisStore(url, clock="server" if own_clock else "caller")


def _postgres(url: str, settings: Settings, *, own_clock: bool) -> Callable[[], Store]:
    try:
        from bide.stores.postgres import PostgresStore
    except ModuleNotFoundError as error:
        if error.name != "asyncpg":
            raise
        raise MissingExtra("postgres", url.partition(":")[0] + ":") from error

    PostgresStore(url)  # what is wrong with the URL is said now, not at the first use
    # a wake is told of up to a cap ahead: that of other workers, which may be set to sleep longer, as well as ours
    cap = max(settings.max_sleep, 1_000)
    return lambda: PostgresStore(url, clock="server" if own_clock else "caller", cap=cap)


def _mysql(url: str, *, own_clock: bool) -> Callable[[], Store]:
    try:
        from bide.stores.mysql import MySqlStore
    except ModuleNotFoundError as error:
        if error.name != "asyncmy":
            raise
        raise MissingExtra("mysql", url.partition(":")[0] + ":") from error

    MySqlStore(url)  # what is wrong with the URL is said now, not at the first use
    return lambda: MySqlStore(url, clock="server" if own_clock else "caller")


def _http(url: str, settings: Settings, *, own_clock: bool) -> Callable[[], Store]:
    """A service, which goes by a clock of its own: one that is told to go by another refuses."""
    try:
        from bide.stores.http import HttpStore
    except ModuleNotFoundError as error:
        if error.name != "aiohttp":
            raise
        raise MissingExtra("http", url.partition(":")[0] + ":") from error

    HttpStore(url, token=settings.token)  # what is wrong with the URL is said now, not at the first use
    return lambda: HttpStore(url, token=settings.token, clock="server" if own_clock else "caller")
