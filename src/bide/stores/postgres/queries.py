"""The queries of `queries.sql` by name, written out for one schema and prefix."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

from bide.stores.named_queries import read_queries

COLUMNS = (
    "topic, key, id, group_name, state, due_at, at, planned_at, attempt, failures, losses, token, holder, "
    "payload, options, deadline, error, created_at, woke_at, keep_until, row"
)
"""In the order of `Record`'s fields, `at` and `woke_at` in the places of `wake_at` and `finished_at`; then `row`."""
_AS_TEXT = COLUMNS.replace("payload, options", "encode(payload, 'base64'), encode(options, 'base64')")
"""The same where bytes have to be text."""

TABLES = ("task", "token", "caller", "worker", "event", "migration")
LAST_STATE = 4
_HERE = Path(__file__).parent
_TEMPLATES = read_queries((_HERE / "queries.sql").read_text("utf-8"))
_PART = re.compile(r"\{(\w+)(?::(\w+))?\}")

_CLOCK = """clock AS MATERIALIZED (
    SELECT micros / 1000 AS now, micros, CASE WHEN last_value < micros THEN
        CASE WHEN pg_try_advisory_xact_lock({lock}) THEN
            CASE WHEN (SELECT last_value FROM {token}) < micros THEN setval('{token}', micros) END END END AS raised
    FROM {token}, (
        SELECT coalesce($1::bigint * 1000, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) AS micros
    ) AS told
)"""
_JOINED_CLOCK = """clock AS MATERIALIZED (
    SELECT micros / 1000 AS now, micros, CASE WHEN last_value < micros AND pg_try_advisory_lock({lock}) THEN
        CASE WHEN coalesce(
            CASE WHEN (SELECT last_value FROM {token}) < micros THEN setval('{token}', micros) END, micros
        ) > 0 THEN CASE WHEN pg_advisory_unlock({lock}) THEN micros END END END AS raised
    FROM {token}, (
        SELECT coalesce($1::bigint * 1000, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) AS micros
    ) AS told
)"""
"""In a transaction of somebody else's, which may be long: who raises the counter lets go of the lock at once."""
_GATE = """gate AS MATERIALIZED (
    SELECT 1 AS opened FROM (VALUES (1)) AS one (one) LEFT JOIN LATERAL (
        SELECT number FROM {caller} WHERE name = $2::text AND number < $3::bigint FOR UPDATE
    ) AS mine ON true
    WHERE $2::text IS NULL OR mine.number IS NOT NULL
)"""
_NEW_TOKEN = "greatest(nextval('{token}'), clock.micros, clock.raised)"


class Names:
    """The names of things in one schema, with one prefix."""

    def __init__(self, schema: str, prefix: str, *, joined: bool = False) -> None:
        """`joined`: for statements in a transaction that is not ours."""
        self.schema = schema
        self.prefix = prefix
        number = zlib.crc32(f"{schema}.{prefix}".encode())
        self.lock = 0x62696465_00000000 | number
        """The advisory lock of whoever raises the counter; one less is that of whoever migrates."""
        self.channel = f"bide_wake_{number:08x}"
        self.parts = {
            "schema": f'"{schema}"', "prefix": prefix, "lock": str(self.lock), "channel": self.channel,
            "record": COLUMNS, "record_as_text": _AS_TEXT,
            **{table: f'"{schema}"."{prefix}{table}"' for table in TABLES},
        }  # fmt: skip
        self.parts |= {
            "clock": self.write(_JOINED_CLOCK if joined else _CLOCK),
            "gate": self.write(_GATE),
            "new_token": self.write(_NEW_TOKEN),
        }

    def write(self, template: str, **more: str) -> str:
        """`template` with {name} replaced; {record:t} is the record's columns, each of `t`."""

        def part(found: re.Match[str]) -> str:
            name, of = found.groups()
            text = more[name] if name in more else self.parts[name]
            return ", ".join(f"{of}.{column}" for column in text.split(", ")) if of else text

        return _PART.sub(part, template)


@lru_cache(maxsize=256)
def queries_of(schema: str, prefix: str, *, joined: bool = False) -> Mapping[str, str]:
    """Every statement for tables of that name. `page_of_state` and `count_state` come once for each state: `..._0`.

    `joined`: for transactions that are not ours.
    """
    names = Names(schema, prefix, joined=joined)
    written: dict[str, str] = {}
    for name, template in _TEMPLATES.items():
        if "{state}" in template:
            for state in range(LAST_STATE + 1):
                written[f"{name}_{state}"] = names.write(template, state=str(state))
        elif "{taken}" in template:
            written[name] = names.write(template, taken="ON CONFLICT (topic, key) DO NOTHING")
            written[f"{name}_all_new"] = names.write(template, taken="")
        elif "{most}" in template:
            for most in MOST:
                written[f"{name}_{most}"] = names.write(template, most=str(most))
        else:
            written[name] = names.write(template)
    return MappingProxyType(written)


MOST = (16, 256, 4_096, 65_536, 1_000_000)
"""How many of a topic one form of the lease may take: the planner has to see a number, see `queries.sql`."""
