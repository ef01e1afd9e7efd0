"""Makes stores from URLs. This is the only module that names concrete stores; it imports drivers on demand."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, unquote, urlsplit

from bide import extensions
from bide.core.errors import BadInput, MissingExtra, StoreUnavailable
from bide.core.table_source import TableSource
from bide.engine.config import MOST, EngineConfig, Retention, Retentions
from bide.ports import Sink, Store, Table
from bide.settings import Settings
from bide.stores.urls import parts_of

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
_SECRET_OPTION = re.compile(r"([?&][^=&#]*(?:pass|secret|token)[^=&#]*=)[^&#]*", re.IGNORECASE)


@contextmanager
def _extra(extra: str, needed_for: str, *modules: str) -> Iterator[None]:
    """Around the import of an optional package. Raises MissingExtra if one of `modules` is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in modules:
            raise
        raise MissingExtra(extra, needed_for) from error


def store_maker(url: str, settings: Settings, *, own_clock: bool = True) -> Callable[[], Store]:
    """A function that makes the store that `url` names (without opening it). Raises BadInput, MissingExtra.

    `own_clock`: True: a store with its own clock uses it; False: it uses the caller's clock, which may run faster.
    """
    parts = _parts(url, "store", _ACCEPTED)
    if parts.scheme == "memory" and not parts.netloc and not parts.path:
        from bide.stores.memory import MemoryStore

        store = MemoryStore()  # one set of tasks for the app, however often it is opened
        return lambda: store
    if parts.scheme == "sqlite":
        from bide.stores.sqlite import SqliteStore

        path = os.path.abspath(_path_of(url, "store"))  # now: the working directory may change later
        return partial(SqliteStore, path, synchronous=settings.sqlite_synchronous)
    if parts.scheme in (*_REDIS, *_POSTGRES, *_MYSQL, *_HTTP):
        make = partial(_server_store(parts.scheme, settings), url)
        make()  # so that a wrong URL is reported now, not at the first use
        return partial(make, clock="server" if own_clock else "caller")
    others = extensions.installed(extensions.STORES)
    if parts.scheme in others:
        make = partial(extensions.make, others[parts.scheme], url)
        make()  # so that a wrong URL is reported now, not at the first use
        return make
    more = "".join(f', "{scheme}:..."' for scheme in sorted(others))
    raise BadInput("store", without_secrets(url), _ACCEPTED + more)


def address_of(url: str) -> Any:
    """The address of a server, read from its URL, for a plain driver. Raises BadInput, MissingExtra."""
    scheme = _parts(url, "store", _ACCEPTED).scheme
    if scheme in _REDIS:
        with _extra("redis", f"{scheme}:", "redis", "hiredis"):
            from bide.stores.redis import address as of_redis

        return of_redis.address_of(url)
    if scheme in _POSTGRES:
        with _extra("postgres", f"{scheme}:", "asyncpg"):
            from bide.stores.postgres import connection as of_postgres

        return of_postgres.address_of(url)
    with _extra("mysql", f"{scheme}:", "asyncmy"):
        from bide.stores.mysql import connection as of_mysql

    return of_mysql.address_of(url)


def tables_at(
    url: str, source: TableSource, connections: int, settings: Settings, *, own_clock: bool = True
) -> Sequence[Table]:
    """The tables of a source in the database at `url`, which needs no tables of bide. Otherwise like `store_maker`."""
    accepted = '"sqlite:///path.db", "postgresql://host:5432/database" or "mysql://host:3306/database"'
    scheme = _parts(url, "database", accepted).scheme
    if scheme == "sqlite":
        from bide.stores.sqlite.database import TableFile
        from bide.stores.sqlite.watched_table import SqliteTable

        file = TableFile(_path_of(url, "database"), synchronous=settings.sqlite_synchronous)
        return [SqliteTable(one, file) for one in source.each()]
    if scheme in _POSTGRES:
        with _extra("postgres", f"{scheme}:", "asyncpg"):
            from bide.stores.postgres.watched_table import PostgresTable

        return PostgresTable.each(url, source, connections=connections, clock="server" if own_clock else "caller")
    if scheme in _MYSQL:
        with _extra("mysql", f"{scheme}:", "asyncmy"):
            from bide.stores.mysql.watched_table import MySqlTable

        return MySqlTable.each(url, source, connections=connections, clock="server" if own_clock else "caller")
    raise BadInput("database", without_secrets(url), accepted)


def webhook_post(**options: Any) -> WebhookPost:
    """Make the `WebhookPost` of webhook routes from its `options`. Raises MissingExtra, BadInput."""
    with _extra("serve", "webhooks", "aiohttp"):
        from bide.sinks.webhook import WebhookPost

    return WebhookPost(**options)


def sink_at(url: str, field: str) -> Sink:
    """The sink of the distribution with the scheme of `url` (`bide.extensions`). Raises BadInput, SetupError."""
    others = extensions.installed(extensions.SINKS)
    scheme = url.partition(":")[0]
    if scheme not in others:
        known = ", ".join(sorted(others)) or "none is installed"
        raise BadInput(field, without_secrets(url), f"a URL with the scheme of an installed sink ({known})")
    sink: Sink = extensions.make(others[scheme], url)
    return sink


def engine_config(settings: Settings) -> EngineConfig:
    """The engine's configuration, with a limit on the number of kept ended tasks."""
    kept = Retention(done=settings.keep_done, cancelled=settings.keep_cancelled, dead=settings.keep_dead)
    return EngineConfig(
        lease=settings.lease, cap=settings.max_sleep, concurrency=settings.concurrency, grace=settings.grace,
        max_past=settings.max_past, payload_limit=settings.payload_limit, history=settings.history == "on",
        traces=settings.traces == "on", retentions=Retentions(kept, most=MOST),
    )  # fmt: skip


def tracer() -> Tracing:
    """Make the instrument that traces an app. Raises MissingExtra."""
    with _extra("serve", "tracing", "opentelemetry"):
        from bide.sinks.traced import Tracing

    return Tracing()


def is_traced() -> bool:
    """True if this program has set up an OpenTelemetry SDK, so that tracing has an effect."""
    try:
        with _extra("serve", "tracing", "opentelemetry"):
            from bide.sinks.traced import sdk_is_set_up
    except MissingExtra:
        return False
    return sdk_is_set_up()


def _parts(url: str, field: str, accepted: str) -> SplitResult:
    """Split a URL. Raises BadInput for text that is not a URL, and for a URL in which part of a password would be read
    as another part and so be shown."""
    parts = parts_of(url, accepted, field=field)
    behind = f"{parts.path}#{parts.fragment}&{parts.query}"
    if (
        parts.scheme in (*_REDIS, *_POSTGRES, *_MYSQL)
        and parts.netloc
        and any("@" in option.partition("=")[0] for option in behind.split("&"))
    ):
        raise BadInput(
            field, "a URL with an @ after its hosts", 'a password with %2F for "/", %3F for "?", %23 for "#"'
        )
    return parts


def hide_options(url: str) -> str:
    """`url` without the passwords among its options, such as `?password=` of PostgreSQL."""
    return _SECRET_OPTION.sub(r"\1***", url)


def without_secrets(url: str) -> str:
    """`url` without the text before an @, which could be a password, and without those among its options."""
    scheme, colon, rest = url.partition(":")
    return hide_options(f"{scheme}{colon}...@{rest.rpartition('@')[2]}" if "@" in rest else url)


def _server_store(scheme: str, settings: Settings) -> Callable[..., Store]:
    """The store class for a server of this kind, with its settings applied. Raises MissingExtra."""
    if scheme in _REDIS:
        with _extra("redis", f"{scheme}:", "redis", "hiredis"):
            from bide.stores.redis import RedisStore

        return RedisStore
    if scheme in _POSTGRES:
        with _extra("postgres", f"{scheme}:", "asyncpg"):
            from bide.stores.postgres import PostgresStore

        # wakes are notified up to a cap ahead; other workers may be set to sleep longer than this one
        return partial(PostgresStore, cap=max(settings.max_sleep, 1_000))
    if scheme in _MYSQL:
        with _extra("mysql", f"{scheme}:", "asyncmy"):
            from bide.stores.mysql import MySqlStore

        return MySqlStore
    with _extra("http", f"{scheme}:", "aiohttp"):
        from bide.stores.http import HttpStore

    # a service uses its own clock and refuses to use another
    return partial(HttpStore, token=settings.token)


def check_there(url: str) -> None:
    """Raise StoreUnavailable for a SQLite file that does not exist, which opening would create."""
    if _parts(url, "store", _ACCEPTED).scheme == "sqlite" and not os.path.exists(path := _path_of(url, "store")):
        raise StoreUnavailable(
            f"{os.path.abspath(path)}: there is no such file; `bide schedule`, `recurring add`, `pause`, `token add`, "
            "`work`, `serve` and `migrate` create it"
        )


def _path_of(url: str, field: str) -> str:
    parts = urlsplit(url)
    path = unquote(parts.path.removeprefix("/"))  # `sqlite:///a/b.db` is relative, `sqlite:////a/b.db` absolute
    if parts.netloc or path in ("", ":memory:") or parts.query or parts.fragment:
        accepted = (
            'a path alone, without host and options: "sqlite:///relative.db" or "sqlite:////absolute/path.db"; '
            'for a store without a file, "memory:"'
        )
        raise BadInput(field, without_secrets(url), accepted)
    return path
