"""Rows and keys that are left in a store after a soak, by table or kind, and how many may be.

Each bide process that was there may leave a row of history for each minute (kept for a day), one for each handler that
it told of, the last answers of its calls, and its presence until that ends by itself. The event log is capped, and the
record of the namespace stays. Nothing else may be there: no body, index entry, group, or line of what is to be
forgotten.
"""

from __future__ import annotations

import asyncio
import re
import sqlite3
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import closing
from typing import Any, TypeAlias

from bide.cli.bench.place import Place, SqlitePlace
from bide.cli.bench.redis_server import RedisServer
from bide.cli.bench.sql_server import MysqlServer, PostgresServer
from bide.core.names import RESERVED_TOPICS

EVENTS = 10_000
"""Lines of the event log, which is cut back when it is a tenth over."""
_HIDDEN = "hidden tasks"
_TASKS = "tasks"
_BY_KIND = re.compile(r"\{[^}]*\}:(layout|workers|events|event-refs)$|\{[^}]*:[0-9]+\}:([a-z])(?::(.*))?$", re.DOTALL)
_Ask: TypeAlias = Callable[[str], Awaitable[Sequence[Any]]]
"""The rows of a statement."""


async def remains(place: Place) -> dict[str, int]:
    """How many of what; the store is not open in this process any more. O(everything that is in the store)."""
    if isinstance(place, RedisServer):
        return await asyncio.to_thread(_redis, place)
    if isinstance(place, PostgresServer):
        schema = place.address.schema
        tables = f"SELECT tablename FROM pg_tables WHERE schemaname = '{schema}'"
        return await _rows(place.rows, tables, f'"{schema}"."{{}}"')
    if isinstance(place, MysqlServer):
        schema = place.address.schema
        tables = f"SELECT table_name FROM information_schema.tables WHERE table_schema = '{schema}'"
        return await _rows(place.rows, tables, f"`{schema}`.`{{}}`", "CONVERT(topic USING utf8mb4)")
    assert isinstance(place, SqlitePlace)
    with closing(sqlite3.connect(place.path)) as database:

        async def ask(statement: str) -> Sequence[Any]:
            return database.execute(statement).fetchall()

        tables = "SELECT name FROM sqlite_master WHERE type = 'table' AND name LIKE 'bide\\_%' ESCAPE '\\'"
        return await _rows(ask, tables, "{}")


async def _rows(ask: _Ask, tables: str, named: str, topic: str = "topic") -> dict[str, int]:
    """Rows by table; of tasks, and of members of groups, those of bide's own topics apart."""
    found: dict[str, int] = {}
    for [table] in await ask(tables):
        name, short = named.format(table), str(table).removeprefix("bide_")
        if short not in ("task", "grouped"):
            [[found[short]]] = await ask(f"SELECT count(*) FROM {name}")
            continue
        split = {_TASKS: 0, _HIDDEN: 0}
        for its, number in await ask(f"SELECT {topic}, count(*) FROM {name} GROUP BY topic"):
            split[_HIDDEN if its in RESERVED_TOPICS else _TASKS] += number
        found |= split if short == "task" else {"members of groups": split[_TASKS]}
    return found


def too_much(found: Mapping[str, int], *, minutes: float, processes: int) -> list[str]:
    """List all that may not be there, or not so much of it."""
    hidden = processes * (int(minutes) + 3) + 8
    calls = 12 * processes  # kinds of call; on Redis for each shard
    allowed = {
        _HIDDEN: hidden, "event": EVENTS * 11 // 10, "events": 1, "event-refs": 1, "caller": calls + 1,
        "answers": 16 * calls, "layout": 1, "workers": 1, "worker": processes, "token": 1, "meta": 8,
        "migration": 8,
    }  # fmt: skip
    wrong = []
    for name, number in found.items():
        most = allowed.get(name, 0)
        if number > most:
            wrong.append(f"{number} {name} are left, where {most} may be")
    return wrong


def _redis(server: RedisServer) -> dict[str, int]:
    """Keys by kind. Of hidden tasks the bodies are counted; of other topics every key is one too many."""
    found: Counter[str] = Counter({_TASKS: 0, _HIDDEN: 0})
    for client in server.masters():
        for key in client.scan_iter(match=f"{{{server.namespace}[:}}]*", count=1000):
            found.update(_kind_of(key.decode(errors="replace"), key, client))
    return dict(found)


def _kind_of(name: str, key: bytes, client: Any) -> dict[str, int]:
    match = _BY_KIND.match(name)
    if match is None:
        return {f"keys such as {name}": 1}
    common, letter, topic = match.groups()
    if common:
        return {common: 1}
    if letter == "t":
        others = [one for one in client.smembers(key) if one.decode(errors="replace") not in RESERVED_TOPICS]
        return {"names of topics": len(others)}
    if letter == "a":
        return {"answers": 1} if client.pttl(key) >= 0 else {"answers that do not end by themselves": 1}
    if topic is not None and topic in RESERVED_TOPICS:
        return {_HIDDEN: int(client.hlen(key))} if letter == "b" else {}
    if letter == "g":
        members = (member.split(b"\0")[1].decode(errors="replace") for member in client.zrange(key, 0, -1))
        return {"members of groups": sum(topic not in RESERVED_TOPICS for topic in members)}
    if letter in "ni":
        return {}  # a counter, and counts, of each shard
    return {f"keys {letter}:{topic or ''}": 1}
