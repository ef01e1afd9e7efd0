"""The queries of `queries.sql` by name, rendered for one schema and prefix."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

from bide.stores.named_queries import queries_beside
from bide.stores.sql.operations import COLUMNS, STATES

_AS_TEXT = COLUMNS.replace("payload, options", "encode(payload, 'base64'), encode(options, 'base64')")
"""The same columns, with bytes encoded as text."""

TABLES = ("task", "token", "caller", "worker", "event", "migration")
_TEMPLATES = queries_beside(__file__, "queries.sql")
_PART = re.compile(r"\{(\w+)(?::(\w+))?\}")


class Names:
    """The names of the database objects in one schema, with one prefix."""

    def __init__(self, schema: str, prefix: str, *, joined: bool = False) -> None:
        """`joined`: for statements in transactions that are not ours."""
        number = zlib.crc32(f"{schema}.{prefix}".encode())
        self.lock = 0x62696465_00000000 | number
        """The advisory lock for raising the token counter; the number below it is the lock for migrations."""
        self.channel = f"bide_wake_{number:08x}"
        self.parts = {
            "schema": f'"{schema}"', "prefix": prefix, "lock": str(self.lock), "channel": self.channel,
            "record": COLUMNS, "record_as_text": _AS_TEXT,
            **{table: f'"{schema}"."{prefix}{table}"' for table in TABLES},
        }  # fmt: skip
        for name, template in _TEMPLATES.items():
            if name.startswith("part_"):
                self.parts[name.removeprefix("part_")] = self.write(template)
        if joined:
            self.parts["clock"] = self.parts["joined_clock"]

    def write(self, template: str, **more: str) -> str:
        """`template` with each {name} replaced; {record:t} becomes the record's columns, qualified with `t`."""

        def part(found: re.Match[str]) -> str:
            name, of = found.groups()
            text = more[name] if name in more else self.parts[name]
            return ", ".join(f"{of}.{column}" for column in text.split(", ")) if of else text

        return _PART.sub(part, template)


MOST = (16, 256, 4_096, 65_536, 1_000_000)
"""The limits per topic for which `lease` is rendered: the planner has to see a number, see `queries.sql`."""
_FORMS: Mapping[str, Mapping[str, str]] = {
    "state": {f"_{state}": str(state) for state in range(len(STATES))},
    "most": {f"_{most}": str(most) for most in MOST},
    "taken": {
        "": "ON CONFLICT (topic, key) DO NOTHING RETURNING topic, key, token",
        "_all_new": "RETURNING NULL AS topic, NULL AS key, token",
    },
    "past": {"": "", "_past": " SKIP LOCKED"},
}
"""By placeholder, the forms of the statements that contain it: the suffix of the name, and the text."""


@lru_cache(maxsize=256)
def queries_of(schema: str, prefix: str, *, joined: bool = False) -> Mapping[str, str]:
    """Every statement, for tables in this schema with this prefix. `joined`: for transactions that are not ours."""
    names = Names(schema, prefix, joined=joined)
    written: dict[str, str] = {}
    for name, template in _TEMPLATES.items():
        if not name.startswith("part_"):
            place = next((place for place in _FORMS if f"{{{place}}}" in template), "")
            for suffix, text in _FORMS.get(place, {"": ""}).items():
                written[f"{name}{suffix}"] = names.write(template, **{place: text})
    return MappingProxyType(written)
