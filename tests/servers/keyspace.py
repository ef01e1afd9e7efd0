"""Deleting the keys of one test from a server that others use too, whichever kind the URL names."""

from __future__ import annotations

from typing import Any

from bide.stores.redis.address import address_of
from bide_bench.redis_server import connect


def delete_keys(url: str, part: str) -> int:
    """Every key with `part` in its name, on every master; how many there were. O(all keys of the server).

    `url` is redis://HOST:PORT/DB, redis+cluster://HOST:PORT,HOST:PORT or redis+sentinel://HOST:PORT,.../SERVICE/DB,
    each with user:password@ where one is needed. Raises RedisError.
    """
    with client_of(url) as client:
        return delete_by(client, part)


def delete_by(client: Any, part: str) -> int:
    """See `delete_keys`. `client`: of `client_of`."""
    with client.pipeline(transaction=False) as deleting:
        for key in client.scan_iter(match=f"*{part}*", count=1_000):
            deleting.unlink(key)  # one by one, since a cluster takes several keys only if they share a slot
        return sum(deleting.execute())


def client_of(url: str) -> Any:
    return connect(address_of(url))
