"""The disk is full: new work is refused, nothing that was acknowledged is lost, and once there is room it all drains.

The tables lie on a small file system of their own, while the server's log of changes has room: without that, the server
itself stops, whatever a client does. On a disk without a single free page PostgreSQL refuses a lease too, since every
change of a row is a new row to it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.stores.sql.database import Database
from tests.stores.sql.fixtures import OpensStore

from bide.core.errors import StoreFull
from bide.core.instants import At
from bide.core.records import Cancel, Move, Ref
from bide.testing.store_suite.base import HOUR, NOW, do, done, lease, look, new, put, settle_all


@pytest.fixture
def small_disk(database: Database, starts: Any) -> Iterator[tuple[str, Path]]:
    """The URL of tables on a file system of 16 MiB, and where that is."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a file system")
    server = starts()
    url, place = database.apart(server)
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", place], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        shutil.chown(place, server.account, server.account)
        database.migrate(url)
        database.move(server, place)
        yield url, place
    finally:
        server.kill()
        subprocess.run(["umount", "-l", place], check=True)


def enlarge(place: Path) -> None:
    subprocess.run(["mount", "-o", "remount,size=128m", place], check=True)


async def test_new_work_is_refused_until_there_is_room(
    database: Database, small_disk: tuple[str, Path], open_store: OpensStore
) -> None:
    url, place = small_disk
    store = await open_store(url, migrate=False)
    stored = 0
    refused: StoreFull | None = None
    while refused is None:
        try:
            stored += len(await put(store, *(new(f"{stored + n}", payload=b"x" * 100) for n in range(500))))
        except StoreFull as error:
            refused = error
    assert "free some of its disk" in str(refused)
    assert stored > 1_000
    assert await look(store, Ref("t", f"{stored}")) is None, "a batch is refused as a whole"
    assert await look(store, Ref("t", f"{stored - 1}")) is not None
    if database.name == "mysql":
        assert (await do(store, Move("t", "2", At(NOW + HOUR)))).ok, "what is there can still be worked on"
    await asyncio.to_thread(enlarge, place)
    assert (await do(store, Cancel("t", "0"))).ok
    assert (await do(store, Move("t", "1", At(NOW + HOUR)))).ok
    left = stored - 2 - (database.name == "mysql")
    while held := (await lease(store, 2_000)).tasks:
        assert all(await settle_all(store, [done(one) for one in held]))
        left -= len(held)
    assert left == 0
