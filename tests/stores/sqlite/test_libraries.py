"""Which versions of SQLite have the WAL-reset race closed."""

from __future__ import annotations

import pytest

from bide.stores.sqlite.database import mapped_libraries
from bide.stores.sqlite.threads import resets_safely


@pytest.mark.parametrize(
    ("version", "safe"),
    [
        ((3, 40, 1), False), ((3, 44, 5), False), ((3, 44, 6), True), ((3, 45, 0), False), ((3, 50, 6), False),
        ((3, 50, 7), True), ((3, 51, 0), False), ((3, 51, 2), False), ((3, 51, 3), True), ((3, 53, 0), True),
    ],
)  # fmt: skip
def test_safe_versions(version: tuple[int, int, int], safe: bool) -> None:
    assert resets_safely(version) is safe


def test_the_library_in_use_is_found() -> None:
    assert any("sqlite3" in name for name in mapped_libraries())
