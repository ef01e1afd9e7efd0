"""The schema and its versions: numbered migrations, each run once, by one client at a time.

Only a program that may create tables migrates. A program that runs tasks checks the schema, and refuses one that is
missing or older. It accepts a newer one, since a migration only adds things that older code can ignore.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from bide.core.errors import StoreMismatch
from bide.ports import Finding
from bide.stores.named_queries import read_statements
from bide.stores.sql.dialect import Dialect, plain

PATIENCE = 30.0
"""Seconds that connecting may take, and waiting for another client's migration."""
_NAME = re.compile(r"(\d{4})_(\w+)\.sql")
_DONE = "INSERT INTO {migration} (number, name, checksum) VALUES (%d, '%s', '%s')"
T = TypeVar("T")


class Migration(NamedTuple):
    """One step of the schema, from a file."""

    number: int
    name: str
    text: str

    @property
    def checksum(self) -> str:
        return sha256(self.text.encode()).hexdigest()


class SqlSchema(ABC):
    """The tables of a store on one kind of server, and the migrations that make them."""

    def __init__(self, dialect: Dialect, folder: Path, book: str) -> None:
        """`folder`: where the migrations are. `book`: the statement that creates the table of applied migrations."""
        self.dialect = dialect
        self._folder = folder
        self._book = book

    @cached_property
    def known(self) -> Sequence[Migration]:
        """All migrations, in order."""
        found = []
        for path in sorted(self._folder.glob("*.sql")):
            named = _NAME.fullmatch(path.name)
            assert named is not None, path.name
            found.append(Migration(int(named[1]), named[2], path.read_text("utf-8")))
        return tuple(found)

    @property
    def wanted(self) -> int:
        """The version that this code needs."""
        return self.known[-1].number

    async def migrate(self, url: str) -> list[str]:
        """Create or upgrade the schema at `url`; return the names of the steps done. Safe to call concurrently.

        Needs the right to create tables in the schema, and to create the schema if it does not exist.
        Raises StoreUnavailable, StoreMismatch.
        """

        async def apply(connection: Any, address: Any) -> list[str]:
            async with self._lock(connection, address):
                version, missing = await self._missing(connection, address)  # no other client changes it now
                for statement in missing:
                    await connection.ask(statement)
            return [f"{one.number:04} {one.name}" for one in self.known if one.number > version]

        return await self._asked(url, apply)

    async def plan(self, url: str) -> list[str]:
        """The statements that `migrate` would run now. Raises StoreUnavailable, StoreMismatch."""
        _, missing = await self._asked(url, self._missing)
        return missing

    async def versions(self, url: str) -> tuple[int, int]:
        """The version in the database, and the one that this code needs: `bide migrate --check`.

        Raises StoreUnavailable, StoreMismatch.
        """
        return await self._asked(url, self.version), self.wanted

    async def version(self, connection: Any, address: Any) -> int:
        """The version in the database, 0 for none. Raises StoreMismatch if a migration there differs from ours."""
        checksums = {one.number: one.checksum for one in self.known}
        version = 0
        for number, checksum in await self._done(connection, address):
            if number in checksums and checksums[number] != checksum:
                raise StoreMismatch(
                    f"{address.shown}: migration {number} was made by another version of its file; this schema was "
                    "written by a bide that was never released, or by hand: give another schema or prefix"
                )
            version = number
        return version

    async def check(self, connection: Any, address: Any) -> None:
        """Raise StoreMismatch, with advice, if the schema is missing or older than this code."""
        version = await self.version(connection, address)
        if version < self.wanted:
            known = f"its schema is version {version}, this bide works with {self.wanted}"
            what = known if version else "no bide schema there"
            raise StoreMismatch(
                f"{address.shown}: {what}; run `bide migrate` with a user who may create tables (it only adds, and "
                "other processes may go on)"
            )

    async def finding(self, connection: Any, address: Any) -> Finding:
        """The finding of `doctor` on the schema version."""
        found = await self.version(connection, address)
        return Finding(found >= self.wanted, f"schema version {found}", "run `bide migrate`", severe=True)

    def statements(self, address: Any, since: int = 0) -> list[str]:
        """The statements of `migrate` after version `since`, for an existing schema, such as to run them by hand."""
        write = self.dialect.names(address.schema, address.prefix).write
        written = [write(self._book)] if since == 0 else []
        for one in self.known:
            if one.number > since:
                written += [write(text) for text in read_statements(one.text)]
                written.append(write(_DONE) % (one.number, one.name, one.checksum))
        return written

    async def _missing(self, connection: Any, address: Any) -> tuple[int, list[str]]:
        """The version in the database, and the statements still to run, including the creation of the schema."""
        made = await self._making(connection, address)
        version = await self.version(connection, address)
        return version, made + self.statements(address, version)

    async def _asked(self, url: str, ask: Callable[[Any, Any], Awaitable[T]]) -> T:
        """Run `ask` on a new connection."""
        address = self.dialect.address_of(url)
        try:
            connection = await self._connect(address)
            try:
                async with self._apart(connection):
                    return await ask(connection, address)
            finally:
                await connection.end(within=PATIENCE)
        except self.dialect.away as error:
            raise plain(self.dialect.meaning(error, address.shown)) from error

    # --- the server's part

    async def _connect(self, address: Any) -> Any:
        return await self.dialect.connect(address, within=PATIENCE)

    def _apart(self, connection: Any) -> AbstractAsyncContextManager[Any]:
        """The transaction around the whole migration, if the server can roll back the creation of tables."""
        return nullcontext()

    @abstractmethod
    def _lock(self, connection: Any, address: Any) -> AbstractAsyncContextManager[None]:
        """The lock held during a migration. Raises StoreUnavailable."""

    @abstractmethod
    async def _done(self, connection: Any, address: Any) -> Iterable[tuple[int, str]]:
        """The number and checksum of each applied migration; none if the table of migrations does not exist."""

    @abstractmethod
    async def _making(self, connection: Any, address: Any) -> list[str]:
        """The statement that creates the schema, if it does not exist."""


def oldest_transaction(age: int, cleaner: str, seen: str) -> Finding:
    """The finding of `doctor` on the oldest transaction, `age` seconds old, which blocks the server's `cleaner`."""
    return Finding(
        age < 600,
        f"the oldest transaction is {age} s old" if age else "no old transaction",
        f"it keeps {cleaner} from cleaning up, and leases get slower: end it ({seen})",
    )
