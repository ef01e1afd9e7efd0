"""SQLite files that were damaged after everybody had let go of them, or while the newest was still in the log.

**What is accepted.** Each call either answers, or raises StoreCorrupt or StoreMismatch. What it answers is compared
with what SQLite itself reads out of the same bytes, row by row and past every index, if it finds them sound
(`PRAGMA integrity_check`): every task that is there is found, those that are due are leased or set aside as dead, and
each is as its row says. So nothing is lost *by bide*.

**What nobody can see.** SQLite keeps no checksum of a page: a bit that flips within a payload, a time or a name is read
as it now is, and a log that is gone, or ends early, takes the newest transactions along. Such cases are counted as
`altered` (SQLite calls the file sound, and it does not hold what was acknowledged). Where `integrity_check` complains
and the calls still worked, the case is counted as `survived`; `bide doctor` runs `quick_check`, which sees most of it.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from functools import partial
from pathlib import Path
from typing import Any

from bide.core.errors import BideError, StoreCorrupt, StoreMismatch
from bide.core.events import Event, EventKind
from bide.core.names import new_id
from bide.core.records import At, Cancel, Filter, Move, NewTask, Page, Record, Ref, Settlement, State, Verdict
from bide.stores.sqlite import SqliteStore
from bide.testing.clock import FIRST_INSTANT as NOW
from bide_proofs.fuzz.drawing import Draw
from bide_proofs.fuzz.running import Case, Target, check, clear

_PAGE = 4096
_HOUR = 3_600_000
_LATER = NOW + 2 * _HOUR
TASKS = 60
_ROWS = "SELECT topic, key, id, state, at, due_at, token, payload FROM bide_task NOT INDEXED"
_SQL = (
    "UPDATE bide_task SET state = 7 WHERE row = {row}", "UPDATE bide_task SET state = -1 WHERE row = {row}",
    "UPDATE bide_task SET at = {number} WHERE row = {row}", "UPDATE bide_task SET token = {number} WHERE row = {row}",
    "UPDATE bide_task SET due_at = {number}, created_at = {number} WHERE row = {row}",
    "UPDATE bide_task SET options = x'c1'",
    "UPDATE bide_task SET id = CAST(x'ff61' AS TEXT) WHERE row = {row}",
    "UPDATE bide_task SET attempt = {number} WHERE row = {row}",
    "UPDATE bide_task SET topic = CAST(x'ff' AS TEXT) WHERE row = {row}", "UPDATE bide_token SET last = {number}",
    "DELETE FROM bide_token",
    "UPDATE bide_event SET kind = 'odd'", "UPDATE bide_event SET what = CAST(x'ff' AS TEXT) WHERE line = 2",
    "UPDATE bide_worker SET topics = x'91a1ff'", "DELETE FROM bide_meta", "UPDATE bide_meta SET value = 2",
    "DROP TABLE bide_event", "DROP TABLE bide_token",
    "DROP INDEX bide_task_time",
    "DROP TABLE bide_worker", "UPDATE bide_task SET keep_until = {number} WHERE row = {row}",
    "ALTER TABLE bide_task RENAME TO gone",
    "ALTER TABLE bide_task RENAME COLUMN payload TO body",
    "UPDATE bide_task SET payload = zeroblob(3) WHERE row = {row}",
)  # fmt: skip


class Seen(dict[Ref, tuple[Any, ...]]):
    """The rows that SQLite reads out of a file, by name; `sound`: it finds nothing wrong with it."""

    sound = False


def payload_of(key: str) -> bytes:
    return b'{"key":"%s","text":"%s"}' % (key.encode(), key.encode() * 40)


async def made(folder: Path) -> list[dict[str, bytes]]:
    """The bytes of a file that was closed, and of one whose newest transactions are in the log: both acknowledged."""
    path = folder / "sound.db"
    store = SqliteStore(path)
    await store.open()
    groups = itertools.cycle((None, "g", "h"))
    tasks = [
        NewTask(topic, key, new_id(), At(NOW + (number % 7) * 1_000), payload_of(key), next(groups))
        for topic in ("t", "u")
        for number, key in enumerate(f"{topic}{number}" for number in range(TASKS // 2))
    ]
    for first in range(0, TASKS, 6):
        await store.add(tasks[first : first + 6], now=NOW)
    leased = await store.lease({"t": 4}, now=NOW, until=NOW + 10_000, holder="w")
    ended = leased.tasks[0]
    dead = Settlement(ended.topic, ended.key, ended.token, Verdict.DEAD, keep_until=_LATER * 2, error="bad")
    await store.settle([dead], now=NOW)
    await store.record([Event(at=NOW, topic="t", key="t1", id="i", kind=EventKind.DEAD, what="bad")] * 3)
    await store.announce("w", ["t"], _LATER * 2, now=NOW)
    with_log = _bytes(folder)
    await store.close()
    return [_bytes(folder), with_log]


def _bytes(folder: Path) -> dict[str, bytes]:
    return {
        suffix: (folder / f"sound.db{suffix}").read_bytes()
        for suffix in ("", "-wal")
        if (folder / f"sound.db{suffix}").exists()
    }


def damage(draw: Draw, files: dict[str, bytes]) -> dict[str, bytes]:
    """In one of the ways in which disks, file systems and people do it."""
    files = dict(files)
    which = draw.of(*(name for name, data in files.items() if len(data) > 64))
    data = bytearray(files[which])
    kind = draw.of(
        "bits", "bits", "byte", "page", "moved page", "cut", "cut page", "tail", "header", "gone log", "shm", "run"
    )
    place = draw.randrange(len(data))
    if kind == "bits":
        places = [draw.randrange(len(data)) for _ in range(draw.of(1, 1, 3, 20))]
        for place in places:
            data[place] ^= 1 << draw.randrange(8)
    elif kind == "byte":
        data[place] = draw.of(0, 0xFF, draw.randrange(256))
    elif kind == "page":
        start = place // _PAGE * _PAGE
        data[start : start + _PAGE] = draw.of(bytes(_PAGE), draw.randbytes(_PAGE))[: len(data) - start]
    elif kind == "moved page":
        start, other = place // _PAGE * _PAGE, draw.randrange(len(data)) // _PAGE * _PAGE
        data[start : start + _PAGE] = bytes(data[other : other + _PAGE])
    elif kind == "cut":
        del data[place:]
    elif kind == "cut page":
        del data[place // _PAGE * _PAGE :]
    elif kind == "tail":
        data += draw.randbytes(draw.of(1, 100, _PAGE, 3 * _PAGE))
    elif kind == "header":
        data[draw.randrange(100)] = draw.randrange(256)
    elif kind == "gone log":
        files.pop("-wal", None)
    elif kind == "shm":
        files["-shm"] = draw.randbytes(32_768)
    else:
        end = min(len(data), place + draw.randrange(1, 600))
        data[place:end] = draw.of(bytes(end - place), draw.randbytes(end - place))
    if kind not in ("gone log", "shm"):
        files[which] = bytes(data)
    draw.note((kind, which, place))
    draw.count(f"damage {kind}")
    return files


def read_raw(path: Path) -> Seen:
    """What SQLite itself reads out of a copy of the file."""
    seen = Seen()
    copy = path.with_name("raw.db")
    for suffix in ("", "-wal"):
        if Path(f"{path}{suffix}").exists():
            shutil.copy(f"{path}{suffix}", f"{copy}{suffix}")
    try:
        with closing(sqlite3.connect(copy)) as opened:
            opened.text_factory = partial(str, encoding="utf-8", errors="backslashreplace")
            seen.sound = opened.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            for row in opened.execute(_ROWS):
                seen[Ref(row[0], row[1])] = row
    except (sqlite3.Error, UnicodeDecodeError):
        seen.sound = False
    finally:
        for suffix in ("", "-wal", "-shm"):
            Path(f"{copy}{suffix}").unlink(missing_ok=True)
    return seen


def changed_by_sql(draw: Draw, path: Path) -> None:
    """As another program might."""
    statement = draw.choice(_SQL).format(row=draw.randrange(1, TASKS), number=draw.number() % 2**63 * draw.of(1, -1))
    draw.note(statement)
    draw.count("damage sql")
    with closing(sqlite3.connect(path)) as opened:
        opened.execute(statement)
        opened.commit()


async def play(store: SqliteStore, draw: Draw, seen: Seen, known: set[Ref], *, foreign: bool) -> None:
    """Everything that can be asked of the file; compared with what SQLite reads, where it finds it sound."""
    refs = [*known]
    got = await store.get(refs)
    listed = {one.ref: one for one in await _listed(store, Filter())}
    if seen.sound:
        for ref, record in zip(refs, got, strict=True):
            check((record is not None) == (ref in seen), f"{ref}: SQLite has {seen.get(ref)}, and get {record}")
            if record is not None:
                _same(record, seen[ref], foreign=foreign)
        check(set(listed) >= set(seen) & known, f"not listed: {(set(seen) & known) - set(listed)}")
    await store.tally([0, NOW, _LATER])
    await _listed(store, Filter(group="g"))
    await _listed(store, Filter(state=State.WAITING))
    taken: dict[Ref, Record] = {}
    for _ in range(2 * TASKS):
        leased = await store.lease({"t": 7, "u": 7}, now=_LATER, until=_LATER + _HOUR, holder="x")
        if not leased.tasks:
            break
        for one in leased.tasks:
            check(one.ref not in taken, f"leased twice: {one.ref}")
            taken[one.ref] = one
    else:
        check(seen.sound is False, "leases without an end")
    if seen.sound:
        due = {ref for ref, row in seen.items() if row[3] in (0, 1) and row[4] <= _LATER and ref.topic in ("t", "u")}
        aside = {one.ref for one in await _listed(store, Filter(state=State.DEAD))}
        check(due <= set(taken) | aside, f"due, and neither leased nor set aside: {due - set(taken) - aside}")
    outcomes = [
        Settlement(one.topic, one.key, one.token, draw.of(Verdict.DONE, Verdict.RETRY), At(_LATER + _HOUR))
        for one in taken.values()
    ]
    settled = await store.settle(outcomes, now=_LATER)
    check(not seen.sound or all(settled), "a lease that was just given out is not accepted")
    await store.change([Move("t", "t5", At(_LATER)), Cancel("u", "u6")], now=_LATER)
    await store.add([NewTask("t", "another", new_id(), At(_LATER), b"{}")], now=_LATER)
    [another] = await store.get([Ref("t", "another")])
    check(another is not None and another.payload == b"{}", "what was just added is not there")
    await store.events(limit=10)
    await store.events(Ref("t", "t1"))
    await store.announce("x", ["t"], _LATER * 2, now=NOW)
    await store.purge(now=_LATER, limit=100)


async def _listed(store: SqliteStore, where: Filter) -> list[Record]:
    records: list[Record] = []
    cursor: str | None = None
    for _ in range(2 * TASKS):
        found = await store.find(where, Page(limit=25, cursor=cursor))
        records += found.tasks
        cursor = found.cursor
        if cursor is None:
            return records
    return records


def _same(record: Record, row: tuple[Any, ...], *, foreign: bool) -> None:
    """The record is as its row says."""
    if row[3] in range(5):
        check(record.token == row[6] and record.due_at == row[5] and record.payload == row[7], f"{record} of {row}")
        check(foreign or record.id == row[2], f"{record} of {row}")


async def case(folder: Path, sound: list[dict[str, bytes]], draw: Draw) -> None:
    path = folder / "damaged.db"
    known = {Ref(topic, f"{topic}{number}") for topic in ("t", "u") for number in range(TASKS // 2)}
    foreign = draw.chance(0.2)
    files = sound[0] if foreign else damage(draw, draw.choice(sound))
    try:
        _write(path, files)
        if foreign:
            changed_by_sql(draw, path)
        seen = read_raw(path)
        whole = {ref: row[7] for ref, row in seen.items()} == {ref: payload_of(ref.key) for ref in known}
        ended = "as if nothing were" if seen.sound and whole else "altered" if seen.sound else "survived"
        for told in (
            await tried(path, partial(play, draw=draw, seen=seen, known=known, foreign=foreign)),
            await tried(path, doctor),
        ):
            if told is not None:
                check(not (seen.sound and whole) or foreign or "-shm" in files, f"a sound file is refused: {told}")
                ended = type(told).__name__
        draw.count(ended)
    finally:
        _remove(path)


def _write(path: Path, files: dict[str, bytes]) -> None:
    for suffix, data in files.items():
        Path(f"{path}{suffix}").write_bytes(data)


def _remove(path: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)


async def doctor(store: SqliteStore) -> None:
    """What `bide doctor` asks. Raises StoreCorrupt where it says that something is severe."""
    for finding in await store.diagnose():
        check(finding.what, "what was found")
        if not finding.ok and finding.severe:
            raise StoreCorrupt(finding.what)


async def tried(path: Path, act: Callable[[SqliteStore], Any]) -> BideError | None:
    """Open it, act, close it; what it said if it is damaged."""
    store = SqliteStore(path, watch="poll")
    try:
        await store.open()
        try:
            await act(store)
        finally:
            await store.close()
    except (StoreCorrupt, StoreMismatch) as error:
        clear(error)
        check(os.fspath(path) in str(error) or act is doctor, f"it does not say which file: {error}")
        return error
    return None


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[Case]:
    sound = await made(folder)
    yield partial(case, folder, sound)


TARGETS = (Target("files", "SQLite files damaged at random", opened, limit=20.0, weight=5.0),)
