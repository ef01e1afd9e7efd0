"""The systemd units: that systemd takes them, that they are locked up, and that what they start would start."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from tests.deploy.commands import check_command, check_environment

from bide.cli.exits import Exit
from bide.core.instants import duration

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze, which comes with systemd, is not installed"
)
MOST_EXPOSED = 15
"""Tenths of systemd's measure, which goes up to 100; a service that is not locked up has some 96."""


@pytest.fixture(scope="module", params=["bide.service", "bide-work.service"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def unit(deploy: Path, name: str) -> dict[str, list[str]]:
    """All values of each directive; a directive may come twice."""
    found: dict[str, list[str]] = defaultdict(list)
    section = ""
    for line in (deploy / name).read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        if re.fullmatch(r"\[\w+\]", line):
            section = line
            continue
        directive, equals, value = line.partition("=")
        assert equals, line
        assert re.fullmatch(r"[A-Z]\w+", directive), line
        assert section in {"[Unit]", "[Service]", "[Install]"}
        found[directive].append(value)
    return found


def one(unit: dict[str, list[str]], name: str) -> str:
    [value] = unit[name]
    return value


def environment(unit: dict[str, list[str]]) -> dict[str, str]:
    return dict(given.split("=", 1) for given in unit["Environment"])


def test_the_command_is_one_that_bide_takes(unit: dict[str, list[str]], name: str) -> None:
    program, *words = shlex.split(one(unit, "ExecStart"))
    assert program == "/opt/bide/bin/bide"
    options = check_command(words)
    if name == "bide.service":
        assert options["host"] == "127.0.0.1"
        assert options["path"] == "/etc/bide/bide.toml"
    else:
        assert options["processes"] > 1
    check_environment(environment(unit))


def test_the_stores_url_is_a_credential(unit: dict[str, list[str]]) -> None:
    name, _, path = one(unit, "LoadCredential").partition(":")
    assert environment(unit)["BIDE_STORE_FILE"] == f"%d/{name}"
    assert path == "/etc/bide/store"


def test_it_is_waited_for_longer_than_a_drain_takes(unit: dict[str, list[str]]) -> None:
    assert one(unit, "KillSignal") == "SIGTERM"
    assert one(unit, "KillMode") == "mixed"
    assert duration(one(unit, "TimeoutStopSec")) >= duration(environment(unit)["BIDE_GRACE"]) + 10_000


def test_it_is_not_started_again_where_that_would_not_help(unit: dict[str, list[str]]) -> None:
    assert one(unit, "Restart") == "on-failure"
    codes = {Exit(int(code)) for code in one(unit, "RestartPreventExitStatus").split()}
    assert codes == {Exit.BAD_INPUT, Exit.DAMAGED, Exit.SETUP}
    assert one(unit, "StartLimitIntervalSec") == "0", "a store that is away may be so for long"


def test_it_may_do_little_else(unit: dict[str, list[str]]) -> None:
    for name in ("DynamicUser", "NoNewPrivileges", "ProtectHome", "PrivateTmp", "PrivateDevices", "RestrictNamespaces"):
        assert one(unit, name) == "yes"
    assert one(unit, "ProtectSystem") == "strict"
    assert one(unit, "StateDirectory") == "bide"
    assert one(unit, "CapabilityBoundingSet") == ""
    assert set(one(unit, "RestrictAddressFamilies").split()) == {"AF_UNIX", "AF_INET", "AF_INET6"}


def analyzed(deploy: Path, name: str, tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What systemd-analyze says of the unit, with a program that exists here."""
    text = (deploy / name).read_text(encoding="utf-8")
    path = tmp_path / name
    path.write_text(text.replace("/opt/bide/bin/bide", sys.executable), encoding="utf-8")
    return subprocess.run(
        ["systemd-analyze", *arguments, str(path)], capture_output=True, text=True, check=False, timeout=60
    )


@needs_systemd
def test_systemd_takes_it_without_a_word(deploy: Path, name: str, tmp_path: Path) -> None:
    done = analyzed(deploy, name, tmp_path, "verify")
    assert done.returncode == 0, done.stderr
    assert name not in done.stderr, done.stderr


@needs_systemd
def test_systemd_finds_it_locked_up(deploy: Path, name: str, tmp_path: Path, root: Path) -> None:
    done = analyzed(deploy, name, tmp_path, "security", "--offline=true", f"--threshold={MOST_EXPOSED}")
    if "--offline" in done.stderr or "unrecognized option" in done.stderr:
        pytest.skip("this systemd is older than 250")
    assert done.returncode == 0, done.stdout
    level = re.search(rf"exposure level for {re.escape(name)}: ([\d.]+)", done.stdout)
    assert level is not None
    assert f"says {level[1]} of 10" in (root / "docs" / "deploy.md").read_text(encoding="utf-8")
