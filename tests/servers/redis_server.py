"""One Redis server of our own, on 127.0.0.1: to be started, paused, killed and started again on the same data."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from tests.servers.child import Child, OneProcess, ServerFailed, program
from tests.servers.ports import free_port
from tests.servers.resp import Connection, Refused, Reply, Word
from tests.waiting import wait_until

HOST = "127.0.0.1"
PACKAGES = "redis-server"
_TRIES = 5
"""Ports that are tried, if others keep taking them first."""
_TAKEN = ("Address already in use", "Failed listening on port")


class RedisServer(OneProcess):
    """A server with its data, its configuration and its log in `directory`, which is made if it is not there.

    It writes an append-only file that is flushed as `appendfsync` says: with "always" every acknowledged write
    survives a kill of the machine, with "everysec" one of the process. `options` are further lines of its
    configuration, the directive (or more of the line) to the rest: `{"maxmemory": "10mb"}`. `environment` is added to
    its environment, say to preload another clock.
    """

    bus = False
    """Whether it needs a second port for the cluster bus."""

    def __init__(
        self,
        directory: Path,
        *,
        port: int | None = None,
        appendfsync: Literal["always", "everysec", "no"] = "everysec",
        options: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(directory, port=port, options=options)
        self.appendfsync = appendfsync
        self.environment = environment

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}/0"

    def start(self) -> None:
        """Runs and answers. Raises `ServerMissing`, `ServerFailed`."""
        self.launch()
        self.await_ready()

    def launch(self) -> None:
        """Started and not waited for: `await_ready` is to follow. So several start at once."""
        assert not self.running, "it runs already"
        command = program("redis-server", PACKAGES)
        if self._port is None:
            self._port = free_port(bus=self.bus)
        self.directory.mkdir(parents=True, exist_ok=True)
        configuration = self.directory / "redis.conf"
        # written once: the server itself rewrites it when it is told to follow another
        if not configuration.exists():
            lines = {"port": str(self.port), **self.directives(), **self.options}
            configuration.write_text("".join(f"{name} {rest}\n" for name, rest in lines.items()), encoding="utf-8")
        self._child = Child(
            [command, str(configuration), *self.flags()], self.directory / "log", environment=self.environment
        )

    def directives(self) -> dict[str, str]:
        """The configuration that `options` can replace."""
        return {
            "bind": HOST,
            "dir": f'"{self.directory.resolve()}"',
            "appendonly": "yes",
            "appendfsync": self.appendfsync,
            "save": '""',
            # through a file: without one a replica waits up to 5 s for others, and 1 s more before it gets what is new
            "repl-diskless-sync": "no",
        }

    def flags(self) -> list[str]:
        """Words of the command line, after the configuration."""
        return []

    def await_ready(self) -> None:
        """Until it answers, and has loaded what it had. Raises `ServerFailed`."""
        for _ in range(_TRIES):
            try:
                self._await_answer()
                return
            except ServerFailed as error:
                if not self._chooses or not any(words in str(error) for words in _TAKEN):
                    raise
            (self.directory / "redis.conf").unlink()
            (self.directory / "log").unlink()
            self._port = None
            self.launch()
        self._await_answer()

    def _await_answer(self) -> None:
        assert self._child is not None
        pid = self._child.pid

        def ours() -> bool:
            self.ask("PING")
            # another server may have the port, while ours is about to find that out
            return self.info("server")["process_id"] == str(pid)

        try:
            self._child.await_ready(ours, passes=(OSError, Refused))  # not there yet, or LOADING
        except ServerFailed:
            self._end(signal.SIGKILL)
            raise
        self._chooses = False

    def stop(self) -> None:
        """Ended in order, by SIGTERM; nothing if it does not run."""
        self._end(signal.SIGTERM)

    def restart(self) -> None:
        """The same port, the same data; stopped before, if it runs."""
        self.stop()
        self.start()

    @contextmanager
    def configured(self, **directives: str | int) -> Iterator[None]:
        """A start in it has these lines of its configuration too, with - for _."""
        configuration = self.directory / "redis.conf"
        before = configuration.read_bytes()
        lines = [f"{name.replace('_', '-')} {rest}\n" for name, rest in directives.items()]
        configuration.write_bytes(before + "".join(lines).encode())
        try:
            yield
        finally:
            configuration.write_bytes(before)

    def forget_history(self) -> None:
        """Its append-only file says what is there now, and not how it came about."""
        self.ask("BGREWRITEAOF")
        over = {"aof_rewrite_in_progress": "0", "aof_rewrite_scheduled": "0"}
        written = "the append-only file to be written anew"
        wait_until(lambda: over.items() <= self.info("persistence").items(), written, passes=(OSError, Refused))

    def ask(self, *words: Word) -> Reply:
        """One command on a connection of its own. Raises `OSError`, `Refused`."""
        with Connection(HOST, self.port) as connection:
            return connection.ask(*words)

    def info(self, section: str) -> dict[str, str]:
        """What INFO (or for "cluster" CLUSTER INFO) says, field by field."""
        reply = self.ask("CLUSTER", "INFO") if section == "cluster" else self.ask("INFO", section)
        assert isinstance(reply, str)
        return dict(line.split(":", 1) for line in reply.splitlines() if ":" in line)
