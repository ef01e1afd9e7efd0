"""What the trials share that kill processes under load, and judge what is left: how they run, and what they report."""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from bide.app import Bide
from bide.core.errors import BideError
from bide.core.records import State

_SHOWN = 10
"""Cases of each kind of wrong that are shown."""
WrongByKind = Mapping[str, Sequence[object]]
"""What was found to be wrong, by kind."""
PATIENCE = 120.0
"""Seconds after which what has to come to an end is taken for hung, and for wrong. It is no bar for a machine that is
busy with other things: how long something took is in the report, for people to read."""


def parser_of(name: str, about: str | None) -> argparse.ArgumentParser:
    """For `python -m bide_proofs.NAME`."""
    return argparse.ArgumentParser(prog=f"python -m bide_proofs.{name}", description=about)


def not_in_memory(parser: argparse.ArgumentParser, url: str) -> None:
    """Ends the program if no other process could see the store."""
    if urlsplit(url).scheme == "memory":
        parser.error("no other process can see what is in memory: give sqlite:///file.db or redis://host:6379/0")


def tried(name: str, run: Callable[[Path], Coroutine[Any, Any, tuple[dict[str, Any], WrongByKind]]]) -> int:
    """Run it in a folder of its own, print its report, and show what was wrong; the exit code."""
    with tempfile.TemporaryDirectory(prefix=f"bide-{name}-") as folder:
        try:
            report, wrong = asyncio.run(run(Path(folder)))
        except BideError as error:
            sys.stderr.write(f"{error}\n")
            return 2
    for kind, cases in wrong.items():
        for case in cases[:_SHOWN]:
            sys.stderr.write(f"{kind}: {case}\n")
    sys.stdout.write(json.dumps(report, indent=2) + "\n")
    return 1 if any(wrong.values()) else 0


def percentiles(lengths: Sequence[float]) -> dict[str, float]:
    """Of sorted lengths."""
    if not lengths:
        return {}
    parts = {"p50": 0.5, "p99": 0.99, "p999": 0.999, "most": 1.0}
    return {name: round(lengths[min(len(lengths) - 1, int(part * len(lengths)))], 2) for name, part in parts.items()}


async def live_tasks(app: Bide, topic: str) -> int:
    """How many tasks wait or are being delivered."""
    tally = await app.tally()
    return tally.number(topic, State.WAITING) + tally.number(topic, State.LEASED)


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
    from bide.stores.redis.topology import nodes_of

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
