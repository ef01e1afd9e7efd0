"""The queries of `queries.sql` by name, rendered for one schema and prefix."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

from bide.stores.named_queries import read_queries
from bide.stores.sql.operations import COLUMNS

_AS_TEXT = COLUMNS.replace("payload, options", "encode(payload, 'base64'), encode(options, 'base64')")
"""The same columns, with bytes encoded as text."""

TABLES = ("task", "token", "caller", "worker", "event", "migration")
LAST_STATE = 4
_HERE = Path(__file__).parent
_TEMPLATES = read_queries((_HERE / "queries.sql").read_text("utf-8"))
_PART = re.compile(r"\{(\w+)(?::(\w+))?\}")


class Names:
    """The names of the database objects in one schema, with one prefix."""

    def __init__(self, schema: str, prefix: str, *, joined: bool = False) -> None:
        """`joined`: for statements in transactions that are not ours."""
        self.schema = schema
        self.prefix = prefix
        number = zlib.crc32(f"{schema}.{prefix}".encode())
        self.lock = 0x62696465_00000000 | number
        """The advisory lock for raising the token counter; the number below it is the lock for migrations."""
        self.channel = f"bide_wake_{number:08x}"
        self.parts = {
            "schema": f'"{schema}"', "prefix": prefix, "lock": str(self.lock), "channel": self.channel,
            "record": COLUMNS, "record_as_text": _AS_TEXT,
            **{table: f'"{schema}"."{prefix}{table}"' for table in TABLES},
        }  # fmt: skip
        clock = "part_joined_clock" if joined else "part_clock"
        parts = {"clock": clock, "gate": "part_gate", "answer": "part_answer", "new_token": "part_new_token"}
        self.parts |= {name: self.write(_TEMPLATES[part]) for name, part in parts.items()}

    def write(self, template: str, **more: str) -> str:
        """`template` with each {name} replaced; {record:t} becomes the record's columns, qualified with `t`."""

        def part(found: re.Match[str]) -> str:
            name, of = found.groups()
            text = more[name] if name in more else self.parts[name]
            return ", ".join(f"{of}.{column}" for column in text.split(", ")) if of else text

        return _PART.sub(part, template)


@lru_cache(maxsize=256)
def queries_of(schema: str, prefix: str, *, joined: bool = False) -> Mapping[str, str]:
    """Every statement, for tables in this schema with this prefix. `page_of_state` exists once per state: `..._0`.

    `joined`: for transactions that are not ours.
    """
    names = Names(schema, prefix, joined=joined)
    written: dict[str, str] = {}
    for name, template in _TEMPLATES.items():
        if name.startswith("part_"):
            continue
        if "{state}" in template:
            for state in range(LAST_STATE + 1):
                written[f"{name}_{state}"] = names.write(template, state=str(state))
        elif "{taken}" in template:
            some = "ON CONFLICT (topic, key) DO NOTHING RETURNING topic, key, token"
            written[name] = names.write(template, taken=some)
            written[f"{name}_all_new"] = names.write(template, taken="RETURNING NULL AS topic, NULL AS key, token")
        elif "{most}" in template:
            for most in MOST:
                written[f"{name}_{most}"] = names.write(template, most=str(most))
        else:
            written[name] = names.write(template)
    return MappingProxyType(written)


MOST = (16, 256, 4_096, 65_536, 1_000_000)
"""The limits per topic for which `lease` is rendered: the planner has to see a number, see `queries.sql`."""
