"""What the servers that tests start owe to others on the machine, and what scripts/services starts and installs."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis
import redis.cluster
from tests.servers.fixtures import StartsRedis
from tests.servers.keyspace import delete_keys
from tests.waiting import wait_until

from bide_proofs.servers import services as servers
from bide_proofs.servers.process import HOST, ServerFailed, ServerMissing, free_port
from bide_proofs.servers.redis import RedisServer
from bide_proofs.servers.rocketmq import loopback_library
from bide_proofs.servers.services import main

LOOPBACK = ("0100007F:", f"{'0' * 24}01000000:")
"""How addresses begin in /proc/net/tcp that only this machine hears."""


def test_it_takes_another_port_when_somebody_was_quicker(
    redis_server: StartsRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = redis_server()
    ports = iter([first.port, first.port])
    monkeypatch.setattr("bide_proofs.servers.server.free_port", lambda: next(ports, None) or free_port())
    second = redis_server()
    assert second.port != first.port
    assert next(ports, None) is None
    with pytest.raises(ServerFailed, match="Address already in use"):  # one that was asked for is not exchanged
        redis_server(port=first.port)


def test_what_is_wrong_is_said(redis_server: StartsRedis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ServerFailed, match="Bad directive"):
        redis_server(options={"no-such-directive": "1"})
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ServerMissing, match="apt-get install redis-server"):
        RedisServer(tmp_path).start()


def test_no_server_outlives_who_started_it(tmp_path: Path, root: Path) -> None:
    program = (
        "import os, pathlib, signal, sys\n"
        "from bide_proofs.servers.redis import RedisServer\n"
        "server = RedisServer(pathlib.Path(sys.argv[1]))\n"
        "server.start()\n"
        "print(server.port, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=root, capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    port = int(done.stdout)

    def gone() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex((HOST, port)) != 0

    wait_until(gone, "the server to be killed")


@pytest.mark.parametrize("kind", ["redis_url", "redis_cluster_url"])
def test_a_namespace_is_swept_and_nothing_else(kind: str, request: pytest.FixtureRequest, redis_namespace: str) -> None:
    name, url = redis_namespace, str(request.getfixturevalue(kind))
    keys = [f"{{{name}}}:one", f"{{{name}:pay}}:two", f"x:{name}", *(f"{name}:{n}" for n in range(20))]
    others = [f"other-{os.getpid()}-{n}" for n in range(3)]
    client: Any = redis.cluster.RedisCluster if "cluster" in kind else redis.Redis
    with client.from_url(f"redis://{url.partition('://')[2].partition(',')[0]}") as shared:
        for key in keys + others:
            shared.set(key, "1")
        assert delete_keys(url, name) == len(keys)
        assert [key for key in keys + others if shared.exists(key)] == others
        assert delete_keys(url, f"other-{os.getpid()}-") == len(others)


def test_the_broker_is_heard_on_the_loopback_address_alone(rabbitmq_url: str) -> None:
    """It listens to clients and to other brokers, and has a port mapper beside it."""
    port = urlsplit(rabbitmq_url).port
    assert port
    heard = listening()
    [broker] = [pid for pid, addresses in heard.items() if port in map(port_of, addresses)] or [""]
    if not broker or "RABBITMQ_NODENAME=bide@localhost" not in (
        environment := Path("/proc", broker, "environ").read_text()
    ):
        pytest.skip("it is not ours")
    mapper = int(environment.partition("ERL_EPMD_PORT=")[2].partition("\0")[0])
    addresses = {one for found in heard.values() if {port, mapper} & set(map(port_of, found)) for one in found}
    assert {port, mapper} < set(map(port_of, addresses))
    assert all(address.startswith(LOOPBACK) for address in addresses), addresses


def listening() -> dict[str, set[str]]:
    """By process, where it waits for connections, as /proc/net/tcp writes it."""
    tables = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
    lines = [words for line in tables.splitlines() if len(words := line.split()) > 9]
    waiting = {f"socket:[{words[9]}]": words[1] for words in lines if words[3] == "0A"}
    found: dict[str, set[str]] = defaultdict(set)
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):  # closed meanwhile
            if (address := waiting.get(os.readlink(link))) is not None:
                found[link.parts[2]].add(address)
    return found


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2], 16)


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_what_would_listen_everywhere_listens_on_the_loopback_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RocketMQ, by a library that is loaded before it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    program = (
        "import socket\n"
        "for address in ('0.0.0.0', '127.0.0.2', '::'):\n"
        "    with socket.socket(socket.AF_INET6 if ':' in address else socket.AF_INET) as one:\n"
        "        one.bind((address, 0))\n"
        "        print(one.getsockname()[0], flush=True)\n"
    )
    environment = {**os.environ, "LD_PRELOAD": str(loopback_library())}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    found = done.stdout.split()
    assert found[:2] == ["127.0.0.1", "127.0.0.2"]
    assert found[2:] in (["::ffff:127.0.0.1"], []), "there may be no IPv6 here"


@pytest.fixture
def services(root: Path, redis_url: str, tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Calls the script in a folder of its own; there is a server's program here, or the test is skipped."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TEST_")}

    def call(*words: str, **variables: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [root / "scripts" / "services", *words], cwd=tmp_path, env={**environ, **variables},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    return call


def test_a_command_finds_the_servers_and_they_end_with_it(services: Callable[..., subprocess.Popen[str]]) -> None:
    running = services("run", "redis", "--", "sh", "-c", "echo $TEST_REDIS_URL; exit 3")
    said, errors = running.communicate(timeout=60)
    assert running.returncode == 3, errors
    assert said.startswith("redis://127.0.0.1:")
    with pytest.raises(redis.ConnectionError):
        delete_keys(said.strip(), "any")


def test_started_they_stay_until_they_are_told(services: Callable[..., subprocess.Popen[str]]) -> None:
    with services("start", "redis") as running:
        assert running.stdout is not None
        variable, _, url = running.stdout.readline().strip().partition("=")
        assert variable == "TEST_REDIS_URL"
        assert delete_keys(url, "any") == 0
        running.send_signal(signal.SIGTERM)
        assert running.wait(timeout=60) == 128 + signal.SIGTERM
    with pytest.raises(redis.ConnectionError):
        delete_keys(url, "any")


def test_one_that_the_environment_names_is_used(services: Callable[..., subprocess.Popen[str]]) -> None:
    running = services("run", "redis", "--", "sh", "-c", "echo $TEST_REDIS_URL", TEST_REDIS_URL="redis://far:1/0")
    assert running.communicate(timeout=60)[0] == "redis://far:1/0\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("start", "oracle"), "'oracle' is not accepted; give redis, cluster, sentinel, postgres, mysql, rabbitmq"),
        (("--with", "oracle", "start"), "invalid choice: 'oracle'"),
        (("run", "redis"), "followed by -- and a command"),
        (("start", "redis", "--", "true"), "followed by -- and a command"),
    ],
)
def test_what_is_not_understood_is_said(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert said in capsys.readouterr().err


@pytest.fixture
def apt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An apt-get that installs by making a file, and asks the policy as a package does; returns its folder."""
    script = tmp_path / "apt-get"
    script.write_text(
        '#!/bin/sh\necho "$@" >>calls\n'
        'case "$*" in *chromium*) echo no browser; exit 100;; esac\n'
        'case "$*" in *install*) ./policy redis-server start; echo $? >>asked; ./policy cron start; echo $? >>asked\n'
        "[ -e lists ] || { echo no such package; exit 100; }; touch installed;; *update*) touch lists;; esac\n"
    )
    script.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(servers, "_POLICY", tmp_path / "policy")
    monkeypatch.setattr(servers, "PACKAGES", {"redis-server": (tmp_path / "installed").exists, "here": lambda: True})
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    return tmp_path


def test_missing_packages_are_installed_and_their_service_is_not_started(apt: Path) -> None:
    assert servers.install() == ["redis-server"]
    calls = (apt / "calls").read_text().splitlines()
    assert ["install" in call for call in calls] == [True, False, True], "the lists are fetched when they are needed"
    assert all(call.endswith("redis-server") for call in calls if "install" in call)
    assert (apt / "asked").read_text().split() == ["101", "0"] * 2, "no to Redis, yes to everything else"
    assert not (apt / "policy").exists()
    assert servers.install() == []
    assert (apt / "calls").read_text().splitlines() == calls


def test_servers_are_installed_where_there_is_no_such_browser(apt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ubuntu has it under another name."""
    monkeypatch.setitem(servers.PACKAGES, "chromium", lambda: False)
    with pytest.raises(servers.InstallFailed, match=r"(?s)no browser.*could not install chromium; "):
        servers.install()
    assert (apt / "installed").exists()


@pytest.mark.parametrize("code", [101, 0])
def test_somebody_elses_policy_stays_and_is_asked(apt: Path, code: int) -> None:
    (apt / "lists").touch()
    policy = f"#!/bin/sh\nexit {code}\n"
    (apt / "policy").write_text(policy)
    (apt / "policy").chmod(0o755)
    if code == 101:
        assert servers.install() == ["redis-server"]
    else:
        with pytest.raises(servers.InstallFailed, match="apt-get install redis-server"):
            servers.install()
        assert not (apt / "calls").exists()
    assert (apt / "policy").read_text() == policy


def test_why_nothing_was_installed_is_said(apt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "PACKAGES", {"redis-server": lambda: False})
    with pytest.raises(servers.InstallFailed, match="sudo apt-get install redis-server"):
        servers.install()
    monkeypatch.setattr(os, "geteuid", lambda: 1_000)
    with pytest.raises(servers.InstallFailed, match=r"only root may install; .*sudo apt-get install redis-server"):
        servers.install()
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(servers.InstallFailed, match="there is no apt-get"):
        servers.install()
