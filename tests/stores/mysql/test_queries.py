"""Every query of MySQL and MariaDB has a name and a reason, finds its rows by an index, and reads no more.

What a statement reads is counted by the server (`Handler_read...`): a scan cannot hide.
"""

from __future__ import annotations

import random
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import pytest
import pytest_asyncio

from bide.core import lifecycle
from bide.core.instants import At
from bide.stores.mysql.connection import Call, Connection, address_of, connect
from bide.stores.mysql.lease_batches import BatchKey, these_batches
from bide.stores.mysql.leasing import LONGEST_TRANSACTION, MySqlScanBounds, ScanStart
from bide.stores.mysql.queries import (
    THERE,
    Code,
    Names,
    Template,
    held,
    listed,
    queries_of,
    quoted,
    settled_values,
    table_of_pairs,
    these,
    tuples,
)
from bide.stores.mysql.schema import SCHEMA
from bide.stores.sql import leasing
from bide.stores.sql.leasing import SLACK
from bide.testing.store_suite.base import NOW, new

ROWS = 30_000
"""Enough for a sort or a scan of all to look cheaper or dearer than an index, as it would at a million."""

_FILL = """INSERT INTO {task} (topic, `key`, state, ended, at, wake_at, due_at, token, created_at, id, group_name,
    options, payload, keep_until)
SELECT CONCAT('t', n % 3), CAST(n AS CHAR), CASE WHEN n % 100 < 90 THEN 0 WHEN n % 100 < 95 THEN 1 ELSE 2 + n % 3 END,
    IF(n % 100 < 95, 0, 2 + n % 3), :now - 1000000 + (n * 7919) % 2000000,
    IF(n % 100 < 90, 0, :now - 1000000 + (n * 7919) % 2000000), 0, n, 0, CAST(n AS CHAR), IF(n % 7 = 0, 'g', NULL),
    '', '', CASE WHEN n % 100 >= 95 THEN :now + n END
FROM (WITH RECURSIVE d AS (SELECT 0 AS i UNION ALL SELECT i + 1 FROM d WHERE i < 999)
    SELECT a.i * 1000 + b.i + 1 AS n FROM d AS a, d AS b) AS numbers WHERE n <= :rows;
INSERT INTO {lease} SELECT topic, wake_at, `row`, token, 'w', 'x' FROM {task} WHERE state = 1;
INSERT INTO {grouped} SELECT `row`, group_name, topic, `key`, ended > 0 FROM {task} WHERE group_name IS NOT NULL;
INSERT INTO {kept} SELECT keep_until, `row` FROM {task} WHERE keep_until IS NOT NULL"""

_READS = re.compile(b"Handler_(read_(?!rnd_deleted)|icp_)")
"""The counters of what was read. An entry that meets a condition on the index is in `read`, `attempts` and `match`; one
that fails it only in `attempts`."""
_NEW = lifecycle.schedule(new("3", topic="t0", due=At(NOW)), None, NOW, 1).record
assert _NEW is not None
_PUT = settled_values(3, _NEW)
_TWO = {"these": these([5, 6])}
_KEYS = {"topic": "t0", "keys": listed(["3", "6", "x"])}
_HOLDS = {**_KEYS, "holds": tuples([("3", 3), ("6", 1), ("x", 1)])}
_HELD = {"held": held([(93, 93), (192, 192)])}
_BATCHES = [BatchKey("t0", NOW - number, number, number, "w") for number in range(3)]
_STATE = {"topic": "t0", "state": 0, "instant": NOW - 900_000, "most": 100}
ARGUMENTS: Mapping[str, tuple[dict[str, Any], int]] = {
    "insert_tasks": (
        {
            "columns": Code(b"topic, `key`, id, payload, at, due_at, created_at"),
            "rows": tuples([("t", "y", "i", "", 1, 1, 1)]),
        },
        5,
    ),
    "inserted_tokens": ({"count": 5}, 10),
    "lock_tasks": (_KEYS, 10),
    "probe": ({"topic": "t0", "key": "3"}, 3),
    "put_tasks": ({"rows": tuples([(*_PUT, b"", b"", None)])}, 10),
    "replace_tasks": ({"rows": tuples([(*_PUT, b"", b"", None)])}, 10),
    "forget_tasks": (_TWO, 10),
    "join_groups": ({"rows": tuples([(2**40, "g", "t0", "y", 0)])}, 5),
    "leave_groups": ({"rows": listed([7, 14])}, 10),
    "keep_tasks": ({"rows": tuples([(NOW, 2**40)])}, 5),
    "take_waiting": ({"topic": "t0", "floor": NOW - 900_000, "row": 5, "most": 50}, 110),
    "lease_tasks": ({"these": these([7, 8]), "micros": 1, "until": 1, "holder": "w"}, 10),
    "waiting_head": ({"topic": "t0", "floor": NOW - 500_000}, 5),
    "insert_batches": ({"rows": tuples([("t0", NOW, 3, 3, "w", b"")])}, 5),
    "delete_batches": ({"leases": these_batches([BatchKey("t0", NOW, 93, 93, "w"), *_BATCHES], quoted)}, 10),
    "expired_leases": ({"topic": "t0", "floor": NOW - 900_000, "most": 50}, 110),
    "still_leased": (_HELD, 10),
    "take_lost": ({**_HELD, "most": 50}, 10),
    "leased_head": ({"topic": "t0", "floor": NOW - 900_000}, 5),
    "heads": ({"wanted": Call.packed([f"t{number}" for number in range(20)]), "until": NOW}, 110),
    "leases": ({"topic": "t3"}, 5),
    "insert_shortened": ({**_HOLDS, "lasts": 5, "me": "w"}, 12),
    "extend_leases": ({**_HOLDS, "lasts": 5}, 12),
    "held": (_HOLDS, 10),
    "settle_done": ({"held": held([(3, 3), (6, 1)])}, 10),
    "kept_until_now": ({"most": 50}, 110),
    "purgeable": (_TWO, 10),
    "still_there": (_TWO, 10),
    "forget_kept": ({"lines": table_of_pairs([(NOW + 97, 97), (NOW + 98, 98)])}, 20),
    "tasks_by_names": (_KEYS, 10),
    "tasks_by_rows": ({"these": these([7, 8])}, 10),
    "page_by_name": ({"topic": "t0", "key": "2", "most": 50}, 110),
    "page_by_group": ({"group": "g", "ended": 0, "topic": "t0", "key": "", "most": 50}, 210),
    "page_at_instant": ({**_STATE, "row": 5}, 110),
    "page_after_instant": ({**_STATE, "before": 2**62}, 210),
    "next_topic": ({"topic": "t0"}, 5),
    "next_topic_of_group": ({"group": "g", "ended": 1, "topic": "t0"}, 5),
    "next_topic_of_state": ({"state": 4, "topic": "t0"}, 5),
    "next_topic_leased": ({"topic": "t0"}, 5),
    "count_first": ({"topic": "s", "most": 50, "interval": 0}, 220),
    "count": ({"topic": "t0", "ended": 0, "low": 0, "high": 2**62, "most": 50}, 170),
}
"""Every statement that touches a table that grows with the tasks, and how many rows it may read at most."""


class Surveyed:
    """A connection as the store has it, to tables that nobody analyzes."""

    def __init__(self, url: str, connection: Connection, queries: Mapping[str, Template], names: Names) -> None:
        self.url = url
        self.connection = connection
        self.queries = queries
        self.names = names

    async def fill(self, rows: int = ROWS) -> None:
        filled = Template(self.names.write(_FILL)).write(now=NOW, rows=rows)
        await self.connection.ask(b"SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED; " + filled)
        [[(there,)]] = await self.connection.ask(self.names.write("SELECT COUNT(*) FROM {task}"))
        assert there == rows

    async def reads(self, query: str, values: dict[str, Any]) -> int:
        """Carried out and undone: how many rows, and entries of indexes, were read."""
        text = self.queries[query].write(**values)
        await self.connection.ask(f"BEGIN; SET @bide_now = {NOW}, @bide_row = 100, @bide_micros = {NOW * 1_000}")
        before = await self.counted()
        await self.connection.ask(text)
        after = await self.counted()
        counting = await self.counted() - after
        await self.connection.ask("ROLLBACK")
        return after - before - counting

    async def counted(self) -> int:
        """Rows and entries that this connection has read so far; those of looking at this itself too."""
        [rows] = await self.connection.ask("SHOW SESSION STATUS LIKE 'Handler_%'")
        reads = {bytes(name): int(number) for name, number in rows if _READS.match(bytes(name))}
        return sum(reads.values()) - 2 * reads.get(b"Handler_icp_match", 0)


@pytest_asyncio.fixture
async def surveyed(fresh_url: str) -> AsyncIterator[Surveyed]:
    await SCHEMA.migrate(fresh_url)
    address = address_of(fresh_url)
    connection = await connect(address, within=10)
    names = Names(address.schema, address.prefix)
    await connection.ask(names.write("ALTER TABLE {task} STATS_AUTO_RECALC = 0, STATS_PERSISTENT = 1"))
    try:
        yield Surveyed(
            fresh_url, connection, queries_of(address.schema, address.prefix, mariadb=connection.mariadb), names
        )
    finally:
        await connection.end(within=5)


async def check_all(surveyed: Surveyed) -> None:
    wrong = {}
    for query, (values, most) in ARGUMENTS.items():
        reads = await surveyed.reads(query, values)
        if reads > most:
            wrong[query] = reads
    assert not wrong


async def test_no_statement_scans_a_large_table(surveyed: Surveyed) -> None:
    """The bounds are in rows: what is read does not grow with what is there."""
    await surveyed.fill()
    await check_all(surveyed)
    await surveyed.connection.ask(surveyed.names.write("ANALYZE TABLE {task}"))
    await check_all(surveyed)


_BY_ROWS = (
    "tasks_by_rows", "lease_tasks", "settle_done", "still_leased", "take_lost", "forget_tasks", "leave_groups",
    "purgeable",
)  # fmt: skip


async def test_long_lists_of_names_are_looked_up_one_by_one(surveyed: Surveyed) -> None:
    await surveyed.fill()
    keys = [str(3 * number) for number in range(1, 1_001)]
    asked = {"topic": "t0", "keys": listed(keys), "holds": tuples([(key, int(key)) for key in keys])}
    for query in ("lock_tasks", "tasks_by_names", "held", "extend_leases"):
        values = {**asked, "lasts": 5}
        assert await surveyed.reads(query, values) <= 3_100, query
    for rows in (range(1, 1_001), range(2, 2_002, 2)):
        for tokens in (range(1, 1_001), [row // 100 for row in range(1_000)]):  # each by itself, and a hundred a lease
            holds = held(zip(rows, tokens, strict=True))
            values = {"these": these(rows), "micros": 1, "until": 1, "holder": "w", "held": holds, "rows": listed(rows)}
            values["most"] = 50
            for query in _BY_ROWS:
                assert await surveyed.reads(query, values) <= 2_100, query


async def test_conditions_on_rows_mean_these_and_no_others(surveyed: Surveyed) -> None:
    ask, chance = surveyed.connection.ask, random.Random(1)
    pairs = table_of_pairs((row, token) for row in range(150) for token in range(3))
    every = b"(SELECT first AS `row`, second AS token FROM (" + pairs + b") AS pairs) AS every"
    for _ in range(50):
        held_rows = sorted(chance.sample(range(150), chance.randint(1, 150)))
        [found] = await ask(b"SELECT `row` FROM " + every + b" WHERE token = 0 AND " + these(held_rows))
        assert sorted(row for (row,) in found) == held_rows
        holds = [(row, chance.choice((0, 0, 0, 1, 2))) for row in held_rows]
        [found] = await ask(b"SELECT `row`, token FROM " + every + b" WHERE " + held(holds))
        assert sorted(map(tuple, found)) == holds


def test_what_lies_together_is_written_as_a_range() -> None:
    assert these([4, 5, 7, 8, 9, 10, 11, 13]) == b"(`row` BETWEEN 7 AND 10 OR `row` IN (4, 5, 11, 13))"


@pytest.mark.parametrize("there", [2, 3, 10, 100, 1_000])
async def test_what_writes_by_row_reads_none_of_others_in_a_small_table(surveyed: Surveyed, there: int) -> None:
    """It would wait for those that somebody has locked."""
    await surveyed.fill(there)
    others = there // 2
    rows = [row for row in range(1, there + 1) if row != others]
    values = {"these": these(rows), "held": held((row, row) for row in rows), "rows": listed(rows)}
    ended = [(NOW + row, row) for row in rows if row % 100 >= 95]
    asked: dict[str, dict[str, Any]] = {"settle_done": values, "forget_tasks": values, "leave_groups": values}
    asked["lease_tasks"] = {**values, "micros": 1, "until": 1, "holder": "w"}
    batches = [BatchKey(f"t{row % 3}", NOW, row, row, "w") for row in rows[:3]]
    asked["delete_batches"] = {"leases": these_batches(batches, quoted)}
    if ended:
        asked["forget_kept"] = {"lines": table_of_pairs(ended)}
    names = surveyed.names
    other = await connect(address_of(surveyed.url), within=10)
    try:
        await other.ask(
            names.write(
                f"BEGIN; SELECT 1 FROM {{task}} WHERE `row` = {others} FOR UPDATE; "
                f"INSERT INTO {{grouped}} VALUES ({2**40}, 'g', 't0', 'new', 0); "
                f"INSERT INTO {{kept}} VALUES ({NOW}, {2**40}); "
                f"INSERT INTO {{lease}} VALUES ('t0', {NOW}, {2**40}, 1, 'w', 'x')"
            )
        )
        for query, given in asked.items():
            text = surveyed.queries[query].write(**given)
            await surveyed.connection.ask(b"BEGIN; " + text)
            await surveyed.connection.ask("ROLLBACK")
    finally:
        await other.end(within=5)


async def test_a_scan_would_be_seen(surveyed: Surveyed) -> None:
    await surveyed.fill()
    scan = Template(surveyed.names.write("SELECT COUNT(*) FROM {task} WHERE id = 'x'"))
    surveyed.queries = {"scan": scan}
    assert await surveyed.reads("scan", {}) >= ROWS


async def test_every_query_of_the_table_is_looked_at(url: str) -> None:
    address = address_of(url)
    names = Names(address.schema, address.prefix)
    tables = [names.parts[table] for table in ("task", "lease", "grouped", "kept")]
    queries = queries_of(address.schema, address.prefix)
    big = {name for name, template in queries.items() if any(table in template.text for table in tables)}
    assert big == set(ARGUMENTS)


def test_mysql_is_told_in_its_own_words() -> None:
    for name, template in queries_of("bide", "bide_", mariadb=False).items():
        assert "RETURNING" not in template.text, name
        assert "VALUES(" not in template.text, name
        assert ("given." in template.text) == (" AS given" in template.text), name


async def test_the_clock_is_that_of_the_world_whatever_the_time_zone(surveyed: Surveyed) -> None:
    from bide.stores.mysql.queries import THERE_ANYWHERE

    [[(ours,)]] = await surveyed.connection.ask(f"SELECT {THERE}")
    for zone in ("+00:00", "+09:30", "-11:00"):
        [[(there, plain)]] = await surveyed.connection.ask(
            f"SET SESSION time_zone = '{zone}'; SELECT {THERE_ANYWHERE}, CAST(UNIX_TIMESTAMP(NOW(6)) * 1e6 AS SIGNED)"
        )
        assert abs(there - plain) < 2
        assert 0 <= there - ours < 60_000_000


FULL = ScanStart({"t": 0}, {"t": 0}, {"t": 0}, True, True, True)


class Known(MySqlScanBounds):
    """With a stopwatch that is set by hand, and a note of what was begun in the background."""

    def __init__(self) -> None:
        self.seconds = 100.0
        self.begun: list[Sequence[str]] = []
        super().__init__(used=True, background=self._begin, clock=lambda: self.seconds)

    def _begin(self, topics: Sequence[str]) -> bool:
        self.begun.append(topics)
        return True

    def scan(self, at: int, *, took: float = 0.001, waiting: int | None = None, lost: int | None = None) -> ScanStart:
        start = self.start(["t"], [NOW - 7], thorough=True)
        self.scanned(start, took, at)
        self.left({"t": (waiting, lost)})
        return start


def test_after_an_expensive_one_a_scan_begins_a_little_before_the_last() -> None:
    known = Known()
    known.scan(NOW, took=0.02)
    assert known.scan(NOW + 1_000) == ScanStart(
        {"t": NOW - LONGEST_TRANSACTION}, {"t": NOW - 7}, {"t": NOW - SLACK}, False, True, False
    )
    assert known.scan(NOW + 2_000).waiting == {"t": NOW + 1_000 - LONGEST_TRANSACTION}
    known.scan(NOW + 30_000, waiting=NOW + 7, lost=NOW + 8)
    assert known.scan(NOW + 31_000) == ScanStart({"t": NOW + 7}, {"t": NOW + 7}, {"t": NOW + 8}, False, True, False), (
        "what was left is due"
    )
    known.note_wakes({"t": NOW + 3, "u": NOW})
    assert known.scan(NOW + 32_000).waiting == {"t": NOW + 3}


def test_full_ones_are_made_in_the_background() -> None:
    known = Known()
    known.scan(NOW, took=0.02)
    assert known.begun == [["t"]], "at once: the machine may have been busy"
    known.found({"t": (None, None)}, 0.02)
    known.scan(NOW + 1_000)
    assert known.begun == [["t"]]
    known.seconds += 0.02 * leasing.SHARE
    known.scan(NOW + 40_000)
    assert known.begun == [["t"], ["t"]]
    known.found({"t": (NOW + 5, NOW + 6)}, 0.02)
    assert known.scan(NOW + 41_000) == ScanStart({"t": NOW + 5}, {"t": NOW + 5}, {"t": NOW + 6}, False, True, False)
    known.found({"t": (None, NOW * 2)}, 0.004)
    assert known.scan(NOW + 42_000) == FULL, "it is cheap again"


def test_with_another_connection_or_an_earlier_clock_nothing_is_known() -> None:
    known = Known()
    connection = object()
    known.on_connection(connection)
    known.scan(NOW, took=0.02)
    known.on_connection(connection)
    assert not known.scan(NOW + 1_000).full
    known.on_connection(object())
    assert known.scan(NOW + 2_000, took=0.02).full
    assert not known.scan(NOW).full
    assert known.scan(NOW + 1).full, "the clock was set back"
