"""A connection to MySQL or MariaDB: made, set up for our statements, asked, and what its errors mean."""

from __future__ import annotations

import asyncio
import logging
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import asyncmy
from asyncmy.errors import MySQLError

from bide.core.errors import BadInput, StoreCorrupt, StoreMismatch, StoreUnavailable
from bide.stores.mysql.address import Address, address_of
from bide.stores.mysql.queries import Names
from bide.stores.sql.dialect import OURS, Again, Dialect, Fewer, Locked, Lost, Meanings, NotSent, Shut, Taken
from bide.stores.urls import unreached

Rows = Sequence[Sequence[Any]]
_INPUT = frozenset({1264, 1265, 1366, 1406, 1048, 1300})
_MEANINGS: Meanings[int] = Meanings(
    {
        # what the gate provokes: a subquery with two rows
        Shut: (1242,),
        Taken: (1062,),
        # what `all_of_them` provokes: a number that is too large
        Fewer: (1690,),
        # lock wait timeout, and NOWAIT of MySQL
        Locked: (1205, 3572),
        # deadlock, record changed, table definition changed, statement to be prepared anew
        Again: (1213, 1020, 1412, 1479, 1615),
        # read-only (it was a replica, or has become one), too many clients, shutting down, not there: not done
        NotSent: (1290, 1792, 1836, 3100, 1040, 1203, 1053, 1226, 3168, 1927, 2001, 2002, 2003, 2004, 2005, 2007),
        # the connection is of no use any more; 0 is the driver's own
        Lost: (
            0, 2000, 2006, 2012, 2013, 2014, 2027, 2055, 1152, 1153, 1154, 1155, 1156, 1157, 1158, 1159, 1160, 1161,
            1184, 4031,
        ),
    },
    # disk full, table full, an error of the storage engine (that a full disk gives, too), out of memory
    full=(1021, 1114, 1030, 1041, 1037, 1038, 3, 28),
    refusals=(
        (StoreCorrupt, (1034, 1035, 126, 127, 1712, 1817), "look with CHECK TABLE, or restore a backup"),
        (StoreMismatch, (1146, 1054, 1049, 1305, 1176), "run `bide migrate`"),
        (
            StoreUnavailable, (1142, 1143, 1044, 1227, 1370),
            "grant this user SELECT, INSERT, UPDATE and DELETE on bide's tables",
        ),
        (StoreUnavailable, (1045, 1698, 1251, 2059, 1275, 1862), "check the user and the password in the URL"),
        (StoreUnavailable, (1665,), "set binlog_format to ROW or MIXED"),
    ),
)  # fmt: skip


class Broken(Exception):
    """The driver cannot make sense of what it read: the connection was cut in the middle, or is out of step."""


UNREADABLE = (AttributeError, AssertionError, IndexError, TypeError, ValueError, RuntimeError, struct.error)
"""Errors that the driver may raise where an answer ends too early."""
AWAY = (MySQLError, Broken, NotSent, OSError, EOFError, TimeoutError)
"""The driver's errors, of the server as of the way to it, and ours where there is no way."""


def meaning(error: BaseException, where: str, *, adding: bool = False) -> Exception:
    """The exception to raise, or to act on, for `error` of a statement. Defects of our own come back as they are."""
    if isinstance(error, OURS):
        return error
    if isinstance(error, UnicodeEncodeError):
        return BadInput("task", str(error), "text without lone surrogates")
    if isinstance(error, MySQLError):
        code = error.args[0] if error.args and isinstance(error.args[0], int) else 0
        return by_code(code, f"{where}: {said(error)}", adding=adding)
    if isinstance(error, Broken | OSError | TimeoutError | EOFError):
        return Lost(f"{where}: {said(error)}")
    assert isinstance(error, Exception)
    return error


def by_code(code: int, text: str, *, adding: bool = False) -> Exception:
    """The meaning of an error that the server, or the driver, reported under this number."""
    if code in _INPUT:
        return BadInput("task", text, "names and holders of at most 255 bytes, and integers of at most 64 bits")
    return _MEANINGS.meaning(code, text, adding=adding)


def said(error: BaseException) -> str:
    """The text of an error, or its type if it has none."""
    return str(error.args[1]) if len(error.args) > 1 else str(error) or type(error).__name__


_SETTINGS = (
    # whatever stands between quotes is bytes, and so is whatever comes back
    "SET NAMES binary",
    "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED",
    "SET SESSION autocommit = 1, time_zone = '+00:00', sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION', "
    # what somebody's open transaction holds is tried again by itself, and holds up nothing else for longer than that
    "innodb_lock_wait_timeout = 1",
)
_OF_MARIADB = (
    # one whose process is gone without a word keeps its locks no longer
    "SET SESSION idle_transaction_timeout = 5",
    # long lists of names are looked up one by one, and are not made a table
    "SET SESSION in_predicate_conversion_threshold = 0",
)
_OF_MYSQL = (
    # the same, as far as it can be said there: a connection that is idle for longer is made anew when it is needed
    "SET SESSION wait_timeout = 60",
    "SET SESSION range_optimizer_max_mem_size = 0",
)
AFRESH = (
    "SET NAMES utf8mb4; SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED; SET SESSION autocommit = 1, "
    "time_zone = '+00:00'"
)
"""For a connection that a handler is given: what an earlier one has set is not the next one's."""
_PLACE = "SELECT DATABASE(), CURRENT_ROLE()"
"""The state that a reset leaves as it is."""
_QUERY, _RESET = 0x03, 0x1F
_LOOK = "SELECT @@max_allowed_packet, @@read_only"


class Connection:
    """One connection of the driver's."""

    __slots__ = ("driver", "largest", "made_at", "mariadb", "name", "number", "place", "read_only")

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        self.made_at = time.monotonic()
        self.largest = 0
        """Bytes of one packet that the server takes."""
        self.read_only = False
        """True if it was, when the connection was made: then it is a replica, and may be behind."""
        self.mariadb = True
        self.place: Sequence[Any] = ()
        self.name, self.number = "", 0

    async def ask(self, packet: bytes | str, meanwhile: Callable[[], object] | None = None) -> list[Rows]:
        """The rows of each statement of a packet that has any. Raises the driver's MySQLError, Broken.

        `meanwhile`: what to do while the server is at work.
        """
        driver = self.driver
        answers: list[Rows] = []
        try:
            await driver._execute_command(_QUERY, packet)
        except UNREADABLE as error:
            raise Broken(f"an answer before cannot be read: {said(error)}") from error
        if meanwhile is not None:
            try:
                meanwhile()
            except BaseException:
                self.drop()  # an answer is on its way that nobody reads
                raise
        try:
            await driver.next_result()
            while True:
                result = driver._result
                if result.description is not None:
                    answers.append(result.rows)
                if not result.has_next:
                    return answers
                await driver.next_result()
        except UNREADABLE as error:
            raise Broken(f"the answer cannot be read: {said(error)}") from error

    async def ask_on(self, packet: bytes) -> tuple[int, MySQLError | None]:
        """How many statements of a packet, which all give rows, were carried out, and why the next one was not."""
        driver, done = self.driver, 0
        try:
            await driver.query(packet)
            done += 1
            while driver._result.has_next:
                await driver.next_result()
                done += 1
        except MySQLError as error:
            return done, error
        except UNREADABLE as error:
            raise Broken(f"the answer cannot be read: {said(error)}") from error
        return done, None

    async def begin(self) -> None:
        """A transaction for a handler, on a connection that is new or was reset. Raises Broken where one left it
        elsewhere: in another database, or role."""
        [[place]] = await self.ask(f"{AFRESH}; {_PLACE}; BEGIN")
        if place != (self.place or place):
            raise Broken("an earlier transaction has left it in another database or role")
        self.place = place

    async def rollback(self) -> None:
        """Undo what is not committed."""
        await self.ask("ROLLBACK")

    async def reset(self) -> None:
        """Take back what a handler has set, locked or made in its session. One round trip."""
        try:
            await self.driver._execute_command(_RESET, b"")
            await self.driver._read_ok_packet()
        except UNREADABLE as error:
            raise Broken(f"the answer cannot be read: {said(error)}") from error

    def check_writable(self, where: str) -> None:
        """Raises NotSent if it is to a replica: of all hosts none could be written to."""
        if self.read_only:
            raise NotSent(f"{where}: only a server that is read-only can be reached")

    @property
    def usable(self) -> bool:
        transport = self.driver._transport
        return bool(self.driver.connected and transport is not None and not transport.is_closing())

    def drop(self) -> None:
        """Without a word, since the server may be waited for in vain."""
        driver = self.driver
        transport = driver._transport
        if transport is not None:
            transport.abort()
        driver.close()

    async def end(self, *, within: float) -> None:
        """In order, as far as that is possible."""
        with suppress(MySQLError, OSError, TimeoutError, *UNREADABLE):
            async with asyncio.timeout(within):
                await self.driver.ensure_closed()
        self.drop()


async def connect(address: Address, *, within: float, plain: bool = False) -> Connection:
    """A new connection, to the first host that may be written to. `plain`: for a handler, without our settings.

    Raises NotSent, StoreUnavailable, StoreMismatch, BadInput.
    """
    tls = address.tls()
    problem: Exception | None = None
    last: Connection | None = None
    for host, port in address.hosts:
        try:
            async with asyncio.timeout(within):
                connection = await _connect(address, host, port, tls, within=within, plain=plain)
        except (MySQLError, Broken, OSError, TimeoutError, *UNREADABLE) as error:
            found = meaning(Broken(said(error)) if isinstance(error, UNREADABLE) else error, address.shown)
            if isinstance(found, Lost | NotSent):
                found = NotSent(unreached(address.shown, error))
            problem = found
            problem.__cause__ = error
            continue
        if not connection.read_only:
            if last is not None:
                last.drop()
            return connection
        if last is not None:
            last.drop()
        last = connection
    if last is not None:
        return last  # it can be read from, and what is to be written is refused, and tried again
    assert problem is not None
    raise problem


async def _connect(address: Address, host: str, port: int, tls: Any, *, within: float, plain: bool) -> Connection:
    driver: Any = await asyncmy.connect(
        host=host, port=port, user=address.user or None, password=address.password,
        database=address.database or None, unix_socket=address.socket or None, ssl=tls,
        connect_timeout=max(1, int(within)), autocommit=None, charset="utf8mb4", program_name="bide",
    )  # fmt: skip
    connection = Connection(driver)
    try:
        if tls is not None and driver._transport.get_extra_info("ssl_object") is None:
            raise NotSent(f"{address.shown}: the server offers no TLS, and ssl_mode asks for it")
        connection.mariadb = "MariaDB" in str(driver.get_server_info())
        settings = (
            (AFRESH, _LOOK) if plain else (*_SETTINGS, *(_OF_MARIADB if connection.mariadb else _OF_MYSQL), _LOOK)
        )
        [((largest, read_only),)] = await connection.ask("; ".join(settings))
        connection.largest = int(largest)
        connection.read_only = str(read_only) not in ("0", "OFF", "b'OFF'")
    except BaseException:
        connection.drop()
        raise
    return connection


MYSQL = Dialect(logging.getLogger("bide.mysql"), address_of, connect, meaning, said, AWAY, Names)
