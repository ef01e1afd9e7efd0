"""The PostgreSQL server that its contestants share: a private one as it comes, with a database to be emptied."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from bench.contest.server import ServerFault

from bide_proofs.servers.postgres import PostgresServer, binary
from bide_proofs.servers.process import ServerFailed, ServerMissing

_NAME = "bench"
_AS_IT_COMES = {"fsync": "on", "shared_buffers": "128MB", "deadlock_timeout": "1s"}
"""What the tests' servers have otherwise."""
_EVERYTHING = r"""
SELECT format('SELECT t::text FROM %I.%I AS t', schemaname, tablename) FROM pg_tables
WHERE schemaname NOT IN ('pg_catalog', 'information_schema')
\gexec
"""


class Database:
    """One database on it, by the `psql` that comes with the server, so that this needs no library."""

    kind = "postgres"

    def __init__(self, url: str, version: str) -> None:
        self.url = f"{url.rpartition('/')[0]}/{_NAME}"
        self.version = version
        self._server = url

    async def empty(self) -> None:
        """Made anew, without tables."""
        await psql(self._server, f"DROP DATABASE IF EXISTS {_NAME} WITH (FORCE);\nCREATE DATABASE {_NAME};\n")

    async def holds(self, payloads: set[str]) -> set[str]:
        """Those of `payloads` that are still in some table, as text or as bytes."""
        everything = await psql(self.url, _EVERYTHING)
        return {one for one in payloads if one in everything or one.encode().hex() in everything}


async def psql(url: str, script: str) -> str:
    """What it prints. Raises ServerFault."""
    process = await asyncio.create_subprocess_exec(
        *(binary("psql"), "-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-d", url),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    said, errors = await process.communicate(script.encode())
    if process.returncode:
        raise ServerFault(f"psql: {errors.decode(errors='replace').strip()}")
    return said.decode()


@asynccontextmanager
async def database_in(directory: Path) -> AsyncIterator[Database]:
    """A server of our own, with its data below `directory`. Raises ServerFault."""
    try:
        server = PostgresServer(directory / "postgres", options=_AS_IT_COMES)
        await asyncio.to_thread(server.start)
    except (ServerMissing, ServerFailed) as error:
        raise ServerFault(str(error)) from None
    try:
        yield Database(server.url, (await psql(server.url, "SHOW server_version;\n")).split()[0])
    finally:
        await asyncio.to_thread(server.stop)
