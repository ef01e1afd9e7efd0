"""The servers that tests start: they answer, keep what they acknowledged, and choose another master."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import redis
import redis.cluster
import redis.sentinel
from tests.servers.child import ServerFailed, ServerMissing
from tests.servers.fixtures import StartsRedis
from tests.servers.keyspace import delete_keys
from tests.servers.redis_cluster import RedisCluster
from tests.servers.redis_sentinel import SERVICE, RedisSentinel
from tests.servers.redis_server import HOST, RedisServer
from tests.servers.resp import Connection, Refused
from tests.servers.server_clock import ServerClock
from tests.servers.shared import OF_REDIS
from tests.servers.stalls import watched
from tests.servers.waiting import wait_until

pytestmark = pytest.mark.faults


def client(server: RedisServer) -> redis.Redis:
    return redis.Redis(host=HOST, port=server.port, decode_responses=True)


def test_a_server_that_stands_still_is_seen_while_it_does(redis_server: StartsRedis) -> None:
    server = redis_server()
    with watched([Connection(HOST, server.port)]) as stalls:
        server.pause()
        time.sleep(0.3)
        assert stalls.seconds > 0.2
        server.resume()
        wait_until(lambda: stalls._before > 0.2, "the round to be over")


def test_what_was_acknowledged_survives_a_kill(redis_server: StartsRedis) -> None:
    server = redis_server(appendfsync="always", options={"maxmemory": "64mb"})
    assert (server.url, server.running) == (f"redis://127.0.0.1:{server.port}/0", True)
    with client(server) as before:
        before.set("promise", "kept")
        assert before.config_get("appendfsync") == {"appendfsync": "always"}
        assert before.config_get("maxmemory") == {"maxmemory": str(64 << 20)}
    pid, port = server.pid, server.port
    server.kill()
    assert not server.running
    with pytest.raises(ConnectionRefusedError):
        server.ask("PING")
    server.start()
    assert server.pid != pid
    assert server.port == port
    assert server.ask("GET", "promise") == "kept"
    server.restart()
    assert server.ask("GET", "promise") == "kept"


def test_a_paused_server_says_nothing_and_goes_on(redis_server: StartsRedis) -> None:
    server = redis_server()
    with Connection(HOST, server.port, timeout=0.1) as waiting:
        server.pause()
        with pytest.raises(TimeoutError):
            waiting.ask("PING")
    server.resume()
    assert server.ask("PING") == "PONG"
    server.pause()  # and one that is paused can be stopped all the same
    server.stop()


def test_it_takes_another_port_when_somebody_was_quicker(
    redis_server: StartsRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = redis_server()
    ports = iter([first.port, first.port])
    free_port: Callable[..., int] = RedisServer.launch.__globals__["free_port"]
    monkeypatch.setattr("tests.servers.redis_server.free_port", lambda **which: next(ports, None) or free_port(**which))
    second = redis_server()
    assert second.port != first.port
    assert next(ports, None) is None
    with pytest.raises(ServerFailed, match="Address already in use"):  # one that was asked for is not exchanged
        redis_server(port=first.port)


def test_its_clock_can_be_set_while_it_runs(redis_server: StartsRedis, server_clock: ServerClock) -> None:
    server = redis_server(environment=server_clock.environment)

    def ahead() -> float:
        reply = server.ask("TIME")
        assert isinstance(reply, list)
        return int(str(reply[0])) + int(str(reply[1])) / 1e6 - time.time()

    for seconds in (0, 3_600, -3_600, 0):
        server_clock.shift(seconds)
        assert ahead() == pytest.approx(seconds, abs=1)
    server.ask("SET", "a", "1", "PX", 50)
    wait_until(lambda: server.ask("GET", "a") is None, "the key to expire", patience=5)


def test_what_is_wrong_is_said(redis_server: StartsRedis, tmp_path: Path) -> None:
    with pytest.raises(ServerFailed, match="Bad directive"):
        redis_server(options={"no-such-directive": "1"})
    with pytest.raises(ServerMissing, match="apt-get install redis-server"):
        RedisServer(tmp_path, binary="no-such-redis").start()


def test_no_server_outlives_who_started_it(tmp_path: Path, root: Path) -> None:
    program = (
        "import os, pathlib, signal, sys\n"
        "from tests.servers.redis_server import RedisServer\n"
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

    wait_until(gone, "the server to be killed", patience=5)


@pytest.mark.parametrize("kind", OF_REDIS)
def test_a_namespace_is_swept_and_nothing_else(kind: str, request: pytest.FixtureRequest) -> None:
    url: str = request.getfixturevalue({"redis": "redis_url"}.get(kind, f"redis_{kind}_url"))
    name: str = request.getfixturevalue("redis_namespace")
    keys = [f"{{{name}}}:one", f"{{{name}:pay}}:two", f"x:{name}", *(f"{name}:{n}" for n in range(20))]
    others = [f"other-{os.getpid()}-{n}" for n in range(3)]
    with shared_client(kind, url) as shared:
        for key in keys + others:
            shared.set(key, "1")
        assert delete_keys(url, name) == len(keys)
        assert [key for key in keys + others if shared.exists(key)] == others
        assert delete_keys(url, f"other-{os.getpid()}-") == len(others)


def shared_client(kind: str, url: str) -> redis.Redis | redis.cluster.RedisCluster:
    hosts = url.partition("://")[2].partition("/")[0].split(",")
    addresses = [(host, int(port)) for host, _, port in (one.rpartition(":") for one in hosts)]
    if kind == "cluster":
        return redis.cluster.RedisCluster(*addresses[0])
    if kind == "sentinel":
        sentinel: Any = redis.sentinel.Sentinel(addresses)  # type: ignore[no-untyped-call]
        return cast(redis.Redis, sentinel.master_for(url.split("/")[-2]))
    return redis.Redis.from_url(url)


def test_the_cluster_fails_over(redis_cluster: RedisCluster) -> None:
    assert redis_cluster.url.startswith("redis+cluster://127.0.0.1:")
    assert len(redis_cluster.masters) == 3
    with redis.cluster.RedisCluster(HOST, redis_cluster.nodes[0].port, decode_responses=True) as before:
        for key in "abcdef":
            before.set(key, key)
    slot = redis_cluster.slot_of("a")
    master = redis_cluster.master_of(slot)
    heir = redis_cluster.replica_of(master)
    master.await_replicas()
    master.kill()
    with pytest.raises(LookupError):
        redis_cluster.master_of(slot)
    redis_cluster.await_whole()
    assert redis_cluster.master_of(slot) is heir
    assert heir.ask("GET", "a") == "a"
    with pytest.raises(Refused, match="MOVED"):
        heir.ask("GET", next(key for key in "bcdef" if redis_cluster.master_of(redis_cluster.slot_of(key)) is not heir))
    master.start()
    redis_cluster.await_whole()
    assert not master.is_master
    assert redis_cluster.replica_of(heir) is master


def test_sentinel_promotes(redis_sentinel: RedisSentinel) -> None:
    assert redis_sentinel.url.endswith("/mymaster/0")
    master = redis_sentinel.master
    master.ask("SET", "a", "a")
    master.await_replicas(2)
    started = time.monotonic()
    master.kill()
    heir = redis_sentinel.await_master(other_than=master)
    assert time.monotonic() - started < 15
    sentinel: Any = redis.sentinel.Sentinel(
        [  # type: ignore[no-untyped-call]
            (HOST, one.port) for one in redis_sentinel.sentinels
        ]
    )
    assert sentinel.discover_master(SERVICE) == (HOST, heir.port)
    assert heir.ask("GET", "a") == "a"
    heir.ask("SET", "b", "b")
    master.start()
    redis_sentinel.await_whole()
    assert master.info("replication")["role"] == "slave"
    assert master.ask("GET", "b") == "b"
