"""The way to a service: one pool of connections, kept alive, and what can befall a call on it."""

from __future__ import annotations

import io
from typing import Any, NamedTuple

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.client_reqrep import ConnectionKey

from bide.ports.wire import CONTENT_TYPE
from bide.stores.http.address import Address
from bide.stores.http.errors import Lost, NotSent
from bide.stores.urls import unreached

_CONNECT = 2.0
"""Seconds that making a connection may take, with the look-up of the name and TLS."""
_IDLE = 4.0
"""Seconds that a connection is kept unused: less than servers and proxies do, which close it while a call is sent."""

_PIECE = 1 << 19
"""Bytes that are handed to the connection at once."""


class Reply(NamedTuple):
    """What came back."""

    status: int
    kind: str
    """The content type, without parameters."""
    body: bytes


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

    def __init__(self, address: Address, token: str | None) -> None:
        self.where = address.shown
        self.has_token = token is not None
        self._base = f"{address.base}/v1/store/"
        headers = {"Content-Type": CONTENT_TYPE, "Accept": f"{CONTENT_TYPE}, */*"}
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
            raise Lost(f"{self.where}: {_said(error)}") from error
        except RuntimeError as error:  # what aiohttp says of a session that was closed meanwhile
            raise NotSent(f"{self.where}: {error}") from error

    def stream(self, operation: str, body: bytes, silence: float) -> Any:
        """A call whose answer goes on, to be entered; it fails when nothing is heard for `silence` seconds."""
        return self._session.post(
            self._base + operation, data=body, timeout=_timeout(silence), allow_redirects=False, read_bufsize=65_536
        )

    async def close(self) -> None:
        await self._session.close()


def _timeout(silence: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=None, connect=_CONNECT, sock_connect=_CONNECT, sock_read=silence)


def _said(error: BaseException) -> str:
    return str(error) or type(error).__name__
