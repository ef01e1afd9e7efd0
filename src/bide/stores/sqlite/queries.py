"""The queries of `queries.sql` by name, read once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from bide.stores.named_queries import read_queries, read_statements

__all__ = ["QUERIES", "RECORD_COLUMNS", "SCHEMA", "read_queries", "read_statements"]

RECORD_COLUMNS = (
    "topic, key, id, group_name, state, due_at, at, planned_at, attempt, failures, losses, token, holder, "
    "payload, options, deadline, error, created_at, woke_at, keep_until, row"
)
"""In the order of `Record`'s fields, `at` and `woke_at` in the places of `wake_at` and `finished_at`; then `row`."""

_HERE = Path(__file__).parent


def _queries() -> Mapping[str, str]:
    named = read_queries((_HERE / "queries.sql").read_text("utf-8"))
    return MappingProxyType({name: text.replace("{record}", RECORD_COLUMNS) for name, text in named.items()})


QUERIES = _queries()
SCHEMA = tuple(read_statements((_HERE / "schema.sql").read_text("utf-8")))
