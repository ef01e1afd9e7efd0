"""The compose file: what it names is there, nothing in it is root, and its commands are ones that are taken."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.deploy.commands import check_command, check_environment

from bide.core.instants import duration
from bide.service.serving import read_config

TOP = {"name", "services", "networks", "volumes", "secrets", "configs"}
OF_A_SERVICE = {
    "build", "cap_drop", "command", "depends_on", "environment", "healthcheck", "image", "logging", "networks", "ports",
    "read_only", "restart", "secrets", "security_opt", "stop_grace_period", "tmpfs", "user", "volumes",
}  # fmt: skip
"""What the services here use of the compose specification; another key is a line here, or a typing error."""
OF_A_CHECK = {"test", "interval", "timeout", "retries", "start_period"}


@pytest.fixture(scope="module")
def compose(deploy: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((deploy / "compose.yaml").read_text(encoding="utf-8"))
    return found


@pytest.fixture(scope="module")
def instances(compose: dict[str, Any]) -> list[dict[str, Any]]:
    return [service for name, service in compose["services"].items() if name.startswith("bide")]


def test_all_keys_are_known(compose: dict[str, Any]) -> None:
    assert {key for key in compose if not key.startswith("x-")} <= TOP
    for service in compose["services"].values():
        assert set(service) <= OF_A_SERVICE
        assert set(service.get("healthcheck", ())) <= OF_A_CHECK


def test_everything_that_is_named_is_there(compose: dict[str, Any], deploy: Path) -> None:
    for service in compose["services"].values():
        assert set(service.get("networks", ())) <= set(compose["networks"])
        assert set(service.get("secrets", ())) <= set(compose["secrets"])
        for volume in service.get("volumes", ()):
            source, target, *_ = volume.split(":")
            assert target.startswith("/")
            assert (deploy / source).exists() if source.startswith(".") else source in compose["volumes"], volume
        for name, how in service.get("depends_on", {}).items():
            assert how == {"condition": "service_healthy"}
            assert "healthcheck" in compose["services"][name], "else it is never healthy"
        if "build" in service:
            assert (deploy / service["build"]["context"] / service["build"]["dockerfile"]).samefile(
                deploy / "Dockerfile"
            )
    assert set(compose["secrets"]) == {name for one in compose["services"].values() for name in one.get("secrets", ())}


def test_nothing_is_root_or_can_become_it(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", service["user"]), name
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["restart"] == "unless-stopped"


def test_the_instances_run_as_the_images_user(instances: list[dict[str, Any]], deploy: Path) -> None:
    user = re.search(r"^USER (.+)$", (deploy / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    assert user is not None
    assert {one["user"] for one in instances} == {user[1]}


def test_images_of_others_are_pinned(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        if "build" not in service:
            assert re.fullmatch(r"[\w./-]+:\d+\.\d+[\w.-]*(@sha256:[0-9a-f]{64})?", service["image"])


def test_ports_are_open_on_this_machine_alone(compose: dict[str, Any], instances: list[dict[str, Any]]) -> None:
    taken = []
    for service in compose["services"].values():
        for port in service.get("ports", ()):
            address, outside, inside = port.split(":")
            assert address == "127.0.0.1"
            taken.append(outside)
            assert int(inside) == check_command(service["command"])["port"]
    assert len(set(taken)) == len(taken) == len(instances) == 2


def test_commands_and_environment_are_taken(instances: list[dict[str, Any]]) -> None:
    for one in instances:
        options = check_command(one["command"])
        assert options["host"] == "0.0.0.0"
        assert f"./bide.toml:{options['path']}:ro" in one["volumes"]
        check_environment(one["environment"])


def test_no_secret_stands_in_the_open(compose: dict[str, Any], instances: list[dict[str, Any]]) -> None:
    for one in instances:
        path = one["environment"]["BIDE_STORE_FILE"]
        assert path == "/run/secrets/store"
        assert "store" in one["secrets"]
    for service in compose["services"].values():
        assert not re.search(r"requirepass|://[^ ]*@|password=", str(service), re.IGNORECASE)
    assert all(one["file"].startswith("./secrets/") for one in compose["secrets"].values())


def test_it_is_waited_for_longer_than_a_drain_takes(instances: list[dict[str, Any]]) -> None:
    for one in instances:
        assert duration(one["stop_grace_period"]) >= duration(one["environment"]["BIDE_GRACE"]) + 10_000


def test_a_full_redis_forgets_nothing(compose: dict[str, Any]) -> None:
    words = compose["services"]["redis"]["command"]
    options = dict(zip(words[2::2], words[3::2], strict=True))
    assert options["--maxmemory-policy"] == "noeviction"
    assert options["--appendonly"] == "yes"
    assert f"redis:{options['--dir']}" in compose["services"]["redis"]["volumes"]


def test_the_example_of_a_configuration_is_one_that_is_read(deploy: Path, tmp_path: Path) -> None:
    text = (deploy / "bide.toml").read_text(encoding="utf-8")
    assert not read_config(str(deploy / "bide.toml")).topics
    path = tmp_path / "bide.toml"
    path.write_text(re.sub(r"^# (?=(\[|\w+ = ))", "", text, flags=re.MULTILINE), encoding="utf-8")
    config = read_config(str(path))
    [(topic, one)] = config.topics.items()
    assert topic == "order.close"
    assert one.webhook is not None
    assert one.policy(topic) is not None
    assert config.webhooks.allow


@pytest.mark.skipif(
    shutil.which("docker") is None
    or subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode != 0,
    reason="docker compose is not installed",
)
def test_compose_itself_takes_it(deploy: Path, tmp_path: Path) -> None:
    copy = tmp_path / "deploy"
    shutil.copytree(deploy, copy)
    (copy / "secrets").mkdir(exist_ok=True)
    for name in ("store", "redis"):
        (copy / "secrets" / name).touch()
    done = subprocess.run(
        ["docker", "compose", "--file", str(copy / "compose.yaml"), "config", "--quiet"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
