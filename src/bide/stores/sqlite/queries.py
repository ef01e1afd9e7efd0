"""The queries of `queries.sql` by name, read once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

RECORD_COLUMNS = (
    "topic, key, id, group_name, state, due_at, at, planned_at, attempt, failures, losses, token, holder, "
    "payload, options, deadline, error, created_at, woke_at, keep_until, row"
)
"""In the order of `Record`'s fields, `at` and `woke_at` in the places of `wake_at` and `finished_at`; then `row`."""

_HERE = Path(__file__).parent
_NAMED = re.compile(r"^-- name: (\w+)$", re.MULTILINE)
_COMMENT = re.compile(r"^--.*\n?", re.MULTILINE)


def read_queries(text: str) -> Mapping[str, str]:
    """The statements of `text`, each under the name in the `-- name:` line above it; its comments are left out."""
    _, *parts = _NAMED.split(text)
    queries = {}
    for name, body in zip(parts[::2], parts[1::2], strict=True):
        if name in queries:
            raise ValueError(f"two queries are named {name}")
        queries[name] = _COMMENT.sub("", body).strip().replace("{record}", RECORD_COLUMNS)
    return MappingProxyType(queries)


def read_statements(text: str) -> list[str]:
    """The statements of a schema file: those between lines of `--;`, without their comments."""
    return [_COMMENT.sub("", part).strip() for part in text.split("--;\n")]


QUERIES = read_queries((_HERE / "queries.sql").read_text("utf-8"))
SCHEMA = tuple(read_statements((_HERE / "schema.sql").read_text("utf-8")))
