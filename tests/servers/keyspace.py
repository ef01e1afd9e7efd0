"""Deleting the keys of one test from a server that others use too, whichever kind the URL names."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote, urlsplit

from redis import Redis, RedisCluster, Sentinel
from redis.cluster import ClusterNode


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
    split = urlsplit(url)
    login, _, hosts = split.netloc.rpartition("@")
    user, _, password = map(unquote, login.partition(":"))
    addresses = [(host, int(port)) for host, _, port in (one.rpartition(":") for one in hosts.split(","))]
    path = [part for part in split.path.split("/") if part]
    given: dict[str, Any] = {"username": user or None, "password": password or None}
    if split.scheme == "redis+cluster":
        nodes = [ClusterNode(*one) for one in addresses]  # type: ignore[no-untyped-call]
        return RedisCluster(startup_nodes=nodes, **given)
    if split.scheme == "redis+sentinel":
        watching = Sentinel(addresses)  # type: ignore[no-untyped-call]
        try:
            host, port = watching.discover_master(path[0])  # type: ignore[no-untyped-call]
        finally:
            for one in watching.sentinels:
                one.close()
        return Redis(host, port, db=int(path[1]), **given)
    return Redis(*addresses[0], db=int(path[0]), **given)
