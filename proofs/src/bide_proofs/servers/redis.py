"""One Redis server of our own, the base of Sentinels and Cluster nodes too, and a minimal client.

The client sends commands and reads replies, in RESP2, blocking, with only the standard library. So servers can be
started where no driver is installed, and tests of the driver do not rely on it.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from bide_proofs.servers.process import program, until
from bide_proofs.servers.server import ServerProcess

Reply = str | int | None | list["Reply"]
"""A reply; bytes that are not UTF-8 are kept as surrogates, so that they can be sent back unchanged."""

Word = str | int
PACKAGES = "redis-server"
_PATIENCE = 60.0


class Refused(OSError):
    """An error reply, such as LOADING; the message is the server's."""


class Connection:
    """A connection to one server. Raises OSError if it breaks, or if no data arrives for a minute."""

    def __init__(self, host: str, port: int) -> None:
        self._socket = socket.create_connection((host, port), _PATIENCE)
        self._file = self._socket.makefile("rb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self._file.close()
        self._socket.close()

    def ask(self, *words: Word) -> Reply:
        """Send one command and return its reply. Raises Refused."""
        encoded = [str(word).encode("utf-8", "surrogateescape") for word in words]
        parts = (b"$%d\r\n%b\r\n" % (len(word), word) for word in encoded)
        self._socket.sendall(b"*%d\r\n%b" % (len(encoded), b"".join(parts)))
        reply = self._read()
        if isinstance(reply, Refused):
            raise reply
        return reply

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


class RedisServer(ServerProcess):
    """A server with its data, its configuration and its log in `directory`, which is created if necessary.

    It flushes its append-only file every second: acknowledged changes survive a kill of the process, but a crash of the
    machine only if `options` contain `{"appendfsync": "always"}`. `options` are further lines of the configuration, by
    directive (or by a longer beginning of the line).
    """

    title = "Redis"
    taken = ("Address already in use", "Failed listening on port")

    @property
    def url(self) -> str:
        return f"redis://{self.host}:{self.port}/0"

    @property
    def data(self) -> Path:
        return self.home

    @property
    def configuration(self) -> Path:
        return self.home / "redis.conf"

    def directives(self) -> dict[str, str]:
        """The configuration that `options` can replace."""
        return {
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": '""',
            # through a file: without it a replica waits up to 5 s for others, and 1 s more for new changes
            "repl-diskless-sync": "no",
        }

    def prepare(self) -> None:
        # written once: the server itself rewrites it when it receives REPLICAOF
        if self._chooses or not self.configuration.exists():
            place = {"bind": self.host, "port": str(self.port), "dir": f'"{self.data.resolve()}"'}
            lines = {**place, **self.directives(), **self.options}
            self.configuration.write_text("".join(f"{name} {rest}\n" for name, rest in lines.items()), encoding="utf-8")

    def command(self) -> Sequence[str]:
        return [program("redis-server", PACKAGES), str(self.configuration)]

    def answers(self) -> bool:
        # another server may have the port, and this one may not have failed yet
        return self.ask("PING") == "PONG" and self.info("server")["process_id"] == str(self.pid)

    def forget_history(self) -> None:
        """Rewrite the append-only file, so that it contains the current data and no history."""

        def written() -> bool:
            told = self.info("persistence")
            return told["aof_rewrite_in_progress"] == told["aof_rewrite_scheduled"] == "0"

        until(written, f"{self.name} to be done with writing its file")
        self.ask("BGREWRITEAOF")
        until(written, f"{self.name} to write its file anew")

    def ask(self, *words: Word) -> Reply:
        """Send one command on a new connection. Raises OSError; for an error reply Refused, a kind of OSError."""
        with Connection(self.host, self.port) as connection:
            return connection.ask(*words)

    def info(self, section: str) -> dict[str, str]:
        """The fields of INFO, or of CLUSTER INFO for "cluster"."""
        reply = self.ask("CLUSTER", "INFO") if section == "cluster" else self.ask("INFO", section)
        assert isinstance(reply, str)
        return dict(line.split(":", 1) for line in reply.splitlines() if ":" in line)

    @property
    def is_master(self) -> bool:
        """True if the server reports the role of master; False if it does not answer."""
        try:
            return self.info("replication")["role"] == "master"
        except OSError:
            return False

    @property
    def is_linked(self) -> bool:
        """True if it follows a master and is connected to it."""
        return self.info("replication").get("master_link_status") == "up"
