"""What the files start, started: the unit's command on a SQLite file, and the container's on a Redis, with a token."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import yaml
from tests.deploy.test_dockerfile import read
from tests.waiting import wait_until

from bide.cli.exits import Exit

if TYPE_CHECKING:
    from tests.servers.fixtures import StartsRedis

BIDE = [sys.executable, "-m", "bide"]


def environment(given: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("BIDE_")} | dict(given)


def command(words: Sequence[str], config: Path, host: str = "127.0.0.1") -> list[str]:
    """The same words, with an address and a file of this test's, and whichever port is free."""
    changed = {"--port": "0", "--host": host, "--config": str(config)}
    before = ["", *words]
    return [changed.get(option, word) for option, word in zip(before, words, strict=False)]


def ask(url: str, token: str | None = None, **how: str) -> tuple[int, str]:
    """The status and the text of an answer."""
    request = urllib.request.Request(url, method=how.get("method", "GET"))
    if token is not None:
        request.add_header("Authorization", f"Bearer {token}")
    if "body" in how:
        request.data = how["body"].encode()
        request.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


class Served(NamedTuple):
    """A process that serves."""

    url: str
    log: Path


@contextmanager
def serving(words: Sequence[str], given: Mapping[str, str], folder: Path, name: str = "bide") -> Iterator[Served]:
    """A process of `bide WORDS`; it is told to stop, and has to, as systemd and Docker do."""
    log = folder / f"{name}.log"
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [*BIDE, *words], env=environment(given), cwd=folder, stdin=subprocess.DEVNULL, stdout=stderr, stderr=stderr
        )
    url = ""

    def ready() -> bool:
        nonlocal url
        text = log.read_text(encoding="utf-8")
        assert process.poll() is None, text
        found = re.search(r"http://127\.0\.0\.1:\d+", text)
        url = found[0] if found else ""
        return bool(url) and ask(f"{url}/readyz")[0] == 200

    try:
        wait_until(ready, f"{name} to be ready")
        yield Served(url, log)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def test_what_the_unit_starts(deploy: Path, tmp_path: Path) -> None:
    unit = (deploy / "bide.service").read_text(encoding="utf-8")
    start = re.search(r"^ExecStart=\S+ (.+)$", unit, re.MULTILINE)
    assert start is not None
    given = dict(re.findall(r"^Environment=(\w+)=(.*)$", unit, re.MULTILINE))
    (tmp_path / "store").write_text(f"sqlite:///{tmp_path}/bide.db\n", encoding="utf-8")
    given = {name: value.replace("%d", str(tmp_path)) for name, value in given.items()}

    with serving(command(shlex.split(start[1]), deploy / "bide.toml"), given, tmp_path) as (at, log):
        assert ask(f"{at}/healthz")[0] == 200
        status, text = ask(f"{at}/readyz")
        assert (status, json.loads(text)["status"]) == (200, "ready")
        status, text = ask(f"{at}/v1/topics/post/tasks/a%2Fb", method="PUT", body='{"payload": 1, "delay": "1h"}')
        assert status == 201, text
        status, text = ask(f"{at}/metrics")
        assert status == 200
        assert 'bide_tasks{state="waiting",topic="post"} 1.0' in text
        assert re.search(r'bide_http_requests_total\{call="[^"]+",status="201"\} 1\.0', text)
        assert re.search(r'bide_store_call_seconds_count\{operation="add"\} [1-9]', text)
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    assert lines, "it says what it does"
    assert all({"time", "level", "logger", "message"} <= set(line) for line in lines)
    assert not [line for line in lines if line["level"] in ("error", "critical")]


def test_what_the_containers_start(deploy: Path, tmp_path: Path, redis_server: StartsRedis) -> None:
    compose = yaml.safe_load((deploy / "compose.yaml").read_text(encoding="utf-8"))
    words: list[str] = compose["services"]["bide-1"]["command"]
    (tmp_path / "store").write_text(redis_server().url + "\n", encoding="utf-8")
    given = {**compose["services"]["bide-1"]["environment"], "BIDE_STORE_FILE": str(tmp_path / "store")}

    def bide(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*BIDE, *words],
            env=environment(given),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    refused = bide(*command(words, deploy / "bide.toml", host="0.0.0.0"))
    assert refused.returncode == Exit.SETUP, "without a token it does not listen beyond its own machine"
    assert "bide token add" in refused.stderr

    tokens = []
    for arguments in (["ops"], ["prometheus", "--verb", "metrics"]):
        made = bide("token", "add", *arguments)
        found = re.search(r"bide_\S{30,}", made.stdout)
        assert found is not None, made.stdout + made.stderr
        tokens.append(found[0])
    ops, prometheus = tokens

    [check] = [line.rest.partition(" CMD ")[2] for line in read(deploy / "Dockerfile") if line.word == "HEALTHCHECK"]
    with (
        serving(command(words, deploy / "bide.toml"), given, tmp_path, "bide-1") as (first, _),
        serving(command(words, deploy / "bide.toml"), given, tmp_path, "bide-2") as (second, _),
    ):
        code = json.loads(check)[2].replace("http://127.0.0.1:8420", first)
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
        assert ask(f"{first}/metrics")[0] == 401
        assert ask(f"{first}/v1/tasks", prometheus)[0] == 403
        body = '{"payload": 1, "delay": "1h"}'
        assert ask(f"{first}/v1/topics/post/tasks/a", ops, method="PUT", body=body)[0] == 201
        assert ask(f"{second}/v1/topics/post/tasks/a", ops)[0] == 200
        status, text = ask(f"{second}/metrics", prometheus)
        assert status == 200
        assert 'bide_tasks{state="waiting",topic="post"} 1.0' in text
        assert re.search(r'^bide_store_call_seconds_count\{operation="get"\} [1-9]', text, re.MULTILINE)
        assert re.search(r"^bide_clock_skew_seconds -?0\.0", text, re.MULTILINE)
