"""A server that is not there: what is said is for a person, on every store that needs one."""

from __future__ import annotations

import pytest

from bide import Bide, StoreUnavailable
from bide_proofs.servers.process import free_port


@pytest.mark.parametrize(
    "url",
    [
        "redis://{there}/0",
        "redis+cluster://{there}",
        "postgresql://u@{there}/d",
        "mysql://u@{there}/d",
        "http://{there}",
    ],
)
async def test_a_refused_connection_asks_whether_the_server_runs(url: str) -> None:
    there = f"127.0.0.1:{free_port()}"
    with pytest.raises(
        StoreUnavailable, match=rf"{there}.*: cannot be reached: connection refused; is it running\?"
    ) as caught:
        async with Bide(url.format(there=there)) as app:
            await app.get("t", "k")
    assert "Errno" not in str(caught.value)
