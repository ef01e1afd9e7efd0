"""One RabbitMQ broker of our own, on 127.0.0.1: to be started, paused, killed and started again on the same data."""

from __future__ import annotations

import os
import shutil
import signal
import socket
from collections.abc import Mapping
from pathlib import Path

from tests.servers.child import Child, ServerMissing
from tests.servers.own_server import HOST as HOST
from tests.servers.own_server import OwnServer
from tests.servers.ports import free_port

PACKAGES = "rabbitmq-server"
_PLACES = ("/usr/lib/rabbitmq/bin", "/usr/sbin", "/usr/lib/erlang/bin")
_GREETING = b"AMQP\x00\x00\x09\x01"
"""What a client of AMQP 0-9-1 says first; the answer to it begins with the byte 1."""


def binary(name: str) -> str:
    """Where `name` is: where Debian puts it, or in the path.

    RabbitMQ's own script is taken, not Debian's of the same name, which wants to be root or the account of the service.
    """
    found = shutil.which(name, path=":".join((*_PLACES, os.environ.get("PATH", os.defpath))))
    if found is None:
        raise ServerMissing(f"{name} is not installed: scripts/services install, or apt-get install {PACKAGES}")
    return found


class RabbitMqServer(OwnServer):
    """A broker with its data and its log below `directory`, or in a temporary folder where we are root.

    It has a port mapper (epmd) of its own beside it, so that it neither finds nor leaves one that others use; both
    listen on the loopback address alone. No plugin is enabled. `options` are lines of rabbitmq.conf, by name.
    """

    program = "RabbitMQ"
    account = "rabbitmq"
    taken = ("eaddrinuse", "address already in use", "port_not_available")
    more_ports = True

    def __init__(self, directory: Path, *, port: int | None = None, options: Mapping[str, str] | None = None) -> None:
        super().__init__(directory, port=port, options=options)
        self._mapper: Child | None = None
        self.ports: list[int] = []
        """All that it listens on since its last start: for clients, for other brokers, and its port mapper's."""

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@{HOST}:{self.port}/"

    def _make(self) -> None:
        """The folder; the broker fills it."""
        binary("rabbitmq-server")
        super()._make()
        (self.home / "data").mkdir()
        if os.geteuid() == 0:
            shutil.chown(self.home / "data", self.account, self.account)

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

    def _answers(self) -> bool:
        with socket.create_connection((HOST, self.port), timeout=1.0) as probe:
            probe.sendall(_GREETING)
            return probe.recv(1) == b"\x01"

    def _end(self, number: signal.Signals) -> None:
        super()._end(number)
        if self._mapper is not None:
            self._mapper.end(signal.SIGKILL)
            self._mapper = None
