"""One Redis server of our own, which Sentinels and nodes of a Cluster are too, and the least client of it.

The client sends commands and reads replies, in RESP2, blocking, with nothing but the standard library: so that servers
can be started where no driver is installed, and judged by something else than the driver in test.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from bide_proofs.servers.process import program, until
from bide_proofs.servers.server import ServerProcess

Reply = str | int | None | list["Reply"]
"""A reply; bytes that are no UTF-8 are kept as surrogates, so that they can be sent as they came."""

Word = str | int
PACKAGES = "redis-server"
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
    """A server with its data, its configuration and its log in `directory`, which is made if it is not there.

    It flushes its append-only file every second: what is acknowledged survives a kill of the process, and one of the
    machine only where `options` say `{"appendfsync": "always"}`. These are further lines of its configuration, the
    directive (or more of the line) to the rest.
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
            # through a file: without one a replica waits up to 5 s for others, and 1 s more before it gets what is new
            "repl-diskless-sync": "no",
        }

    def prepare(self) -> None:
        # written once: the server itself rewrites it when it is told to follow another
        if self._chooses or not self.configuration.exists():
            place = {"bind": self.host, "port": str(self.port), "dir": f'"{self.data.resolve()}"'}
            lines = {**place, **self.directives(), **self.options}
            self.configuration.write_text("".join(f"{name} {rest}\n" for name, rest in lines.items()), encoding="utf-8")

    def command(self) -> Sequence[str]:
        return [program("redis-server", PACKAGES), str(self.configuration)]

    def answers(self) -> bool:
        # another server may have the port, while ours is about to find that out
        return self.ask("PING") == "PONG" and self.info("server")["process_id"] == str(self.pid)

    def forget_history(self) -> None:
        """Rewrite the append-only file, so that it holds the present data and no history."""

        def written() -> bool:
            told = self.info("persistence")
            return told["aof_rewrite_in_progress"] == told["aof_rewrite_scheduled"] == "0"

        until(written, f"{self.name} to be done with writing its file")
        self.ask("BGREWRITEAOF")
        until(written, f"{self.name} to write its file anew")

    def ask(self, *words: Word) -> Reply:
        """One command on a connection of its own. Raises OSError, and of these Refused for an error."""
        with Connection(self.host, self.port) as connection:
            return connection.ask(*words)

    def info(self, section: str) -> dict[str, str]:
        """The fields of INFO, or of CLUSTER INFO for "cluster"."""
        reply = self.ask("CLUSTER", "INFO") if section == "cluster" else self.ask("INFO", section)
        assert isinstance(reply, str)
        return dict(line.split(":", 1) for line in reply.splitlines() if ":" in line)

    @property
    def is_master(self) -> bool:
        """True if it says so; a server that does not answer is none."""
        try:
            return self.info("replication")["role"] == "master"
        except OSError:
            return False

    @property
    def is_linked(self) -> bool:
        """True if it follows a master, and their connection is up."""
        return self.info("replication").get("master_link_status") == "up"
