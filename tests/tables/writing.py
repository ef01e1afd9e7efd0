"""Writing in the transaction of a row that fires."""

from __future__ import annotations

import asyncio

from bide import Row


async def write(row: Row, sql: str) -> None:
    """Run a statement in the transaction of a row, whichever driver's that is."""
    if hasattr(row.connection, "cursor") and not hasattr(row.connection, "execute"):
        async with row.connection.cursor() as cursor:
            await cursor.execute(sql)
        return
    written = row.connection.execute(sql)
    if asyncio.iscoroutine(written):
        await written
