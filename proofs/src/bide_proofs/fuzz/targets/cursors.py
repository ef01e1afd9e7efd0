"""Cursors: of the page before, damaged, of another list, or of nobody's. A page comes, or a BadInput of the cursor."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import msgspec

from bide.core.errors import BadInput
from bide.core.names import new_id
from bide.core.records import At, Filter, NewTask, Page, State
from bide.ports import Store
from bide.stores.memory import MemoryStore
from bide.stores.sqlite import SqliteStore
from bide.testing.clock import FIRST_INSTANT as NOW
from bide_proofs.fuzz.drawing import Draw
from bide_proofs.fuzz.running import Case, Target, check, clear

_FILTERS = (
    Filter(), Filter(topic="t"), Filter(group="g"), Filter(topic="t", group="g"), Filter(state=State.WAITING),
    Filter(topic="t", state=State.DEAD), Filter(state=State.DONE), Filter(wake_before=NOW + 5), Filter(wake_from=0),
    Filter(topic="t", wake_from=NOW, wake_before=NOW + 3), Filter(topic="\U0001f600"),
)  # fmt: skip


async def filled(store: Store) -> None:
    """With a few tasks of each kind of list."""
    await store.add(
        [NewTask(topic, f"k{number}", new_id(), At(NOW + number), b"", group)
         for topic in ("s", "t", "u") for number, group in enumerate((None, "g", "g", "h", None, "g"))], now=NOW,
    )  # fmt: skip


async def page(store: Store, draw: Draw) -> None:
    where, limit = draw.choice(_FILTERS), draw.of(1, 2, 3, 100)
    found = await store.find(where, Page(limit=limit))
    cursor = found.cursor
    if cursor is None or draw.chance(0.2):
        cursor = (await store.find(draw.choice(_FILTERS), Page(limit=2))).cursor or ""
    sound = cursor
    kind = draw.random()
    if kind < 0.3:
        cursor = draw.changed(cursor)
    elif kind < 0.5:
        cursor = base64.urlsafe_b64encode(draw.damaged(base64.urlsafe_b64decode(cursor))).decode()
    elif kind < 0.8 and cursor:
        cursor = base64.urlsafe_b64encode(_other_values(draw, base64.urlsafe_b64decode(cursor))).decode()
    elif kind < 0.85:
        cursor = base64.urlsafe_b64encode(
            draw.of(b"\x91" * 3_000 + b"\x01", b"\xc7\xff", b"", b"\xd6\xff\0\0\0\0")
        ).decode()
    elif kind < 0.9:
        cursor = draw.noise()
    draw.note((where, limit, cursor))
    try:
        got = await store.find(where, Page(limit=limit, cursor=cursor))
    except BadInput as error:
        clear(error)
        check(error.field == "cursor", f"the cursor is wrong, and {error.field} is named")
        check(cursor != sound or sound != found.cursor, "a sound cursor is refused")
        return
    check(len(got.tasks) <= limit, "a page is never longer than asked for")
    for record in got.tasks:
        check(where.admits(record), f"not asked for: {record}")
    if cursor == found.cursor:
        check(not {one.ref for one in found.tasks} & {one.ref for one in got.tasks}, "a task is shown twice")


def _other_values(draw: Draw, data: bytes) -> bytes:
    """The same places of a list, with other values."""
    try:
        values = msgspec.msgpack.decode(data)
    except (msgspec.MsgspecError, ValueError):
        return data
    if isinstance(values, list) and values:
        place = draw.randrange(len(values))
        values[place] = draw.of(
            None, True, 1.5, -1, 2**63 - 1, 2**64 - 1, -(2**63), "", "\0", "t\0", "\U0001f600", "x" * 300, b"", [],
            {"a": 1}, draw.number() % 2**64, draw.noise().encode("utf-8", "replace").decode(),
        )  # fmt: skip
    return msgspec.msgpack.encode(values)


@asynccontextmanager
async def on(make: Callable[[Path], Store], folder: Path) -> AsyncIterator[Case]:
    store = make(folder)
    await store.open()
    try:
        await filled(store)
        yield partial(page, store)
    finally:
        await store.close()


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[Case]:
    """On the stores that need no server; those on a server have the readings of SQLite's, or their own target."""
    async with AsyncExitStack() as stack:
        makers: list[Callable[[Path], Store]] = [
            lambda _: MemoryStore(),
            lambda folder: SqliteStore(folder / "cursors.db"),
        ]
        cases = [await stack.enter_async_context(on(make, folder)) for make in makers]

        async def case(draw: Draw) -> None:
            await draw.choice(cases)(draw)

        yield case


TARGETS = (Target("cursors", "cursors of lists, in memory and in SQLite", opened),)
