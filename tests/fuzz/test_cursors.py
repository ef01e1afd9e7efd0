"""Cursors: of the page before, damaged, of another list, or of nobody's. A page comes, or a BadInput of the cursor."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import strategies as st
from tests.fuzz.cases import NOISE, NUMBERS, changed, damaged, fuzz, refusals
from tests.fuzz.conftest import Loop

from bide.core.errors import BadInput
from bide.core.instants import At
from bide.core.names import new_id
from bide.core.records import Filter, NewTask, Page, State
from bide.ports import Store
from bide.stores.memory import MemoryStore
from bide.stores.sqlite import SqliteStore
from bide.testing.clock import FIRST_INSTANT as NOW

FILTERS = [
    Filter(), Filter(topic="t"), Filter(group="g"), Filter(topic="t", group="g"), Filter(state=State.WAITING),
    Filter(topic="t", state=State.DEAD), Filter(state=State.DONE), Filter(wake_before=NOW + 5), Filter(wake_from=0),
    Filter(topic="t", wake_from=NOW, wake_before=NOW + 3), Filter(topic="\U0001f600"),
]  # fmt: skip
ODD_PLACES: st.SearchStrategy[Any] = st.sampled_from(
    [None, True, 1.5, 2**63 - 1, 2**64 - 1, -(2**63), "", "\0", "t\0", "\U0001f600", "x" * 300, b"", [], {"a": 1}]
) | NUMBERS.map(lambda number: number % 2**64)  # fmt: skip


async def look(store: Store, draws: st.DataObject) -> None:
    """Turn a page with a cursor that may be odd."""
    where, limit = draws.draw(st.sampled_from(FILTERS)), draws.draw(st.sampled_from([1, 2, 3, 100]))
    first = await store.find(where, Page(limit=limit))
    other = await store.find(draws.draw(st.sampled_from(FILTERS)), Page(limit=2))
    cursor = draws.draw(st.sampled_from([first.cursor, first.cursor, other.cursor])) or other.cursor or ""
    cursor = draws.draw(odd_cursors(cursor))
    page = None
    with refusals() as refused:
        page = await store.find(where, Page(limit=limit, cursor=cursor))
    if page is None:
        assert str(refused[0]).startswith("cursor")
        assert cursor != first.cursor, "a sound cursor is refused"
        return
    assert len(page.tasks) <= limit
    assert all(where.admits(record) for record in page.tasks)
    if cursor == first.cursor:
        assert not {one.ref for one in first.tasks} & {one.ref for one in page.tasks}, "a task is shown twice"


def odd_cursors(cursor: str) -> st.SearchStrategy[str]:
    """It as it is, its text or bytes damaged, one of its values another one, or noise."""
    data = base64.urlsafe_b64decode(cursor)
    values: Any = None
    with suppress(msgspec.MsgspecError):
        values = msgspec.msgpack.decode(data)
    bytes_of = damaged(data) | st.sampled_from([b"\x91" * 3_000 + b"\x01", b"\xc7\xff", b"", b"\xd6\xff\0\0\0\0"])
    if isinstance(values, list) and values:
        bytes_of |= st.builds(
            lambda place, value: msgspec.msgpack.encode([*values[:place], value, *values[place + 1 :]]),
            st.integers(0, len(values) - 1),
            ODD_PLACES,
        )
    return st.just(cursor) | changed(cursor) | bytes_of.map(lambda one: base64.urlsafe_b64encode(one).decode()) | NOISE


@pytest.fixture(params=["memory", "sqlite"], scope="module")
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, loop: Loop) -> Iterator[Store]:
    """With a few tasks of each kind of list. Stores on a server read cursors as SQLite does, or have their own test."""
    store: Store = MemoryStore() if request.param == "memory" else SqliteStore(tmp_path_factory.mktemp("c") / "c.db")
    loop.finish(store.open())
    tasks = [
        NewTask(topic, f"k{number}", new_id(), At(NOW + number), b"", group)
        for topic in ("s", "t", "u")
        for number, group in enumerate((None, "g", "g", "h", None, "g"))
    ]
    loop.finish(store.add(tasks, now=NOW))
    yield store
    loop.finish(store.close())


@fuzz(250, draws=st.data())
def test_cursors(store: Store, loop: Loop, draws: st.DataObject) -> None:
    loop.finish(look(store, draws))


@pytest.mark.parametrize(
    "data",
    [
        b"\x91" * 3_000 + b"\x01",
        msgspec.msgpack.encode(["live", "t", "k", 2**64 - 1, 5]),
        msgspec.msgpack.encode(["live", "t", "k", 5, -(2**63)]) + b"\0",
        msgspec.msgpack.encode(["live", "t\0", "k", 5, 5]),
    ],
)
def test_a_cursor_that_nobody_wrote_is_refused(store: Store, loop: Loop, data: bytes) -> None:
    with pytest.raises(BadInput) as caught:
        loop.finish(store.find(Filter(state=State.WAITING), Page(cursor=base64.urlsafe_b64encode(data).decode())))
    assert caught.value.field == "cursor"
