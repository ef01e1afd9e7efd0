"""Cursors that fuzzing found to end in another error than one that names the cursor."""

from __future__ import annotations

import base64
from pathlib import Path

import msgspec
import pytest

from bide.core.errors import BadInput
from bide.core.records import Filter, Page, State
from bide.ports import Store
from bide.stores.memory import MemoryStore
from bide.stores.sqlite import SqliteStore


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
@pytest.mark.parametrize(
    "data",
    [
        b"\x91" * 3_000 + b"\x01",
        msgspec.msgpack.encode(["live", "t", "k", 2**64 - 1, 5]),
        msgspec.msgpack.encode(["live", "t", "k", 5, -(2**63)]) + b"\0",
        msgspec.msgpack.encode(["live", "t\0", "k", 5, 5]),
    ],
)
async def test_a_cursor_that_nobody_wrote_is_refused(kind: str, data: bytes, tmp_path: Path) -> None:
    store: Store = MemoryStore() if kind == "memory" else SqliteStore(tmp_path / "tasks.db")
    await store.open()
    try:
        with pytest.raises(BadInput) as caught:
            await store.find(Filter(state=State.WAITING), Page(cursor=base64.urlsafe_b64encode(data).decode()))
    finally:
        await store.close()
    assert caught.value.field == "cursor"
