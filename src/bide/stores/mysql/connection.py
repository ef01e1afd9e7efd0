"""Connections to MySQL or MariaDB: the URL, the driver, the meaning of its errors, and the calls of a store.

    mysql://[user[:password]@]host[:port][,host:port...]/database        mariadb:// is the same

`?prefix=bide_` (the default) is the prefix of the tables' names; `?schema=` puts them into another database on the same
server. Of several hosts, the first writable one is used. `ssl_mode` is one of "disabled" (the default), "required",
"verify_ca" and "verify_identity", with `ssl_ca`, `ssl_cert` and `ssl_key`. `socket` is the path of a Unix socket, which
replaces the host.

A call is one packet of several statements, or a few such packets (see `Call`, and `sql.journaled_connection`). While
the primary is away a replica answers reads, and may be behind.
"""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote

import asyncmy
from asyncmy.errors import MySQLError
from msgspec import Struct, field

from bide.core.errors import BadInput, OutcomeUnknown, StoreCorrupt, StoreMismatch, StoreUnavailable
from bide.core.instants import Millis
from bide.stores.mysql.queries import THERE, Code, Names, Quote, listed, queries_of, quoted, tuples
from bide.stores.resending import Lost, NotSent
from bide.stores.sql.dialect import (
    OURS,
    AlreadyApplied,
    Dialect,
    KeyTaken,
    LockTimeout,
    Meanings,
    RowsMissing,
    TransactionConflict,
)
from bide.stores.sql.journaled_connection import JournaledConnection, NumberedCall
from bide.stores.sql.operations import pack_topics, unpack_topics
from bide.stores.urls import parts_of, unreached

# --- URLs

SCHEMES = ("mysql", "mariadb")
PREFIX = "bide_"
PORT = 3306
_ACCEPTED = '"mysql://user:password@host:3306/database", with options such as "?prefix=shop_"'
_OPTIONS = ("prefix", "schema", "socket", "ssl_ca", "ssl_cert", "ssl_key", "ssl_mode")
_MODES = ("disabled", "required", "verify_ca", "verify_identity")
_DATABASE = re.compile(r"[A-Za-z0-9_$-]{1,64}")
_PREFIX = re.compile(r"[a-z_][a-z0-9_]{0,39}")


class Address(Struct, frozen=True, kw_only=True):
    """The parts of a URL."""

    hosts: tuple[tuple[str, int], ...]
    user: str
    password: str
    database: str
    """The default database of the connection; empty if the URL has none."""
    schema: str
    """The database of the tables."""
    prefix: str = PREFIX
    socket: str = ""
    options: Mapping[str, str] = {}
    """The TLS options."""
    shown: str = ""
    """The URL without secrets."""

    def tls(self) -> Any:
        """The TLS context of the connection; None: no encryption. Raises BadInput for unusable files."""
        mode = self.options.get("ssl_mode", "required" if "ssl_ca" in self.options else "disabled")
        if mode == "disabled":
            return None
        checks = mode in ("verify_ca", "verify_identity") or "ssl_ca" in self.options
        try:
            context = ssl.create_default_context(cafile=self.options.get("ssl_ca"))
            context.check_hostname = mode == "verify_identity"
            context.verify_mode = ssl.CERT_REQUIRED if checks else ssl.CERT_NONE
            if "ssl_cert" in self.options:
                context.load_cert_chain(self.options["ssl_cert"], self.options.get("ssl_key"))
        except OSError as error:
            files = {name: value for name, value in self.options.items() if name != "ssl_mode"}
            raise BadInput("ssl_ca", files, f"readable certificate files ({error})") from None
        return context


def address_of(url: str) -> Address:
    """Parse a URL. Raises BadInput, which names the error and never shows a password."""
    parts = parts_of(url, _ACCEPTED, schemes=SCHEMES)
    given: dict[str, str] = {}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name not in _OPTIONS:
            raise BadInput("store", f"?{name}=", f"one of {', '.join(_OPTIONS)}")
        given[name] = value
    database = unquote(parts.path.removeprefix("/"))
    prefix, schema = given.pop("prefix", PREFIX), given.pop("schema", database)
    socket = given.pop("socket", "")
    if not _PREFIX.fullmatch(prefix):
        raise BadInput("prefix", prefix, "1 to 40 characters of a-z, 0-9 and _, the first not a digit")
    if not _DATABASE.fullmatch(schema):
        field = "schema" if schema != database else "store"
        raise BadInput(field, schema, f"the name of a database, of letters, digits, _, - and $: {_ACCEPTED}")
    if database and not _DATABASE.fullmatch(database):
        raise BadInput("store", database, f"the name of a database, of letters, digits, _, - and $: {_ACCEPTED}")
    if given.get("ssl_mode", "disabled") not in _MODES:
        raise BadInput("ssl_mode", given["ssl_mode"], f"one of {', '.join(_MODES)}")
    if given.get("ssl_mode") == "disabled" and len(given) > 1:
        raise BadInput("ssl_mode", "disabled", "required, verify_ca or verify_identity, if certificates are given")
    account, _, places = parts.netloc.rpartition("@")
    user, _, password = account.partition(":")
    hosts = tuple(_host(place) for place in (places or "localhost").split(","))
    where = socket or places or "localhost"
    return Address(
        hosts=hosts,
        user=unquote(user),
        password=unquote(password),
        database=database,
        schema=schema,
        prefix=prefix,
        socket=socket,
        options=given,
        shown=f"{where}/{schema} {prefix}*",
    )


def _host(place: str) -> tuple[str, int]:
    host, colon, port = place.rpartition(":") if not place.endswith("]") else (place, "", "")
    if not colon:
        host, port = place, str(PORT)
    if not host or not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) < 65_536:
        raise BadInput("store", place, _ACCEPTED)
    return host.removeprefix("[").removesuffix("]"), int(port)


# --- errors

Rows = Sequence[Sequence[Any]]
_INPUT = frozenset({1264, 1265, 1366, 1406, 1048, 1300})
_MEANINGS: Meanings[int] = Meanings(
    {
        # provoked by the gate: a subquery with two rows
        AlreadyApplied: (1242,),
        KeyTaken: (1062,),
        # provoked by `all_of_them`: a number that is too large
        RowsMissing: (1690,),
        # lock wait timeout, and NOWAIT of MySQL
        LockTimeout: (1205, 3572),
        # deadlock, record changed, table definition changed, statement has to be prepared again
        TransactionConflict: (1213, 1020, 1412, 1479, 1615),
        # read-only (it is a replica, or became one), too many clients, shutting down, unreachable: not done
        NotSent: (1290, 1792, 1836, 3100, 1040, 1203, 1053, 1226, 3168, 1927, 2001, 2002, 2003, 2004, 2005, 2007),
        # the connection is unusable; 0 is the driver's own code
        Lost: (
            0, 2000, 2006, 2012, 2013, 2014, 2027, 2055, 1152, 1153, 1154, 1155, 1156, 1157, 1158, 1159, 1160, 1161,
            1184, 4031,
        ),
    },
    # disk full, table full, an error of the storage engine (which a full disk causes too), out of memory
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


class ProtocolError(Exception):
    """The driver cannot read an answer: the connection broke in the middle of it, or is out of sync."""


UNREADABLE = (AttributeError, AssertionError, IndexError, TypeError, ValueError, RuntimeError, struct.error)
"""Errors that the driver may raise if an answer ends too early."""
AWAY = (MySQLError, ProtocolError, NotSent, OSError, EOFError, TimeoutError)
"""The driver's errors, whether from the server or from the connection, and our own for an unreachable server."""


def meaning(error: BaseException, where: str, *, adding: bool = False) -> Exception:
    """The exception to raise, or to act on, for a statement's `error`. Returns errors of our own code unchanged."""
    if isinstance(error, OURS):
        return error
    if isinstance(error, UnicodeEncodeError):
        return BadInput("task", str(error), "text without lone surrogates")
    if isinstance(error, MySQLError):
        code = error.args[0] if error.args and isinstance(error.args[0], int) else 0
        return by_code(code, f"{where}: {said(error)}", adding=adding)
    if isinstance(error, ProtocolError | OSError | TimeoutError | EOFError):
        return Lost(f"{where}: {said(error)}")
    assert isinstance(error, Exception)
    return error


def by_code(code: int, text: str, *, adding: bool = False) -> Exception:
    """The meaning of an error that the server or the driver reported with this number."""
    if code in _INPUT:
        return BadInput("task", text, "names and holders of at most 255 bytes, and integers of at most 64 bits")
    return _MEANINGS.meaning(code, text, adding=adding)


def said(error: BaseException) -> str:
    """The text of an error, or its type if it has none."""
    return str(error.args[1]) if len(error.args) > 1 else str(error) or type(error).__name__


# --- connections

_SETTINGS = (
    # all quoted values are bytes, and so are all results
    "SET NAMES binary",
    "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED",
    "SET SESSION autocommit = 1, time_zone = '+00:00', sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION', "
    # seconds that a locked row may delay a whole batch; after that it is retried on its own
    "innodb_lock_wait_timeout = 1",
)
_OF_MARIADB = (
    # end the transaction of a vanished process, which releases its locks
    "SET SESSION idle_transaction_timeout = 5",
    # look up long lists of names one by one, and do not convert them to a table
    "SET SESSION in_predicate_conversion_threshold = 0",
)
_OF_MYSQL = (
    # the nearest equivalents; a connection that is idle for longer is reopened when it is needed
    "SET SESSION wait_timeout = 60",
    "SET SESSION range_optimizer_max_mem_size = 0",
)
AFRESH = (
    "SET NAMES utf8mb4; SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED; SET SESSION autocommit = 1, "
    "time_zone = '+00:00'"
)
"""Restores the defaults on a connection for a handler, so that no settings of an earlier handler remain."""
_PLACE = "SELECT DATABASE(), CURRENT_ROLE()"
"""Reads the state that a reset does not restore."""
_QUERY, _RESET = 0x03, 0x1F
_INQUIRY = "SELECT @@max_allowed_packet, @@read_only"


class Connection(Struct, eq=False):
    """One connection, around the driver's."""

    driver: Any
    made_at: float = field(default_factory=time.monotonic)
    largest: int = 0
    """The maximum size of a packet that the server accepts, in bytes."""
    read_only: bool = False
    """True if the server was read-only when the connection was opened: a replica, which may be behind."""
    mariadb: bool = True
    place: Sequence[Any] = ()
    name: str = ""
    """The caller's row of the handlers' transactions on it, of which there have been `number` so far."""
    number: int = 0

    async def ask(
        self, packet: bytes | str, meanwhile: Callable[[], object] | None = None, *, answers: list[Rows] | None = None
    ) -> list[Rows]:
        """Send a packet; return the rows of each statement that has a result. Raises MySQLError, ProtocolError.

        `meanwhile` is called while the server works. `answers`: filled, also until an error.
        """
        driver = self.driver
        answers = [] if answers is None else answers
        try:
            await driver._execute_command(_QUERY, packet)
        except UNREADABLE as error:
            raise ProtocolError(f"an answer before cannot be read: {said(error)}") from error
        if meanwhile is not None:
            try:
                meanwhile()
            except BaseException:
                self.drop()  # the pending answer will not be read
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
            raise ProtocolError(f"the answer cannot be read: {said(error)}") from error

    async def begin(self) -> None:
        """Begin a transaction for a handler, on a new or reset connection.

        Raises ProtocolError if an earlier handler has left the connection in another database or role.
        """
        [[place]] = await self.ask(f"{AFRESH}; {_PLACE}; BEGIN")
        if place != (self.place or place):
            raise ProtocolError("an earlier transaction has left it in another database or role")
        self.place = place

    async def rollback(self) -> None:
        """Roll back the open transaction."""
        await self.ask("ROLLBACK")

    async def reset(self) -> None:
        """Clear the settings, locks and temporary objects that a handler left in the session. One round trip."""
        try:
            await self.driver._execute_command(_RESET, b"")
            await self.driver._read_ok_packet()
        except UNREADABLE as error:
            raise ProtocolError(f"the answer cannot be read: {said(error)}") from error

    def check_writable(self, where: str) -> None:
        """Raise NotSent if the connection is to a replica: none of the hosts was writable."""
        if self.read_only:
            raise NotSent(f"{where}: only a server that is read-only can be reached")

    @property
    def usable(self) -> bool:
        transport = self.driver._transport
        return bool(self.driver.connected and transport is not None and not transport.is_closing())

    def drop(self) -> None:
        """Close it at once, since the server may not answer."""
        driver = self.driver
        transport = driver._transport
        if transport is not None:
            transport.abort()
        driver.close()

    async def end(self, *, within: float) -> None:
        """Close it cleanly, if possible."""
        with suppress(MySQLError, OSError, TimeoutError, *UNREADABLE):
            async with asyncio.timeout(within):
                await self.driver.ensure_closed()
        self.drop()


async def connect(address: Address, *, within: float, plain: bool = False) -> Connection:
    """Open a connection to the first writable host. `plain`: for a handler, without our settings.

    Raises NotSent, StoreUnavailable, StoreMismatch, BadInput.
    """
    tls = address.tls()
    problem: Exception | None = None
    made: Connection | None = None
    for host, port in address.hosts:
        try:
            async with asyncio.timeout(within):
                connection = await _connect(address, host, port, tls, within=within, plain=plain)
        except (MySQLError, ProtocolError, OSError, TimeoutError, *UNREADABLE) as error:
            found = meaning(ProtocolError(said(error)) if isinstance(error, UNREADABLE) else error, address.shown)
            if isinstance(found, Lost | NotSent):
                found = NotSent(unreached(address.shown, error))
            problem = found
            problem.__cause__ = error
            continue
        if made is not None:
            made.drop()
        made = connection
        if not made.read_only:
            break  # a replica serves reads; writes are refused there, and tried again
    if made is None:
        assert problem is not None
        raise problem
    return made


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
            (AFRESH, _INQUIRY) if plain else (*_SETTINGS, *(_OF_MARIADB if connection.mariadb else _OF_MYSQL), _INQUIRY)
        )
        [((largest, read_only),)] = await connection.ask("; ".join(settings))
        connection.largest = int(largest)
        connection.read_only = str(read_only) not in ("0", "OFF", "b'OFF'")
    except BaseException:
        connection.drop()
        raise
    return connection


MYSQL = Dialect(logging.getLogger("bide.mysql"), address_of, connect, meaning, said, AWAY, Names)


# --- calls

_SECOND_BEST = 1.0
"""Seconds that a connection to a replica serves reads before the primary is tried again."""
BEGIN, _COMMIT, _BETWEEN = b"BEGIN", b"COMMIT", b"; "
_SNAPSHOT = (
    b"SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY",
    b"START TRANSACTION WITH CONSISTENT SNAPSHOT",
)


class Repeated(NamedTuple):
    """The caller's row of a call that was done before."""

    now: Millis
    micros: int
    answer: bytes | None


class Call(NumberedCall):
    """One call under way: it sends packets of statements from `queries.sql`, with the values written into them."""

    __slots__ = ("_ahead",)
    utc = True
    """True if the time zone of the connection is UTC."""
    quote: Quote = staticmethod(quoted)
    there = Code(THERE.encode())
    packed, unpacked = staticmethod(pack_topics), staticmethod(unpack_topics)

    def __init__(self, *of: Any) -> None:
        super().__init__(*of)
        self._ahead: tuple[bytes, ...] = ()

    def write(self, query: str, **values: Any) -> bytes:
        """A named query with its values."""
        written: bytes = self.queries[query].write(self.quote, **values)
        return written

    def begin(self, now: Millis | None, most: int = 0) -> list[bytes]:
        """The statements that begin a transaction and set its time: `now`, or the server's time.

        `most`: the maximum number of tokens that may be given out above the clock.
        """
        if now is None:
            return [BEGIN, *self.read_clock(None)]
        floor = [self.write(query, now=now, most=most) for query in ("raise_floor", "take_floor")]
        return [BEGIN, *floor]

    def read_clock(self, now: Millis | None) -> list[bytes]:
        """The statements that set the time for those that follow."""
        return [self.write("read_clock", there=self._there(now)), self.write("tell_clock")]

    def select_clock(self, now: Millis | None) -> bytes:
        """The statement that only returns the time."""
        return self.write("select_clock", there=self._there(now))

    def _there(self, now: Millis | None) -> Code | int:
        return self.there if now is None else now * 1000

    def pass_gate(self, micros: int | Code, answer: bytes | None = None) -> list[bytes]:
        """The statements that commit a call if it is new, and otherwise fail. `micros`: its highest token."""
        if answer is not None and 4 * len(answer) > self.connection.largest:  # with escapes and other statements
            answer = b""  # too large for the packet: see `MySqlConnection._kept`
        values = {"me": self.caller, "number": self.number, "micros": micros, "answer": answer}
        return [self.write("pass_gate", **values), self.write("gate"), _COMMIT]

    def ending(self) -> list[bytes]:
        """The statements that commit a call without a number."""
        return [_COMMIT]

    async def begin_snapshot(self) -> None:
        """Let all queries from now on see the same state of the database. Takes no extra round trip."""
        self._ahead = _SNAPSHOT

    async def commit(self) -> None:
        await self.send(*self.ending())

    async def send(
        self, *statements: bytes, commits: bool = False, meanwhile: Callable[[], object] | None = None
    ) -> list[Rows]:
        """Send one packet; return the rows of each statement that has a result. `meanwhile`: called while waiting."""
        self.sent = self.sent or commits
        if self._ahead:
            statements, self._ahead = (*self._ahead, *statements), ()
        found: list[Rows] = await self.connection.ask(_BETWEEN.join(statements), meanwhile)
        return found

    async def timed(
        self, *statements: bytes, commits: bool = False, meanwhile: Callable[[], object] | None = None
    ) -> list[Rows]:
        """Like `send`, for a packet whose first result is that of the query `clock`."""
        sent = time.monotonic()
        answers = await self.send(*statements, commits=commits, meanwhile=meanwhile)
        if self._of.time is not None:
            self._of.time.saw(answers[0][0][1], sent, time.monotonic())
        return answers

    async def ask(self, query: str, **values: Any) -> Rows:
        answers = await self.send(self.write(query, **values))
        return answers[0] if answers else ()

    def lines(self, rows: Sequence[Sequence[Any]]) -> dict[str, Any]:
        """The parameters of a query that inserts many rows."""
        return {"rows": tuples(rows, self.quote)}

    def listed(self, values: Sequence[Any]) -> Code:
        """The parameter for a list of these values."""
        return listed(values, self.quote)

    @staticmethod
    def text(data: bytes) -> str:
        return data.decode("utf-8", "replace")

    @staticmethod
    def name(data: bytes) -> str:
        """Decode a name. Bytes that are not UTF-8, written by another program, stay distinct."""
        return data.decode("utf-8", "surrogateescape")

    async def introduce(self) -> None:
        await self.ask("new_caller", me=self.caller, there=self.there)


class MySqlConnection(JournaledConnection[Call]):
    """See `sql.journaled_connection`."""

    _dialect = MYSQL
    largest = 0
    """The maximum size of a packet that the server accepts, in bytes, once it is known; until then 0."""

    async def _connect(self) -> Connection:
        connection = await connect(self._address, within=self._silence)
        self.largest = connection.largest
        return connection

    async def _connected(self, *, writes: bool) -> Any:
        connection = await super()._connected(writes=writes)
        if writes:
            connection.check_writable(self._address.shown)
        return connection

    def _fit(self, connection: Connection) -> bool:
        """Also reject a connection to a replica once it is time to try the primary again."""
        aging = connection.read_only and len(self._address.hosts) > 1
        return connection.usable and not (aging and time.monotonic() - connection.made_at >= _SECOND_BEST)

    def _call(self, connection: Connection, limit: asyncio.Timeout) -> Call:
        queries = queries_of(self._address.schema, self._address.prefix, mariadb=connection.mariadb)
        return Call(self, connection, queries, limit)

    async def _prepare(self, call: Call) -> Repeated | None:
        return await self._find_repeated(call) if call.may_be_done else None

    def _kept(self, row: Any) -> Repeated:
        if row[-1] == b"":
            raise OutcomeUnknown(f"{self._address.shown}: a call was done, but its answer was too large to be kept")
        return Repeated(*row[1:])

    def _meaning(self, error: Exception, call: Call | None, *, adding: bool) -> Exception:
        found = super()._meaning(error, call, adding=adding)
        if isinstance(found, StoreMismatch) and found is not error and call is not None and call.connection.read_only:
            return NotSent(str(found))  # a new replica that is still being set up, in the primary's place
        return found
