"""The connections of the service: what is not a body is bounded in bytes and in time, before anybody is known.

The parser itself has no bound: it would keep a header that never ends. Bytes are counted as they come, chunk by chunk;
what is in one chunk with the beginning of a head is at most as much as one read of the socket, and is looked at exactly
only where it could be too much. So a usual request costs two comparisons. The same bound goes for what stands between
the parts of a body that comes in chunks, and behind the last of them. A request that was answered before its body had
come is given a while for the rest.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from bide.service.replies import CONTENT_TYPE, Problem

MOST_BYTES = 65_536
"""That a request line and the headers may have together."""
PATIENCE = 30.0
"""Seconds that they may take, from the connection or their first byte on."""


class BoundedHeads(HttpToolsProtocol):
    """uvicorn's protocol, with these bounds."""

    _begun = 0
    """Heads so far."""
    _open = True
    """Whether a head is being waited for, or read."""
    _size = 0
    """Bytes of this head; within a body, of what is not part of it."""
    _part = False
    """Whether what came last held a part of a body, or the end of a request."""
    _doubtful = False
    """Whether what came last may be too much."""
    _too_large = False
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._timer = self.loop.call_later(PATIENCE, self._late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        begun, self._part = self._begun, False
        self._doubtful = self._size + len(data) > MOST_BYTES
        super().data_received(data)
        if self.transport.is_closing():
            return
        if begun == self._begun and not self._part:
            self._size += len(data)
        if self._size > MOST_BYTES:
            if self._open:
                self._refuse(_TOO_LARGE)
            else:
                self.transport.close()
        elif self._open and self._timer is None:
            self._timer = self.loop.call_later(PATIENCE, self._late)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._begun += 1
        self._open, self._size = True, 0

    def on_headers_complete(self) -> None:
        self._closed()
        if self._doubtful and len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MOST_BYTES:
            self._too_large = True
            raise ValueError("too large")  # which the parser hands on as a bad request
        super().on_headers_complete()
        self._size = 0

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._part, self._size = True, 0

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._closed()
        self._part, self._size = True, 0

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.more_body and self.cycle.response_complete and self._timer is None:
            self._timer = self.loop.call_later(PATIENCE, self.transport.close)

    def send_400_response(self, msg: str) -> None:
        if self._too_large:
            self._refuse(_TOO_LARGE)
        else:
            super().send_400_response(msg)

    def _closed(self) -> None:
        self._open = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        if self._begun:
            self._refuse(_TOO_SLOW)
        else:
            self.transport.close()

    def _refuse(self, problem: Problem) -> None:
        self._closed()
        said = f"content-type: {CONTENT_TYPE}\r\ncontent-length: {len(problem.body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(f"HTTP/1.1 {problem.status} {problem.shape.title}\r\n{said}".encode() + problem.body)
        self.transport.close()


_TOO_LARGE = Problem(
    431, "head-too-large", "Request Header Fields Too Large", f"the headers are larger than {MOST_BYTES} bytes",
    field="headers", accepted=f"at most {MOST_BYTES} bytes",
)  # fmt: skip
_TOO_SLOW = Problem(408, "too-slow", "Request Timeout", f"the headers were not complete after {PATIENCE:g} s")
