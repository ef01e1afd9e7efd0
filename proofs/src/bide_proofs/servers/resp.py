"""The least Redis client: sends commands and reads replies, in RESP2, blocking, with nothing but the standard library.

So that servers can be started where no driver is installed, and judged by something else than the driver in test.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Self

Reply = str | int | None | list["Reply"]
"""A reply; bytes that are no UTF-8 are kept as surrogates, so that they can be sent as they came."""

Word = str | int
_PATIENCE = 60.0


class Refused(OSError):
    """An error reply, such as LOADING; the message is the server's."""


class Connection:
    """A connection to one server. Raises OSError when it breaks, or when nothing comes for a minute."""

    def __init__(self, host: str, port: int) -> None:
        self._socket = socket.create_connection((host, port), _PATIENCE)
        self._file = self._socket.makefile("rb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self._file.close()
        self._socket.close()

    def ask(self, *words: Word) -> Reply:
        """One command and its reply. Raises Refused."""
        return self.ask_all([words])[0]

    def ask_all(self, commands: Sequence[Sequence[Word]]) -> list[Reply]:
        """Many commands in one round trip, and all their replies. Raises the first Refused after the last reply."""
        self._socket.sendall(b"".join(map(_packed, commands)))
        replies = [self._read() for _ in commands]
        for reply in replies:
            if isinstance(reply, Refused):
                raise reply
        return [reply for reply in replies if not isinstance(reply, Refused)]

    def _read(self) -> Reply | Refused:
        line = self._file.readline()
        if not line.endswith(b"\r\n"):
            raise ConnectionResetError("the server closed the connection")
        kind, rest = line[:1], line[1:-2].decode("utf-8", "surrogateescape")
        match kind:
            case b"+":
                return rest
            case b"-":
                return Refused(rest)
            case b":":
                return int(rest)
            case b"$":
                return None if rest == "-1" else self._bulk(int(rest))
            case b"*":
                items = [self._read() for _ in range(int(rest))]
                return [item if not isinstance(item, Refused) else str(item) for item in items]
            case _:
                raise ValueError(f"{line!r} is no reply in RESP2")

    def _bulk(self, length: int) -> str:
        data = self._file.read(length + 2)
        if len(data) < length + 2:
            raise ConnectionResetError("the server closed the connection")
        return data[:-2].decode("utf-8", "surrogateescape")


def _packed(words: Sequence[Word]) -> bytes:
    encoded = [str(word).encode("utf-8", "surrogateescape") for word in words]
    return b"*%d\r\n" % len(encoded) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in encoded)
