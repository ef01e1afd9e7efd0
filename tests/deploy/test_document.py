"""docs/deploy.md: its commands are taken, its files are there, and its manifests say what they must."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.deploy.commands import check_command, check_environment

from bide.core.instants import duration


@pytest.fixture(scope="module")
def text(root: Path) -> str:
    return (root / "docs" / "deploy.md").read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def manifests(text: str) -> list[Any]:
    return [document for block in blocks(text, "yaml") for document in yaml.safe_load_all(block)]


@pytest.fixture(scope="module")
def deployment(text: str) -> dict[str, Any]:
    [found] = [one for one in manifests(text) if one.get("kind") == "Deployment"]
    spec: dict[str, Any] = found["spec"]["template"]["spec"]
    return spec


def test_shell_blocks_are_ones_that_a_shell_reads(text: str) -> None:
    for block in blocks(text, "sh"):
        done = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def commands(text: str) -> list[list[str]]:
    """Every call of bide, in blocks and within lines."""
    found = []
    for block in blocks(text, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            for number, word in enumerate(words):
                calls = word == "bide-1" or word.endswith("/bin/bide") or (word == "bide" and "run" not in words)
                if calls and words[number + 1 :] and "build" not in words and words[number + 1] != "&&":
                    found.append(words[number + 1 :])
    return found + [shlex.split(inline) for inline in re.findall(r"`bide ([^`]+)`", text)]


def test_every_command_is_taken(text: str) -> None:
    found = commands(text)
    assert ["token", "add", "ops"] in found
    assert ["token", "add", "prometheus", "--verb", "metrics"] in found
    for words in found:
        if words in (["token", "add"], ["work"]):
            continue  # in a sentence, without what it is about
        check_command(words)


def test_settings_that_are_named_exist(text: str) -> None:
    given = dict(re.findall(r"\b(BIDE_[A-Z_]+)=(\S+)", text))
    named = set(re.findall(r"\bBIDE_[A-Z][A-Z_]+[A-Z]\b", text))
    check_environment({name: given.get(name, "1s") for name in named - {"BIDE_STORE", "BIDE_STORE_FILE"}})


def test_files_that_are_named_exist(text: str, root: Path) -> None:
    for path in set(re.findall(r"\bdeploy/[\w.-]+\b", text)):
        assert (root / path).exists() or path == "deploy/secrets", path
    for file in (root / "deploy").iterdir():
        if file.is_file() and file.suffix != ".dockerignore":
            assert f"deploy/{file.name}" in text, f"{file.name} is not spoken of"


def test_the_deployment_is_locked_up(deployment: dict[str, Any]) -> None:
    assert deployment["securityContext"]["runAsNonRoot"] is True
    assert deployment["enableServiceLinks"] is False
    [container] = deployment["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    mounted = {one["name"] for one in container["volumeMounts"]}
    assert mounted == {one["name"] for one in deployment["volumes"]}
    assert not container["image"].endswith(":latest")


def test_the_deployment_is_probed_and_stopped_as_it_should_be(deployment: dict[str, Any]) -> None:
    [container] = deployment["containers"]
    options = check_command(container["args"])
    assert options["port"] == container["ports"][0]["containerPort"]
    environment = {one["name"]: one["value"] for one in container["env"]}
    check_environment(environment)
    assert container["livenessProbe"]["httpGet"]["path"] == "/healthz"
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert container["readinessProbe"]["timeoutSeconds"] > 2, "longer than /readyz takes"
    [_, before] = container["lifecycle"]["preStop"]["exec"]["command"]
    grace = duration(environment["BIDE_GRACE"]) / 1_000
    assert deployment["terminationGracePeriodSeconds"] >= int(before) + grace + 10


def test_the_scrape_is_named_as_the_rules_expect(text: str, root: Path) -> None:
    [config] = [one for one in manifests(text) if "scrape_configs" in one]
    [job] = config["scrape_configs"]
    rules = (root / "deploy" / "alerts.yaml").read_text(encoding="utf-8")
    assert set(re.findall(r'job="(\w+)"', rules)) == {job["job_name"]}
    compose = yaml.safe_load((root / "deploy" / "compose.yaml").read_text(encoding="utf-8"))
    published = [port.rpartition(":")[0] for one in compose["services"].values() for port in one.get("ports", ())]
    assert [target for one in job["static_configs"] for target in one["targets"]] == published
