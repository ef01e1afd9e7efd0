"""A namespace of its own on Redis, for one run."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import parse_qsl, urlsplit

_REDIS = ("redis", "rediss", "unix", "redis+sentinel", "redis+cluster")


@asynccontextmanager
async def own_namespace(url: str, what: str) -> AsyncIterator[str]:
    """On Redis a fresh namespace, unless `url` names one; its keys are removed at the end."""
    parts = urlsplit(url)
    if parts.scheme not in _REDIS or "namespace" in dict(parse_qsl(parts.query)):
        yield url
        return
    url += f"{'&' if parts.query else '?'}namespace={what}-{secrets.token_hex(6)}"
    try:
        yield url
    finally:
        await _remove(url)


async def _remove(url: str) -> None:
    """Every key of it, on every server that has some."""
    from bide.stores.redis.address import address_of
    from bide.stores.redis.layout import Layout
    from bide.stores.redis.nodes import nodes_of

    address = address_of(url)
    nodes = nodes_of(address, Layout(address.namespace, address.shards or 16), patience=10)
    pattern = f"{{{address.namespace}[:}}]*"
    try:
        for link in await nodes.masters():
            cursor = b""
            while cursor != b"0":
                [(cursor, keys)] = await link.ask([("SCAN", cursor or b"0", "MATCH", pattern, "COUNT", 1000)])
                await link.ask([("UNLINK", key) for key in keys] or [("PING",)])  # one by one: they differ in slot
    finally:
        await nodes.close()
