"""Statements in files of their own: each under a name, with the reason for its form in the comments above it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

_NAMED = re.compile(r"^-- name: (\w+)$", re.MULTILINE)
_COMMENT = re.compile(r"^--.*\n?", re.MULTILINE)


def read_queries(text: str) -> Mapping[str, str]:
    """The statements of `text`, each under the name in the `-- name:` line above it; its comments are left out."""
    _, *parts = _NAMED.split(text)
    queries = {}
    for name, body in zip(parts[::2], parts[1::2], strict=True):
        if name in queries:
            raise ValueError(f"two queries are named {name}")
        queries[name] = _COMMENT.sub("", body).strip()
    return MappingProxyType(queries)


def read_statements(text: str) -> list[str]:
    """The statements of a schema file: those between lines of `--;`, without their comments."""
    return [_COMMENT.sub("", part).strip() for part in text.split("--;\n")]
