"""Whose file this is, of which version, and how an older one becomes a current one.

The tables live beside yours: what makes a file a bide store is the table `bide_meta`. Creating and migrating happen in
one transaction under the write lock, so that twenty processes that open a new file at once make one schema.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence

from bide.core.errors import StoreMismatch
from bide.stores.sqlite.connection import patiently
from bide.stores.sqlite.errors import lost_part
from bide.stores.sqlite.queries import QUERIES, SCHEMA

VERSION = 1
"""What this code reads and writes."""

STEPS: Mapping[int, Sequence[str]] = {}
"""The statements that lead from each older version to the next: STEPS[1] makes version 2 of version 1."""

_STRICT_SINCE = (3, 37, 0)


def found_version(connection: sqlite3.Connection | sqlite3.Cursor) -> int:
    """The version of the schema in the file; 0 when there is none."""
    if not connection.execute(QUERIES["has_meta"]).fetchone()[0]:
        return 0
    found = connection.execute(QUERIES["version"]).fetchone()
    if found is None or type(found[0]) is not int:
        raise lost_part(connection, "the version of its schema is gone")
    version: int = found[0]
    return version


def prepare(
    connection: sqlite3.Connection, path: str, *, wanted: int = VERSION, steps: Mapping[int, Sequence[str]] = STEPS
) -> None:
    """Create the schema, or bring it to `wanted`. Raises StoreMismatch for a newer one."""
    if found_version(connection) == wanted:
        return
    patiently(connection, "BEGIN IMMEDIATE")
    try:
        version = found_version(connection)  # again: somebody else may have been first
        if version > wanted:
            raise StoreMismatch(
                f"{path}: its schema is version {version}, this code knows {wanted}: it was written by a newer bide; "
                "update this one"
            )
        if version == 0:
            for statement in SCHEMA:
                connection.execute(_for_this_library(statement))
            version = VERSION
        while version < wanted:
            for statement in steps[version]:
                connection.execute(statement)
            version += 1
        connection.execute(QUERIES["put_version"], (version,))
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def _for_this_library(statement: str) -> str:
    return statement if sqlite3.sqlite_version_info >= _STRICT_SINCE else statement.removesuffix(" STRICT")
