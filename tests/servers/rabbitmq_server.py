"""One RabbitMQ broker of our own, on 127.0.0.1: to be started, paused, killed and started again on the same data."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from tests.servers.child import Child, Running, ServerFailed, ServerMissing
from tests.servers.ports import free_port

HOST = "127.0.0.1"
PACKAGES = "rabbitmq-server"
_PLACES = ("/usr/lib/rabbitmq/bin", "/usr/sbin", "/usr/lib/erlang/bin")
_ACCOUNT = "rabbitmq"
_PATIENCE = 60.0
"""Seconds for a broker to answer; it takes under three, but machines that test do much at once."""
_TRIES = 5
_GREETING = b"AMQP\x00\x00\x09\x01"
"""What a client of AMQP 0-9-1 says first; the answer to it begins with the byte 1."""
_TAKEN = ("eaddrinuse", "address already in use", "port_not_available")


def binary(name: str) -> str:
    """Where `name` is: where Debian puts it, or in the path.

    RabbitMQ's own script is taken, not Debian's of the same name, which wants to be root or the account of the service.
    """
    found = shutil.which(name, path=":".join((*_PLACES, os.environ.get("PATH", os.defpath))))
    if found is None:
        raise ServerMissing(f"{name} is not installed: scripts/services install, or apt-get install {PACKAGES}")
    return found


class RabbitMqServer(Running):
    """A broker with its data and its log below `directory`, or in a temporary folder where we are root.

    It has a port mapper (epmd) of its own beside it, so that it neither finds nor leaves one that others use; both
    listen on the loopback address alone. No plugin is enabled. `options` are lines of rabbitmq.conf, by name.
    """

    def __init__(self, directory: Path, *, port: int | None = None, options: Mapping[str, str] | None = None) -> None:
        self.directory = directory
        self.options = dict(options or {})
        self._port = port
        self._chooses = port is None
        self._mapper: Child | None = None
        self._child: Child | None = None
        self._own: Path | None = None
        self.ports: list[int] = []
        """All that it listens on since its last start: for clients, for other brokers, and its port mapper's."""

    @property
    def port(self) -> int:
        """Known from the first start on."""
        assert self._port is not None, "start it first"
        return self._port

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@{HOST}:{self.port}/"

    @property
    def pid(self) -> int:
        assert self._child is not None, "it does not run"
        return self._child.pid

    @property
    def running(self) -> bool:
        return self._child is not None and self._child.running

    @property
    def home(self) -> Path:
        """Where its data and its log are."""
        return self.directory if self._own is None else self._own

    def start(self) -> None:
        """Runs and answers. Raises `ServerMissing`, `ServerFailed`."""
        assert not self.running, "it runs already"
        fresh = not (self.home / "data").exists()
        if fresh:
            self._make()
        for _ in range(_TRIES):
            if self._port is None:
                self._port = free_port()
            try:
                self._launch()
                self._await_answer()
                self._chooses = False
                return
            except ServerFailed as error:
                self.kill()
                if not any(word in str(error) for word in _TAKEN):
                    if fresh:
                        self._tidy()
                    raise
            if self._chooses:
                self._port = None
        raise ServerFailed("others kept taking the ports")

    def _make(self) -> None:
        """The folder; the broker fills it."""
        binary("rabbitmq-server")
        self.directory.mkdir(parents=True, exist_ok=True)
        if os.geteuid() == 0:
            if shutil.which("setpriv") is None:
                raise ServerMissing("setpriv is not installed, and RabbitMQ is not to run as root")
            self._own = Path(tempfile.mkdtemp(prefix="bide-rabbitmq-"))
            shutil.chown(self._own, _ACCOUNT, _ACCOUNT)
        (self.home / "data").mkdir()
        if os.geteuid() == 0:
            shutil.chown(self.home / "data", _ACCOUNT, _ACCOUNT)

    def _account(self) -> list[str]:
        if os.geteuid() != 0:
            return []
        return ["setpriv", f"--reuid={_ACCOUNT}", f"--regid={_ACCOUNT}", "--clear-groups", "--"]

    def _launch(self) -> None:
        """The port mapper first: the broker would start one that stays, and for everybody."""
        settings = {
            "listeners.tcp.1": f"{HOST}:{self.port}", "log.console": "true", "log.console.level": "warning",
            "log.file": "false", **self.options,
        }  # fmt: skip
        (self.home / "rabbitmq.conf").write_text("".join(f"{name} = {value}\n" for name, value in settings.items()))
        mapper_port, distribution_port = free_port(), free_port()
        self.ports = [self.port, distribution_port, mapper_port]
        mapper = {"ERL_EPMD_ADDRESS": HOST, "ERL_EPMD_PORT": str(mapper_port)}
        home = str(self.home)
        broker = {
            **mapper,
            "HOME": home,  # where the cookie is that nodes know each other by
            "ERL_CRASH_DUMP_BYTES": "0",
            "RABBITMQ_NODENAME": "bide@localhost",
            "RABBITMQ_MNESIA_BASE": f"{home}/data",
            "RABBITMQ_LOG_BASE": home,
            "RABBITMQ_DIST_PORT": str(distribution_port),
            "RABBITMQ_CONFIG_FILE": f"{home}/rabbitmq.conf",
            # none of these is there: nothing of the machine's own broker is to be read
            "RABBITMQ_ADVANCED_CONFIG_FILE": f"{home}/advanced.config",
            "RABBITMQ_CONF_ENV_FILE": f"{home}/rabbitmq-env.conf",
            "RABBITMQ_ENABLED_PLUGINS_FILE": f"{home}/enabled_plugins",
            "RABBITMQ_ALLOW_INPUT": "1",  # the script becomes the broker, which so has the pid that we know
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1} -noinput",
        }
        self._mapper = Child(
            [*self._account(), binary("epmd"), "-address", HOST, "-port", str(mapper_port)],
            self.home / "mapper.log", environment=mapper,
        )  # fmt: skip
        self._child = Child([*self._account(), binary("rabbitmq-server")], self.home / "log", environment=broker)

    def _await_answer(self) -> None:
        assert self._child is not None
        until = time.monotonic() + _PATIENCE
        while time.monotonic() < until:
            if not self._child.running:
                raise self._child.failed("ended while it started")
            with contextlib.suppress(OSError), socket.create_connection((HOST, self.port), timeout=1.0) as probe:
                probe.sendall(_GREETING)
                if probe.recv(1) == b"\x01":
                    return
            time.sleep(0.02)
        raise self._child.failed(f"did not answer within {_PATIENCE:.0f} s")

    def stop(self) -> None:
        """Ended without waiting for its clients, and forgotten; nothing if it does not run."""
        self.kill()
        self._tidy()

    def _tidy(self) -> None:
        if self._own is not None:
            shutil.rmtree(self._own, ignore_errors=True)
            self._own = None

    def halt(self) -> None:
        """Ended in order; its data stays."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Ended by SIGKILL."""
        self._end(signal.SIGKILL)

    def _end(self, number: signal.Signals) -> None:
        if self._child is not None:
            self._child.end(number)
            self._child = None
        if self._mapper is not None:
            self._mapper.end(signal.SIGKILL)
            self._mapper = None

    def restart(self) -> None:
        """The same port, the same data; stopped before, if it runs."""
        self.halt()
        self.start()

    def pause(self) -> None:
        """Does nothing until `resume`."""
        assert self._child is not None, "it does not run"
        self._child.send(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._child is not None, "it does not run"
        self._child.send(signal.SIGCONT)
