"""Store URLs of PostgreSQL, as asyncpg and libpq read them, and what of them is bide's own.

    postgresql://[user[:password]@]host[:port][,host:port...]/database        postgres:// is the same

`?schema=bide` (the default) is the schema that the tables are in, `?prefix=` (default: none) what their names begin
with, and `?pooler=transaction` says that a proxy stands between that gives each transaction another connection
(PgBouncer's `pool_mode = transaction`): then nothing is prepared, and nobody can listen. Everything else goes to the
driver: `sslmode`, `sslrootcert`, `target_session_attrs`, ...
"""

from __future__ import annotations

import re
from urllib.parse import parse_qsl, urlencode

from msgspec import Struct

from bide.core.errors import BadInput
from bide.stores.urls import parts_of

SCHEMES = ("postgresql", "postgres")
SCHEMA = "bide"
_ACCEPTED = '"postgresql://user:password@host:5432/database", with options such as "?schema=bide&prefix=shop_"'
_SCHEMA = re.compile(r"[a-z_][a-z0-9_]{0,62}")
_PLACE = re.compile(r"(?:\[[0-9A-Fa-f:.%]+\]|[^:\[\]\s]*)(?::(?P<port>[0-9]{1,5}))?")
_PREFIX = re.compile(r"(?:[a-z_][a-z0-9_]{0,39})?")


class Address(Struct, frozen=True, kw_only=True):
    """The parts of a URL."""

    dsn: str
    """For the driver: without what is ours."""
    schema: str = SCHEMA
    prefix: str = ""
    pooled: bool = False
    """A transaction-pooling proxy stands between."""
    shown: str = ""
    """Without what is secret."""


def address_of(url: str) -> Address:
    """Read a URL. Raises BadInput that names what is wrong, and never shows a password."""
    parts = parts_of(url, _ACCEPTED, schemes=SCHEMES)
    ours: dict[str, str] = {}
    theirs: list[tuple[str, str]] = []
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name in ("schema", "prefix", "pooler"):
            ours[name] = value
        else:
            theirs.append((name, value))
    schema, prefix, pooler = ours.get("schema", SCHEMA), ours.get("prefix", ""), ours.get("pooler", "session")
    if not _SCHEMA.fullmatch(schema) or schema.startswith("pg_"):
        raise BadInput("schema", schema, "1 to 63 of a-z, 0-9 and _, the first no digit, and not pg_...")
    if not _PREFIX.fullmatch(prefix):
        raise BadInput("prefix", prefix, "up to 40 of a-z, 0-9 and _, the first no digit")
    if pooler not in ("session", "transaction"):
        raise BadInput("pooler", pooler, '"transaction", or "session" (the default, also for none)')
    places = parts.netloc.rpartition("@")[2]
    for place in places.split(",") if places else ():
        _check_place(place)
    query = f"?{urlencode(theirs)}" if theirs else ""
    where = f"{places or 'localhost'}{parts.path}"
    return Address(
        dsn=f"postgresql://{parts.netloc}{parts.path}{query}",
        schema=schema,
        prefix=prefix,
        pooled=pooler == "transaction",
        shown=f"{where} {schema}.{prefix}*" if prefix else f"{where} {schema}",
    )


def _check_place(place: str) -> None:
    """Raises BadInput for what is neither "host" nor "host:port": the driver would fail over it without naming it."""
    found = _PLACE.fullmatch(place)
    if found is None or not place or not 0 < int(found["port"] or 5432) <= 65_535:
        raise BadInput("store", place, 'hosts such as "127.0.0.1:5432" or "[::1]:5432"')
