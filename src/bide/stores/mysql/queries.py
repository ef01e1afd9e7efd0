"""The queries of `queries.sql` by name, written out for one database and prefix."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

from bide.stores.mysql.statements import Template
from bide.stores.named_queries import read_queries

DUE = (
    "`row`, `key`, id, group_name, due_at, at, attempt, failures, losses, token, payload, options, deadline, error, "
    "created_at"
)
"""The columns of a task that waits, if its topic is known: each costs both sides."""
COLUMNS = f"{DUE}, topic, state, planned_at, holder, wake_at, keep_until"
"""The columns of any task. See `rows`."""

TABLES = ("task", "lease", "grouped", "kept", "caller", "worker", "event", "migration")
_HERE = Path(__file__).parent
_TEMPLATES = read_queries((_HERE / "queries.sql").read_text("utf-8"))
_GIVEN = re.compile(r"VALUES\((\w+)\)")
_OR_UPDATE = re.compile(r"\s+ON DUPLICATE KEY")
_RETURNING = " RETURNING token"
_PART = re.compile(r"\{(\w+)\}")

THERE = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', SYSDATE(6))"
"""The server's clock at the very moment, on our own connections, whose time zone is UTC."""
THERE_ANYWHERE = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"
"""The server's clock when the statement began, whatever the time zone of the connection."""


class Names:
    """The names of things in one database, with one prefix."""

    def __init__(self, schema: str, prefix: str) -> None:
        self.schema = schema
        self.prefix = prefix
        self.lock = f"bide_migrates_{zlib.crc32(f'{schema}.{prefix}'.encode()):08x}"
        """The advisory lock of whoever migrates."""
        self.parts = {
            "record": COLUMNS, "due": DUE, **{table: f"`{schema}`.`{prefix}{table}`" for table in TABLES},
        }  # fmt: skip

    def write(self, template: str) -> str:
        """`template` with {name} replaced."""
        return _PART.sub(lambda found: self.parts[found[1]], template)


@lru_cache(maxsize=256)
def queries_of(schema: str, prefix: str, *, mariadb: bool = True) -> Mapping[str, Template]:
    """Every statement for tables of that name, as the server understands it."""
    names = Names(schema, prefix)
    return MappingProxyType(
        {name: Template(names.write(text if mariadb else _for_mysql(text))) for name, text in _TEMPLATES.items()}
    )


def returns_tokens(insert: Template) -> bool:
    """Tell whether that inserts and answers with the tokens at once."""
    return insert.text.endswith(_RETURNING)


def _for_mysql(text: str) -> str:
    """MySQL warns of VALUES(column), which is the one way that MariaDB has to name what would be inserted."""
    text = text.removesuffix(_RETURNING)
    if _GIVEN.search(text) is None:
        return text
    return _OR_UPDATE.sub(" AS given ON DUPLICATE KEY", _GIVEN.sub(r"given.\1", text))
