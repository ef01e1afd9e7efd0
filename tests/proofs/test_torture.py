"""A short form of `make torture`: processes against real stores under real faults, judged by what they told."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.proofs.running import report_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs SIGKILL and the servers of a Linux")

# Redis Cluster declares a master dead, and MariaDB does without its replica, when it has been silent for a few seconds.
# On a busy machine one is that lives, and what it had answered meanwhile is lost by a failover: not by bide.
BY_SILENCE = ("--without", "failover")
SERVERS = {
    "sqlite": (), "redis": (), "redis-cluster": BY_SILENCE, "redis-sentinel": (), "postgres": (),
    "mariadb": BY_SILENCE, "http": (),
}  # fmt: skip


@pytest.mark.parametrize("server", SERVERS)
def test_under_faults_every_promise_is_kept(server: str) -> None:
    report = report_of(
        "torture", "--server", server, "--seconds", "20", "--least", "300", "--rate", "70", "--farthest", "3",
        "--workers", "2", "--pace", "2", "--seed", "11", *SERVERS[server],
    )  # fmt: skip
    assert not any(report["wrong"].values())
    checked, load, faults = report["checked"], report["load"], report["faults"]
    assert checked["undecided"] == 0
    assert checked["deliveries"] == load["deliveries"] >= 300
    assert load["verbs"]["move"]["moved"] > 0
    assert load["verbs"]["cancel"]["cancelled"] > 0
    assert any(kind.startswith("kill -9") for kind in faults)
    assert sum(faults.values()) >= 3


@pytest.mark.parametrize(
    "deployment",
    ["sqlite", "redis_url", "redis_sentinel_url", "redis_cluster_url", "postgres_schemas", "mysql_schemas"],
)
def test_where_only_workers_die_no_call_fails_either(
    request: pytest.FixtureRequest, tmp_path: Path, deployment: str
) -> None:
    there = f"sqlite:///{tmp_path}/t.db" if deployment == "sqlite" else request.getfixturevalue(deployment)
    url = there if isinstance(there, str) else there.url()
    report = report_of(
        "torture", url, "--only", "kill -9 of a worker", "--seconds", "8", "--least", "300", "--rate", "150",
        "--farthest", "3", "--workers", "2", "--pace", "2",
    )  # fmt: skip
    assert not any(report["wrong"].values())
    assert report["wrong"]["call failed"] == report["checked"]["undecided"] == 0
    assert report["faults"].keys() == {"kill -9 of a worker"}
    assert report["load"]["deliveries"] >= 300
