"""SQLite files that were damaged after everybody had let go of them, or while the newest was still in the log.

**What is accepted.** Each call either answers, or raises StoreCorrupt or StoreMismatch. What it answers is compared
with what SQLite itself reads out of the same bytes, row by row and past every index, if it finds them sound
(`PRAGMA integrity_check`): every task that is there is found, those that are due are leased or set aside as dead, and
each is as its row says. So nothing is lost *by bide*.

**What nobody can see.** SQLite keeps no checksum of a page: a bit that flips within a payload, a time or a name is read
as it now is, and a log that is gone, or ends early, takes the newest transactions along. A file whose header says that
a later SQLite wrote it is one that this SQLite does not write: it is told as StoreUnavailable, "may not be written".
"""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
from hypothesis import example
from hypothesis import strategies as st
from tests.fuzz.cases import NUMBERS, fuzz, refusals
from tests.fuzz.conftest import Loop
from tests.fuzz.playing import LATER, Kept, every, fill, payload_of, play

from bide.core.errors import StoreCorrupt, StoreMismatch, StoreUnavailable
from bide.core.records import Filter, OutcomeKind, Ref
from bide.stores.sqlite import SqliteStore

PAGE = 4096
TASKS = 60
KNOWN = [Ref(topic, f"{topic}{number}") for topic in ("t", "u") for number in range(TASKS // 2)]
ROWS = "SELECT topic, key, id, state, at, due_at, token, payload FROM bide_task NOT INDEXED"
OF_A_ROW = (
    "state = 7", "state = -1", "at = {number}", "token = {number}", "due_at = {number}, created_at = {number}",
    "id = CAST(x'ff61' AS TEXT)", "attempt = {number}", "topic = CAST(x'ff' AS TEXT)", "keep_until = {number}",
    "payload = zeroblob(3)",
)  # fmt: skip
STATEMENTS = (
    *(f"UPDATE bide_task SET {change} WHERE row = {{row}}" for change in OF_A_ROW),
    "UPDATE bide_task SET options = x'c1'", "UPDATE bide_token SET last = {number}", "DELETE FROM bide_token",
    "UPDATE bide_event SET kind = 'odd'", "UPDATE bide_event SET what = CAST(x'ff' AS TEXT) WHERE line = 2",
    "UPDATE bide_worker SET topics = x'91a1ff'", "DELETE FROM bide_meta", "UPDATE bide_meta SET value = 2",
    "DROP TABLE bide_event", "DROP TABLE bide_token", "DROP INDEX bide_task_time", "DROP TABLE bide_worker",
    "ALTER TABLE bide_task RENAME TO gone", "ALTER TABLE bide_task RENAME COLUMN payload TO body",
)  # fmt: skip
"""What another program might do."""


class Files(dict[str, bytes]):
    """The bytes of a database, by what ends the names of its files."""

    def __repr__(self) -> str:  # of all of them it would be too long for a failing case to be told
        return f"<Files of {[len(data) for data in self.values()]} bytes>"


class Seen(NamedTuple):
    """The rows that SQLite reads out of a file, by name, and whether it finds nothing wrong with it."""

    rows: dict[Ref, tuple[Any, ...]]
    sound: bool

    @property
    def whole(self) -> bool:
        return self.sound and {ref: row[7] for ref, row in self.rows.items()} == {
            ref: payload_of(ref.key) for ref in KNOWN
        }


@pytest.fixture(scope="module")
def sound(loop: Loop, tmp_path_factory: pytest.TempPathFactory) -> list[Files]:
    """Of a file that was closed, and of one whose newest transactions are in the log: both acknowledged."""
    return loop.finish(filled(tmp_path_factory.mktemp("sound")))


async def filled(folder: Path) -> list[Files]:
    store = SqliteStore(folder / "sound.db")
    await store.open()
    await fill(store, KNOWN, (None, "g", "h"))
    with_log = bytes_in(folder)
    await store.close()
    return [bytes_in(folder), with_log]


def bytes_in(folder: Path) -> Files:
    paths = {suffix: folder / f"sound.db{suffix}" for suffix in ("", "-wal")}
    return Files({suffix: path.read_bytes() for suffix, path in paths.items() if path.exists()})


class Damage(NamedTuple):
    """As disks, file systems and people do it."""

    how: str
    log: bool
    """To the log, if there is one."""
    place: int
    size: int
    seed: int
    """Of the bytes that are there then; 0: nothing but zeros."""

    def stuff(self, size: int) -> bytes:
        return Random(self.seed).randbytes(size) if self.seed else bytes(size)

    def done_to(self, files: Files) -> dict[str, bytes]:
        which = "-wal" if self.log and "-wal" in files else ""
        data = bytearray(files[which])
        place = self.place % len(data)
        start = place // PAGE * PAGE
        match self.how:
            case "bits":
                random = Random(self.seed)
                for at in (place, *(random.randrange(len(data)) for _ in range(self.size % 20))):
                    data[at] ^= 1 << random.randrange(8)
            case "run":
                end = min(len(data), place + self.size)
                data[place:end] = self.stuff(end - place)
            case "page":
                data[start : start + PAGE] = self.stuff(len(data[start : start + PAGE]))
            case "moved page":
                other = self.seed % (len(data) // PAGE) * PAGE
                data[start : start + PAGE] = data[other : other + PAGE]
            case "cut":
                del data[place if self.seed else start :]
            case "tail":
                data += self.stuff(self.size)
            case "header":
                data[place % 100] = self.seed % 256
        damaged = files | {which: bytes(data)}
        if self.how == "no log":
            damaged.pop("-wal", None)
        return damaged | ({"-shm": self.stuff(32_768)} if self.how == "memory" else {})


DAMAGES = st.builds(
    Damage,
    how=st.sampled_from(["bits", "run", "page", "moved page", "cut", "tail", "header", "no log", "memory"]),
    log=st.booleans(),
    place=st.integers(0, 400_000),
    size=st.sampled_from([1, 3, 19, 100, 600, PAGE, 3 * PAGE]),
    seed=st.just(0) | st.integers(1, 2**32),
)


def read_raw(path: Path) -> Seen:
    """What SQLite itself reads out of a copy of the file."""
    copy = path.with_name("raw.db")
    rows: dict[Ref, tuple[Any, ...]] = {}
    try:
        for suffix in ("", "-wal"):
            if Path(f"{path}{suffix}").exists():
                shutil.copy(f"{path}{suffix}", f"{copy}{suffix}")
        with closing(sqlite3.connect(copy)) as opened:
            opened.text_factory = partial(str, encoding="utf-8", errors="backslashreplace")
            sound = opened.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            for row in opened.execute(ROWS):
                rows[Ref(row[0], row[1])] = row
    except (sqlite3.Error, UnicodeDecodeError):
        sound = False
    finally:
        remove(copy)
    return Seen(rows, sound)


def remove(path: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)


async def compare(store: SqliteStore, seen: Seen, verdict: OutcomeKind, *, by_sql: bool) -> None:
    """Ask everything of the file, and compare it with what SQLite reads, where it finds it sound."""
    kept = Kept(KNOWN, set(), set(), whole=False)
    if seen.sound:
        listed = {one.ref for one in await every(store, Filter())}
        for ref, record in zip(KNOWN, await store.get(KNOWN), strict=True):
            row = seen.rows.get(ref)
            assert (record is not None) == (row is not None)
            if record is not None and row is not None:
                assert ref in listed
                if row[3] in range(5):
                    assert (record.token, record.due_at, record.payload) == (row[6], row[5], row[7])
                    assert by_sql or record.id == row[2]
        kept = Kept(KNOWN, set(seen.rows), set(KNOWN), whole=True)
    played = await play(store, kept, verdict, as_it_is)
    due = {ref for ref, row in seen.rows.items() if row[3] in (0, 1) and row[4] <= LATER and ref.topic in ("t", "u")}
    lost = due - set(played.leased) - played.dead
    assert not seen.sound or not lost, f"due, and neither leased nor set aside: {lost}"


async def as_it_is(call: Awaitable[Any]) -> Any:
    return await call


async def doctor(store: SqliteStore) -> None:
    """What `bide doctor` asks. Raises StoreCorrupt where it says that something is severe."""
    for finding in await store.diagnose():
        assert finding.what
        if not finding.ok and finding.severe:
            raise StoreCorrupt(finding.what)


async def tried(
    path: Path, act: Callable[[SqliteStore], Awaitable[None]], kinds: tuple[type[Exception], ...]
) -> Exception | None:
    """Open it, act, close it; what it said if it is damaged."""
    store = SqliteStore(path, watch="poll")
    with refusals(*kinds) as refused:
        await store.open()
        try:
            await act(store)
        finally:
            await store.close()
    assert all(os.fspath(path) in str(error) or act is doctor for error in refused), "it does not say which file"
    return refused[0] if refused else None


def judge(loop: Loop, path: Path, verdict: OutcomeKind, *, lenient: bool, by_sql: bool) -> None:
    seen = read_raw(path)
    kinds: tuple[type[Exception], ...] = (StoreCorrupt, StoreMismatch)
    if path.read_bytes()[18:19] > b"\2":  # of a later version
        kinds, lenient = (*kinds, StoreUnavailable), True
    for act in (partial(compare, seen=seen, verdict=verdict, by_sql=by_sql), doctor):
        told = loop.finish(tried(path, act, kinds))
        assert told is None or not seen.whole or lenient, f"a sound file is refused: {told}"


VERDICTS = st.sampled_from([OutcomeKind.DONE, OutcomeKind.RETRY])


@example(with_log=False, damage=Damage("header", log=False, place=18, size=1, seed=3), verdict=OutcomeKind.DONE)
@fuzz(50, seconds=20, with_log=st.booleans(), damage=DAMAGES, verdict=VERDICTS)
def test_damaged_files(
    sound: list[Files], loop: Loop, tmp_path: Path, with_log: bool, damage: Damage, verdict: OutcomeKind
) -> None:
    path = tmp_path / "damaged.db"
    files = damage.done_to(sound[with_log])
    try:
        for suffix, data in files.items():
            Path(f"{path}{suffix}").write_bytes(data)
        judge(loop, path, verdict, lenient="-shm" in files, by_sql=False)
    finally:
        remove(path)


@fuzz(
    30,
    seconds=20,
    statement=st.sampled_from(STATEMENTS),
    row=st.integers(1, TASKS),
    number=NUMBERS.map(lambda number: max(-(2**63), min(2**63 - 1, number))),
    verdict=VERDICTS,
)
def test_files_that_another_program_has_changed(
    sound: list[Files], loop: Loop, tmp_path: Path, statement: str, row: int, number: int, verdict: OutcomeKind
) -> None:
    path = tmp_path / "changed.db"
    try:
        path.write_bytes(sound[0][""])
        with closing(sqlite3.connect(path)) as opened:
            opened.execute(statement.format(row=row, number=number))
            opened.commit()
        judge(loop, path, verdict, lenient=True, by_sql=True)
    finally:
        remove(path)
