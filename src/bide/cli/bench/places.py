"""The place of a benchmark by its URL: a store of its own, or a part of one that is there."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

from bide.cli.bench import redis_server, sql_server
from bide.cli.bench.place import MemoryPlace, Place, SqlitePlace
from bide.core.errors import BadInput

_ACCEPTED = (
    '"memory:", "sqlite:" (a file of its own), "sqlite:///relative.db", "sqlite:////absolute/path.db", '
    '"redis://host:port/0" (a namespace of its own), "postgresql://host:port/database" or "mysql://..." (a schema of '
    "its own)"
)


@asynccontextmanager
async def place_of(url: str) -> AsyncIterator[Place]:
    """The place that `url` names; files and parts of a server that were not there before are removed at the end.

    Raises BadInput, and for a server MissingExtra and StoreUnavailable.
    """
    parts = urlsplit(url)
    if url == "memory:":
        yield MemoryPlace(url)
    elif url == "sqlite:":
        with tempfile.TemporaryDirectory(prefix="bide-bench-") as directory:
            yield SqlitePlace(Path(directory) / "bench.db", owned=True)
    elif parts.scheme == "sqlite" and not parts.netloc and len(parts.path) > 1 and not parts.query:
        place = SqlitePlace(Path(unquote(parts.path.removeprefix("/"))), owned=False)
        before = set(place.files())
        place.owned = place.path not in before
        try:
            yield place
        finally:
            if place.owned:
                for made in set(place.files()) - before:
                    with suppress(FileNotFoundError):
                        made.unlink()
    elif parts.scheme in (*redis_server.SCHEMES, *sql_server.SCHEMES):
        async with AsyncExitStack() as stack:
            server: redis_server.RedisServer | sql_server.SqlServer
            if parts.scheme in redis_server.SCHEMES:
                server = stack.enter_context(redis_server.redis_server(url))
            else:
                server = await stack.enter_async_context(sql_server.sql_server(url))
            server.owned = server.url != url or await server.is_empty()
            if server.owned:
                stack.push_async_callback(server.clear)
                await server.make()
            yield server
    else:
        raise BadInput("store", parts.scheme or "text without a scheme", _ACCEPTED)
