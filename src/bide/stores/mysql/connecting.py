"""A connection to the server: made, set up for our statements, asked, and let go of."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import asyncmy
from asyncmy.errors import MySQLError

from bide.stores.mysql.address import Address, address_of
from bide.stores.mysql.errors import AWAY, UNREADABLE, Broken, meaning, said
from bide.stores.mysql.queries import Names
from bide.stores.sql.dialect import Dialect, Lost, NotSent
from bide.stores.urls import unreached

Rows = Sequence[Sequence[Any]]

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
"""What a reset leaves as it is."""
_QUERY, _RESET = 0x03, 0x1F
_LOOK = "SELECT @@max_allowed_packet, @@read_only"


class Connection:
    """One connection of the driver's."""

    __slots__ = ("driver", "largest", "made_at", "mariadb", "place", "read_only")

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        self.made_at = time.monotonic()
        self.largest = 0
        """Bytes of one packet that the server takes."""
        self.read_only = False
        """Whether it was, when the connection was made: then it is a replica, and may be behind."""
        self.mariadb = True
        self.place: Sequence[Any] = ()

    async def ask(self, packet: bytes | str, meanwhile: Callable[[], None] | None = None) -> list[Rows]:
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
        """What a handler has set, locked or made in its session is not the next one's. One round trip."""
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
