"""One RabbitMQ broker of our own, on 127.0.0.1, which can be paused, killed and started again on the same data."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bide_proofs.servers.process import HOST, free_port, give_to, program
from bide_proofs.servers.server import ServerProcess

PACKAGES = "rabbitmq-server"
_PLACES = ("/usr/lib/rabbitmq/bin", "/usr/sbin", "/usr/lib/erlang/bin")
_GREETING = b"AMQP\x00\x00\x09\x01"
"""The first bytes that an AMQP 0-9-1 client sends; the answer begins with the byte 1."""


def binary(name: str) -> str:
    """Find program `name`, in Debian's folders or in the path.

    This is RabbitMQ's own script and not Debian's of the same name, which only runs as root or the service's account.
    """
    return program(name, PACKAGES, *_PLACES)


class RabbitMqServer(ServerProcess):
    """A broker with its data and its log below `directory`, or in a temporary folder if this process is root.

    It has its own port mapper (epmd), so that it neither uses another one nor leaves one behind. Both listen only on
    the loopback address. No plugin is enabled. `options` are lines of rabbitmq.conf, by name.
    """

    title = "RabbitMQ"
    patience = 300.0  # its virtual machine takes ten seconds of processor time
    account = "rabbitmq"
    taken = ("eaddrinuse", "address already in use", "port_not_available")

    def __init__(self, directory: Path, **given: Any) -> None:
        super().__init__(directory, **given)
        self._mapper_port = 0

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@{HOST}:{self.port}/"

    def fill(self) -> None:
        """Make an empty folder: the broker fills it itself."""
        binary("rabbitmq-server")
        self.data.mkdir()
        give_to(self.account, self.data)

    def prepare(self) -> None:
        """Write the configuration and start the port mapper: the broker would start one that stays after its end."""
        settings = {
            "listeners.tcp.1": f"{HOST}:{self.port}", "log.console": "true", "log.console.level": "warning",
            "log.file": "false", **self.options,
        }  # fmt: skip
        (self.home / "rabbitmq.conf").write_text("".join(f"{name} = {value}\n" for name, value in settings.items()))
        self._mapper_port = free_port()
        self.begin_beside([binary("epmd"), "-address", HOST, "-port", str(self._mapper_port)], "mapper")

    def environment(self) -> Mapping[str, str]:
        home = str(self.home)
        return {
            "ERL_EPMD_ADDRESS": HOST,
            "ERL_EPMD_PORT": str(self._mapper_port),
            "HOME": home,  # contains the cookie by which nodes authenticate each other
            "ERL_CRASH_DUMP_BYTES": "0",
            "RABBITMQ_NODENAME": "bide@localhost",
            "RABBITMQ_MNESIA_BASE": f"{home}/data",
            "RABBITMQ_LOG_BASE": home,
            "RABBITMQ_DIST_PORT": str(free_port()),
            "RABBITMQ_CONFIG_FILE": f"{home}/rabbitmq.conf",
            # none of these files exists, so the configuration of the machine's own broker is not read
            "RABBITMQ_ADVANCED_CONFIG_FILE": f"{home}/advanced.config",
            "RABBITMQ_CONF_ENV_FILE": f"{home}/rabbitmq-env.conf",
            "RABBITMQ_ENABLED_PLUGINS_FILE": f"{home}/enabled_plugins",
            "RABBITMQ_ALLOW_INPUT": "1",  # the script execs the broker, which keeps its pid
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1} -noinput",
        }

    def command(self) -> Sequence[str]:
        return [binary("rabbitmq-server")]

    def answers(self) -> bool:
        with socket.create_connection((HOST, self.port), timeout=1.0) as probe:
            probe.sendall(_GREETING)
            return probe.recv(1) == b"\x01"
