"""Calls to a service, each done once however often it is sent, and the transport that carries them.

`ports.remote` describes the sessions. A call whose answer was lost is sent again over another connection (see
`resending`); for this reason each operation that writes has one call under way at a time. Calls that only read are sent
again as they are, to any instance. If the instance of the session seems to be gone, a call whose answer was not lost
goes out in a new session; any other call raises `OutcomeUnknown`.

Every call carries the token, so the token must not travel in clear text: with a token, `http:` is accepted only for
this machine, unless the URL ends in `?insecure=1`, which declares the network path safe (a private network, a proxy on
the same host).
"""

from __future__ import annotations

import asyncio
import io
import ipaddress
import logging
from time import monotonic
from typing import Any, Literal, NamedTuple
from urllib.parse import parse_qsl, urlsplit

import aiohttp
import msgspec
from aiohttp.client_proto import ResponseHandler
from aiohttp.client_reqrep import ConnectionKey
from msgspec import Raw

from bide.core.errors import (
    BadInput,
    OutcomeUnknown,
    SetupError,
    StoreError,
    StoreFull,
    StoreMismatch,
    StoreUnavailable,
)
from bide.core.instants import Millis
from bide.ports import remote
from bide.ports.remote import OPERATIONS, Call, Failure, Hello, Operation, Success, Welcome
from bide.stores.resending import FIRST_PAUSE, Lost, NotSent, Resending
from bide.stores.server import ServerTime
from bide.stores.urls import unreached

_ACCEPTED = '"http://host:8420" or "https://host/prefix"; the only option is "?insecure=1"'
PORT = 8420
"""The port of a service if an `http:` URL has none."""
_CONNECT = 2.0
"""Seconds allowed to make a connection, including name resolution and TLS."""
_IDLE = 4.0
"""Seconds that an idle connection is kept: fewer than servers and proxies keep it, so they do not close it first."""
_PIECE = 1 << 19
"""The most bytes that are handed to the connection in one piece."""


def base_of(url: str, token: str | None) -> str:
    """The URL that all calls begin with. Raises BadInput, which never shows a password or the token."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise BadInput("store", "a URL that cannot be read", _ACCEPTED) from None
    if "@" in parts.netloc:
        raise BadInput("store", "a URL with a password", "the token separately: Bide(url, token=...) or BIDE_TOKEN")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    insecure = options.pop("insecure", "0")
    unfit = parts.scheme not in ("http", "https") or not host or parts.fragment or not url.isprintable() or " " in url
    if unfit or options or insecure not in ("0", "1"):
        raise BadInput("store", f"{url.partition('?')[0]}?..." if options else url, _ACCEPTED)
    if token is not None and parts.scheme == "http" and insecure != "1" and not _is_loopback(host or ""):
        raise BadInput(
            "store", url,
            'a URL with "https:" if there is a token, since "http:" sends it in clear text; "?insecure=1" allows '
            "that",
        )  # fmt: skip
    name = f"[{host}]" if ":" in (host or "") else host
    if port is None and parts.scheme == "http":
        port = PORT
    return f"{parts.scheme}://{name if port is None else f'{name}:{port}'}{parts.path.rstrip('/')}"


def _is_loopback(host: str) -> bool:
    """Return true if data sent to `host` stays on this machine. The only name known to do so is localhost."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


# --- errors


class TooLarge(StoreError):
    """Nothing was done: the body exceeds the size limit. A batch is sent again in parts."""

    def __init__(self) -> None:
        super().__init__("nothing was done: the call has more bytes than the service, or a proxy before it, takes")


class NotAllowed(SetupError, StoreError):
    """Nothing was done: the token is missing, not accepted, or does not allow the call.

    This is a `SetupError`, because an operator has to supply another token. It is also a `StoreError`, so that a worker
    keeps running: the token may receive more scopes later.
    """


class _Problem(msgspec.Struct):
    """The fields of an `application/problem+json` that the client shows."""

    detail: str = ""
    title: str = ""


_read_problem = msgspec.json.Decoder(_Problem).decode


class Reply(NamedTuple):
    status: int
    kind: str
    """The content type, without parameters."""
    body: bytes

    @property
    def text(self) -> str:
        """The text of an error, from the store calls or from middleware before them; empty if there is none."""
        try:
            if self.kind == remote.CONTENT_TYPE:
                return remote.read_failure(self.body).text
            if self.kind == "application/problem+json":
                problem = _read_problem(self.body)
                return problem.detail or problem.title
        except remote.UNREADABLE:
            pass
        return ""


# --- connections


class _NewestFirst(aiohttp.TCPConnector):
    """Reuses the most recently used connection, so that connections opened for a burst become idle and close.

    aiohttp reuses the least recently used one. With steady traffic no connection would ever reach the idle limit, and
    both this process and the service would keep as many as the busiest moment needed.
    """

    def _release(self, key: ConnectionKey, protocol: ResponseHandler, *, should_close: bool = False) -> None:
        super()._release(key, protocol, should_close=should_close)
        rested = self._conns.get(key)
        if rested and rested[-1][0] is protocol:
            rested.rotate(1)


class Transport:
    """The connections to one service, for one event loop. The token is only sent in a header of each call."""

    def __init__(self, where: str, token: str | None) -> None:
        self.where = where
        self._has_token = token is not None
        self._base = f"{where}/v1/store/"
        headers = {"Content-Type": remote.CONTENT_TYPE, "Accept": f"{remote.CONTENT_TYPE}, */*"}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        self._session = aiohttp.ClientSession(
            connector=_NewestFirst(limit=0, keepalive_timeout=_IDLE),
            headers=headers,
            skip_auto_headers=("User-Agent", "Accept-Encoding"),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )

    async def post(self, operation: str, body: bytes, silence: float) -> Reply:
        """Send one call. Raises NotSent, or Lost if nothing arrived for `silence` seconds or the connection broke."""
        try:
            async with self._session.post(
                self._base + operation,
                data=body if len(body) <= _PIECE else io.BytesIO(body),
                timeout=_timeout(silence),
                allow_redirects=False,
            ) as response:
                return Reply(response.status, response.content_type, await response.read())
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise NotSent(unreached(self.where, error)) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Lost(f"{self.where}: {str(error) or type(error).__name__}") from error
        except RuntimeError as error:  # aiohttp raises it for a session that was closed meanwhile
            raise NotSent(f"{self.where}: {error}") from error

    def stream(self, operation: str, body: bytes, silence: float) -> Any:
        """A call with a streamed answer, as a context manager; it fails if nothing arrives for `silence` seconds."""
        return self._session.post(
            self._base + operation, data=body, timeout=_timeout(silence), allow_redirects=False, read_bufsize=65_536
        )

    def not_allowed(self, status: int, text: str) -> NotAllowed:
        """The error for 401 and 403. It never shows the token."""
        if status != 401:
            return NotAllowed(f"{self.where} refused: {text or 'the token does not allow this'}")
        if not self._has_token:
            return NotAllowed(f"{self.where} asks for a token: give Bide(url, token=...) or set BIDE_TOKEN")
        return NotAllowed(
            f"{self.where} does not accept the token: {text or 'it is wrong, has expired or was revoked'}"
        )

    async def close(self) -> None:
        await self._session.close()


def _timeout(silence: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=None, connect=_CONNECT, sock_connect=_CONNECT, sock_read=silence)


# --- calls

_log = logging.getLogger("bide.http")
_AT_FIRST = 3.0
"""Seconds that opening waits for a service that cannot be reached."""
_REFUSALS = 16
"""Consecutive refusals by other instances after which the session's instance counts as gone. With two instances chosen
at random, this is wrong once in 65,536 times, and costs a new session, or `OutcomeUnknown` at worst."""
_AT_ONCE = 3
"""Refusals after which the client asks again without a pause: a round-robin proxy returns within that many calls."""
_BEHIND = (500, 502, 504, 408)
"""A proxy's answers that leave open whether the call reached the service."""
_LATER = (429, 503)
"""The answers that mean "not now"."""


class _Refused(Exception):
    """Not done, and a resend would not help. An earlier send of the same call may still have been done."""

    def __init__(self, error: StoreError) -> None:
        self.error = error
        super().__init__(str(error))


class Calls:
    """The calls of one client, in one session after another, on one event loop."""

    def __init__(
        self,
        transport: Transport,
        time: ServerTime,
        *,
        clock: Literal["server", "caller"],
        patience: float,
        silence: float,
    ) -> None:
        self._transport = transport
        self._time = time
        self._clock = clock
        self._patience = patience
        self._silence = silence
        self._loop = asyncio.get_running_loop()
        self._session = ""
        self._beginning: asyncio.Task[None] | None = None
        self._turns = {name: asyncio.Lock() for name, operation in OPERATIONS.items() if operation.once}
        self._numbers = dict.fromkeys(self._turns, 0)
        self.closed = False
        self.body_limit = 1 << 20
        self.most = 1_000
        self.resent = 0

    async def begin(self) -> None:
        """Check that the URL is bide's service, and begin a session.

        Raises StoreUnavailable, StoreMismatch, NotAllowed.
        """
        resending = Resending(_AT_FIRST)
        while True:
            try:
                return await self._begin()
            except (NotSent, Lost) as error:
                await resending.pause(str(error))

    async def ask(self, operation: Operation[Any, Any], request: bytes, now: Millis | None) -> Success:
        """Do an operation, exactly once if it writes. Raises StoreError, BadInput, SetupError, TooLarge."""
        if not operation.once:
            return await self._until_known(operation.name, 0, request, now)
        async with self._turns[operation.name]:
            self._numbers[operation.name] += 1
            return await self._until_known(operation.name, self._numbers[operation.name], request, now)

    async def _until_known(self, name: str, number: int, request: bytes, now: Millis | None) -> Success:
        """Send a call until there is a final answer, or patience has ended."""
        if len(request) + 512 > self.body_limit:
            raise TooLarge
        where, resending = self._transport.where, Resending(self._patience)
        silence, refusals, body = self._silence, 0, b""
        session: str | None = None
        while True:
            if self.closed:
                raise resending.given_up(f"{where}: {name}: the store is closed")
            if resending.may_be_done and session != self._session:
                raise OutcomeUnknown(f"{where}: {name}: the answer was lost, and the service has restarted")
            error: Exception
            pause: float | None = None
            try:
                if number and not self._session:
                    await self._begin_again()
                if session != self._session:
                    session, refusals = self._session, 0
                    body = remote.encode(Call(session, number, now, Raw(request)))
                at = monotonic()
                answer = self._read(
                    await self._transport.post(name, body, min(silence, max(resending.ends - at, 0.05)))
                )
                if not isinstance(answer, Failure):
                    if not resending.may_be_done:  # otherwise this may be a repeated answer, with an old time
                        self._time.saw(answer.micros, at, monotonic())
                    return answer
                if answer.kind not in (remote.SESSION, remote.ELSEWHERE):
                    raise remote.error_of(answer, where)
                refusals += 1
                if self._session == session and (answer.kind == remote.SESSION or refusals >= _REFUSALS):
                    self._session = ""
                error, pause = NotSent(f"{where}: {answer.text}"), FIRST_PAUSE / 2 if refusals > _AT_ONCE else 0.0
            except (NotSent, Lost) as met:
                error, silence = met, silence * 2
                resending.may_be_done = resending.may_be_done or (number > 0 and isinstance(met, Lost))
            except _Refused as refused:
                raise resending.refused(refused.error) from None
            await resending.pause(f"{name}: {error}", seconds=pause)
            self.resent += 1

    def _read(self, reply: Reply) -> Success | Failure:
        """Read the answer. Raises NotSent, Lost, TooLarge, and `_Refused` if a resend would not help."""
        where = self._transport.where
        if reply.kind == remote.CONTENT_TYPE:
            try:
                if reply.status == 200:
                    return remote.read_success(reply.body)
                failure = remote.read_failure(reply.body)
            except remote.UNREADABLE as error:
                raise Lost(f"{where}: an answer that cannot be read ({error})") from error
            if failure.kind == remote.REFUSED:
                raise _Refused(self._transport.not_allowed(reply.status, failure.text))
            return failure
        text = reply.text
        if reply.status in (401, 403):
            raise _Refused(self._transport.not_allowed(reply.status, text))
        if reply.status == 413:
            raise TooLarge
        if reply.status == 507:
            raise _Refused(StoreFull(f"{where}: {text or 'the store is full'}"))
        if reply.status == 503 and text:
            raise _Refused(StoreUnavailable(f"{where}: {text}"))
        if reply.status in _LATER:
            raise NotSent(f"{where}: it answers {reply.status}")
        answers = f"{where}: it answers {reply.status} ({reply.kind})"
        if reply.status == 200 or reply.status in _BEHIND:
            raise Lost(f"{answers}, which is not what bide's service says")
        raise _Refused(StoreUnavailable(f"{answers}: this is no longer bide's service"))

    # --- sessions

    async def _begin_again(self) -> None:
        """Begin a new session, one for all concurrent calls."""
        if self._beginning is None:
            self._beginning = self._loop.create_task(self._begin(), name="bide http session")
            self._beginning.add_done_callback(self._begun)
        await asyncio.shield(self._beginning)

    def _begun(self, task: asyncio.Task[None]) -> None:
        self._beginning = None
        if not task.cancelled():
            task.exception()  # each waiting call raises it

    async def _begin(self) -> None:
        at = monotonic()
        welcome = self._welcome(
            await self._transport.post("open", remote.encode(Hello(remote.WIRE, self._clock)), self._silence)
        )
        self._time.saw(welcome.micros, at, monotonic())
        self.body_limit = welcome.body_limit
        self.most = max(1, min(welcome.most, 1_000))
        self._session = welcome.session

    def _welcome(self, reply: Reply) -> Welcome:
        where = self._transport.where
        if reply.kind == remote.CONTENT_TYPE and reply.status == 200:
            try:
                welcome = remote.read_welcome(reply.body)
            except remote.UNREADABLE as error:
                raise StoreMismatch(f"{where}: an answer that cannot be read ({error})") from error
            if welcome.service != remote.SERVICE or welcome.wire != remote.WIRE or not welcome.session:
                raise StoreMismatch(
                    f"{where}: {welcome.service} {welcome.version} speaks version {welcome.wire} of the store calls, "
                    f"and this client {remote.WIRE}; install the same version of bide on both sides"
                )
            return welcome
        if reply.status in (401, 403, 507, *_LATER, *_BEHIND) or reply.kind == remote.CONTENT_TYPE:
            try:
                answer = self._read(reply)
            except _Refused as refused:
                raise refused.error from None
            if isinstance(answer, Failure):
                meant = remote.error_of(answer, where)
                raise meant if isinstance(meant, StoreError | SetupError) else StoreMismatch(f"{where}: {meant}")
        elsewhere = "; it leads elsewhere: give the URL that it leads to" if 300 <= reply.status < 400 else ""
        raise StoreMismatch(
            f"{where}: this is not bide's service, or a path of it: it answers {reply.status} ({reply.kind}){elsewhere}"
        )
