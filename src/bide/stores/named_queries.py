"""SQL statements in separate files: each has a name, and comments above it that give the reason for its form."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

_NAMED = re.compile(r"^-- name: (\w+)$", re.MULTILINE)
_COMMENT = re.compile(r"^--.*\n?", re.MULTILINE)


def read_queries(text: str) -> Mapping[str, str]:
    """The statements of `text` without comments, by the name in the `-- name:` line above each."""
    _, *parts = _NAMED.split(text)
    queries = {}
    for name, body in zip(parts[::2], parts[1::2], strict=True):
        if name in queries:
            raise ValueError(f"two queries are named {name}")
        queries[name] = _COMMENT.sub("", body).strip()
    return MappingProxyType(queries)


def queries_beside(module: str, name: str) -> Mapping[str, str]:
    """The statements of the file of this name in the folder of a module, see `read_queries`."""
    return read_queries(Path(module).with_name(name).read_text("utf-8"))


def read_statements(text: str) -> list[str]:
    """The statements of a schema file, which `--;` lines separate, without comments."""
    return [_COMMENT.sub("", part).strip() for part in text.split("--;\n")]
