"""The way to a service: its URL, one pool of connections, and the errors that a call can meet on it.

A token goes with every call, so it is not sent in clear text: with a token `http:` is for this machine alone, unless
the URL ends in `?insecure=1`, which says that the way there is safe (a private network, a proxy on the same host).
"""

from __future__ import annotations

import io
import ipaddress
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

import aiohttp
import msgspec
from aiohttp.client_proto import ResponseHandler
from aiohttp.client_reqrep import ConnectionKey

from bide.core.errors import BadInput, SetupError, StoreError
from bide.ports import wire
from bide.stores.urls import unreached

_ACCEPTED = '"http://host:8420" or "https://host/prefix"; the only option is "?insecure=1"'
PORT = 8420
"""Of a service, where `http:` names none."""
_CONNECT = 2.0
"""Seconds that making a connection may take, with the look-up of the name and TLS."""
_IDLE = 4.0
"""Seconds that a connection is kept unused: less than servers and proxies do, which close it while a call is sent."""
_PIECE = 1 << 19
"""Bytes that are handed to the connection at once."""


def base_of(url: str, token: str | None) -> str:
    """The URL that all calls begin with. Raises BadInput that shows neither a password nor the token."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise BadInput("store", "a URL that cannot be read", _ACCEPTED) from None
    if "@" in parts.netloc:
        raise BadInput("store", "a URL with a password", "the token apart: Bide(url, token=...) or BIDE_TOKEN")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    insecure = options.pop("insecure", "0")
    unfit = parts.scheme not in ("http", "https") or not host or parts.fragment or not url.isprintable() or " " in url
    if unfit or options or insecure not in ("0", "1"):
        raise BadInput("store", url, _ACCEPTED)
    if token is not None and parts.scheme == "http" and insecure != "1" and not _is_loopback(host or ""):
        raise BadInput(
            "store", url,
            'a URL with "https:" when there is a token, since others on the way could read it; "?insecure=1" sends it '
            "all the same",
        )  # fmt: skip
    name = f"[{host}]" if ":" in (host or "") else host
    if port is None and parts.scheme == "http":
        port = PORT
    return f"{parts.scheme}://{name if port is None else f'{name}:{port}'}{parts.path.rstrip('/')}"


def _is_loopback(host: str) -> bool:
    """Tell whether data sent to `host` stays on this machine; of names only localhost is known to."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


# --- errors


class NotSent(Exception):
    """There is no connection, or nobody behind it, or somebody on the way refused it: nothing was done."""


class Lost(Exception):
    """The call was sent, and no answer came, or none that can be read: only a repeat by its number tells more."""


class TooLarge(StoreError):
    """Nothing was done: the body has more bytes than are taken. A batch is sent again in parts."""

    def __init__(self) -> None:
        super().__init__("nothing was done: the call has more bytes than the service, or a proxy before it, takes")


class NotAllowed(SetupError, StoreError):
    """Nothing was done: the token is missing, not accepted, or does not allow this.

    A `SetupError`, since somebody has to give another token; and a `StoreError`, so that a worker goes on: a token may
    be given more scopes while it runs.
    """


class _Problem(msgspec.Struct):
    """The part of an `application/problem+json` that matters here."""

    detail: str = ""
    title: str = ""


_read_problem = msgspec.json.Decoder(_Problem).decode


class Reply(NamedTuple):
    """An answer as it came back."""

    status: int
    kind: str
    """The content type, without parameters."""
    body: bytes

    @property
    def text(self) -> str:
        """The text of an error, from the store calls or from before them; empty where there is none."""
        try:
            if self.kind == wire.CONTENT_TYPE:
                return wire.read_failure(self.body).text
            if self.kind == "application/problem+json":
                problem = _read_problem(self.body)
                return problem.detail or problem.title
        except wire.UNREADABLE:
            pass
        return ""


# --- connections


class _NewestFirst(aiohttp.TCPConnector):
    """Takes the connection that was used last, so that those end that only a busy moment needed.

    aiohttp takes the one that has rested for longest. While calls go on, none then ever rests until it is idle, and
    there are for ever as many as there were calls at once in the busiest moment, here and at the service.
    """

    def _release(self, key: ConnectionKey, protocol: ResponseHandler, *, should_close: bool = False) -> None:
        super()._release(key, protocol, should_close=should_close)
        rested = self._conns.get(key)
        if rested and rested[-1][0] is protocol:
            rested.rotate(1)


class Link:
    """Belongs to one event loop. The token goes into a header of every call, and nowhere else."""

    def __init__(self, where: str, token: str | None) -> None:
        self.where = where
        self._has_token = token is not None
        self._base = f"{where}/v1/store/"
        headers = {"Content-Type": wire.CONTENT_TYPE, "Accept": f"{wire.CONTENT_TYPE}, */*"}
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
        """One call. Raises NotSent, or Lost when nothing was heard for `silence` seconds or the connection broke."""
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
        """A call whose answer goes on, to be entered; it fails when nothing is heard for `silence` seconds."""
        return self._session.post(
            self._base + operation, data=body, timeout=_timeout(silence), allow_redirects=False, read_bufsize=65_536
        )

    def not_allowed(self, status: int, text: str) -> NotAllowed:
        """The meaning of 401 and 403; the token itself is never shown."""
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
