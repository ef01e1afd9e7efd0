"""scripts/services: servers for a command, and the installation of their programs, with an apt-get that is none."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
from tests.servers.keyspace import delete_keys

from bide_proofs.servers import services as servers
from bide_proofs.servers.services import main


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
