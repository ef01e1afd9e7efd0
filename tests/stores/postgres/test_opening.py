"""A connection that is given up before it is made."""

from __future__ import annotations

import asyncio
import gc

import asyncpg
import pytest
from tests.waiting import until

from bide.core.names import new_id
from bide.stores.postgres.address import address_of
from bide.stores.postgres.dialect import connect


async def test_a_connection_that_is_given_up_while_it_gets_its_settings_is_closed(url: str) -> None:
    """One that is left open is told of when it is collected, as a ResourceWarning, and those are errors here."""
    address, name = address_of(url), f"slow {new_id()}"
    watching = await asyncpg.connect(address.dsn)
    try:
        slow = {"application_name": f"'{name}'; SELECT pg_sleep(600)"}
        connecting = asyncio.create_task(connect(address, within=60, session=slow))
        sleeping = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep' AND query ~ $1"
        await until(lambda: watching.fetchval(sleeping, name), "the settings to take long")
        assert not connecting.done()
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting
        del connecting
        gc.collect()
        await watching.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = $1", name
        )
    finally:
        await watching.close()
