"""The RabbitMQ brokers that tests start: they answer, keep what they confirmed, listen nowhere else, outlive nobody."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import aio_pika
import pytest
from tests.servers.child import ServerFailed, ServerMissing
from tests.servers.fixtures import StartsRabbitMq
from tests.servers.rabbitmq_server import HOST, RabbitMqServer
from tests.servers.waiting import wait_until

pytestmark = pytest.mark.faults


async def _send(url: str, word: bytes) -> None:
    """Answers when the broker has it on its disk."""
    async with await aio_pika.connect(url) as connection:
        channel = await connection.channel(publisher_confirms=True)
        await channel.declare_queue("promise", durable=True)
        message = aio_pika.Message(word, delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
        await channel.default_exchange.publish(message, "promise")


async def _take(url: str) -> bytes:
    async with await aio_pika.connect(url) as connection:
        queue = await (await connection.channel()).declare_queue("promise", durable=True)
        message = await queue.get(timeout=10)
        assert message is not None
        await message.ack()
        return message.body


async def test_what_was_confirmed_survives_a_kill(rabbitmq_server: StartsRabbitMq) -> None:
    server = rabbitmq_server(options={"channel_max": "7"})
    assert server.url == f"amqp://guest:guest@127.0.0.1:{server.port}/"
    # that there is a queue is answered a moment before it is on the disk, unlike what is confirmed of a message
    await _send(server.url, b"first")
    server.restart()
    assert await _take(server.url) == b"first"
    await _send(server.url, b"kept")
    pid, port = server.pid, server.port
    server.kill()
    assert not server.running
    server.start()
    assert server.pid != pid
    assert server.port == port
    assert await _take(server.url) == b"kept"
    home = server.home
    server.stop()
    if os.geteuid() == 0:
        assert not home.exists(), "a folder of its own is gone with it"


def test_what_is_wrong_is_said(
    rabbitmq_server: StartsRabbitMq, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ServerFailed, match="failed_to_prepare_configuration"):
        rabbitmq_server(options={"no.such.setting": "1"})

    def missing(name: str) -> str:
        raise ServerMissing(f"{name} is not installed")

    monkeypatch.setattr("tests.servers.rabbitmq_server.binary", missing)
    with pytest.raises(ServerMissing, match="rabbitmq-server is not installed"):
        RabbitMqServer(tmp_path).start()


def test_no_broker_outlives_who_started_it_and_none_is_heard_outside(tmp_path: Path, root: Path) -> None:
    program = (
        "import os, pathlib, signal, sys\n"
        "from tests.servers.rabbitmq_server import RabbitMqServer\n"
        "server = RabbitMqServer(pathlib.Path(sys.argv[1]))\n"
        "server.start()\n"
        "print(server.port, server.home, server.pid, *server.ports, flush=True)\n"
        "print(pathlib.Path('/proc/net/tcp').read_text(), pathlib.Path('/proc/net/tcp6').read_text(), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=root, capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    first, *table = done.stdout.decode().splitlines()
    port, home, pid, *ports = first.split()
    assert port in ports
    listening = {words[1] for line in table if len(words := line.split()) > 3 and words[3] == "0A"}
    for one in ports:
        where = {address for address in listening if int(address.rpartition(":")[2], 16) == int(one)}
        assert where
        assert all(address.startswith(("0100007F:", f"{'0' * 24}01000000:")) for address in where), where

    def gone() -> bool:
        with socket.socket() as probe:
            return not Path("/proc", pid).exists() and all(probe.connect_ex((HOST, int(one))) for one in ports)

    wait_until(gone, "the broker and its port mapper to be killed", patience=10)
    if home != str(tmp_path):
        subprocess.run(["rm", "-rf", home], check=True)
