"""The image and the compose file: what they are made from, that nothing in them is root, and serving from them."""

from __future__ import annotations

import fnmatch
import http.server
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import tomllib
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from packaging.requirements import Requirement
from tests.deploy.commands import check_command, check_environment
from tests.programs import Ended, environment, python, run
from tests.servers.fixtures import StartsRedis
from tests.waiting import wait_until

from bide.cli.exits import Exit
from bide.core.instants import duration
from bide.service.serving import read_config

KNOWN = {
    "FROM", "WORKDIR", "COPY", "RUN", "ENV", "USER", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK", "CMD", "ENTRYPOINT",
}  # fmt: skip


class Line(NamedTuple):
    """One instruction, its continuation lines joined."""

    word: str
    rest: str

    @property
    def words(self) -> list[str]:
        """Of the exec form. Fails for the shell form, in which a shell would be process 1 and get the signals."""
        found: list[str] = json.loads(self.rest)
        assert all(isinstance(word, str) for word in found)
        return found


def read(path: Path) -> list[Line]:
    lines: list[Line] = []
    gathered = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.strip() or line.lstrip().startswith("#"):
            assert not gathered, "a comment or an empty line within an instruction"
            continue
        gathered += line.rstrip().removesuffix("\\")
        if not line.rstrip().endswith("\\"):
            word, _, rest = gathered.strip().partition(" ")
            assert word in KNOWN, f"{word} is none of the instructions that belong here"
            lines.append(Line(word, re.sub(r"\s+", " ", rest).strip()))
            gathered = ""
    assert not gathered, "the last line goes on"
    return lines


@pytest.fixture(scope="module")
def lines(deploy: Path) -> list[Line]:
    return read(deploy / "Dockerfile")


@pytest.fixture(scope="module")
def last_stage(lines: list[Line]) -> dict[str, Line]:
    """What runs: each instruction of the last stage, the last one of each kind."""
    begin = max(number for number, line in enumerate(lines) if line.word == "FROM")
    return {line.word: line for line in lines[begin:]}


def test_base_images_are_pinned(lines: list[Line]) -> None:
    bases = [line.rest.split(" AS ")[0] for line in lines if line.word == "FROM"]
    assert len(bases) == 2, "what builds does not run"
    assert len(set(bases)) == 1, "what was built runs on the same interpreter"
    for base in bases:
        assert re.fullmatch(r"[\w./-]+:\d+\.\d+[\w.-]*(@sha256:[0-9a-f]{64})?", base), base


def test_the_interpreter_is_one_that_bide_supports(lines: list[Line], root: Path) -> None:
    version = re.search(r":(\d+\.\d+)", next(line.rest for line in lines if line.word == "FROM"))
    assert version is not None
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert f"Programming Language :: Python :: {version[1]}" in project["classifiers"]


def test_it_is_not_root_and_says_so_by_number(last_stage: dict[str, Line]) -> None:
    user = re.fullmatch(r"(\d+):(\d+)", last_stage["USER"].rest)
    assert user is not None
    assert int(user[1]) > 0
    assert int(user[2]) > 0


def test_nothing_goes_through_a_shell(lines: list[Line]) -> None:
    for line in lines:
        if line.word in {"RUN", "CMD", "ENTRYPOINT"}:
            assert line.words
        if line.word == "HEALTHCHECK":
            assert Line("CMD", line.rest.partition(" CMD ")[2]).words


def pinned(path: Path) -> dict[str, str]:
    """The version of each package, all of which have hashes."""
    found: dict[str, str] = {}
    for entry in re.split(r"\n(?=\S)", re.sub(r"#[^\n]*\n", "", path.read_text(encoding="utf-8"))):
        requirement = Requirement(entry.partition(" \\")[0].strip())
        assert entry.count("--hash=sha256:") >= 1, entry
        [version] = [one.version for one in requirement.specifier if one.operator == "=="]
        found[requirement.name] = version
    return found


def test_it_installs_every_driver_that_there_is_and_nothing_without_a_hash(lines: list[Line], root: Path) -> None:
    installs = [
        line.words for line in lines if line.word == "RUN" and line.words[1] == "install" and "pip" in line.rest
    ]
    assert len(installs) == 3
    for words in installs:
        assert "--require-hashes" in words or {"--no-index", "--no-deps"} <= set(words)
    image = pinned(root / "requirements" / "image.txt")
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [
        *project["dependencies"],
        *(one for extra in ("serve", "redis", "postgres", "mysql") for one in extras[extra]),
    ]
    for text in wanted:
        requirement = Requirement(text)
        if requirement.name != "bide" and (requirement.marker is None or requirement.marker.evaluate()):
            assert requirement.specifier.contains(image[requirement.name]), text
    constraints = (root / "requirements" / "constraints.txt").read_text(encoding="utf-8").splitlines()
    for name, version in {**image, **pinned(root / "requirements" / "image-build.txt")}.items():
        tested = [line for line in constraints if line.startswith(f"{name}==")]
        assert tested in ([f"{name}=={version}"], []), "what runs is what was tested"


def test_what_is_copied_is_there_and_is_not_left_out(lines: list[Line], deploy: Path, root: Path) -> None:
    ignore = (deploy / "Dockerfile.dockerignore").read_text(encoding="utf-8").split("\n")
    assert next(line for line in ignore if line and not line.startswith("#")) == "*"
    let_in = [line[1:] for line in ignore if line.startswith("!")]
    for line in lines:
        if line.word == "COPY" and "--from" not in line.rest:
            *sources, target = shlex.split(line.rest)
            assert len(sources) == 1 or target.endswith("/")
            for source in sources:
                assert (root / source).exists(), source
                assert any(fnmatch.fnmatch(source, pattern) for pattern in let_in), f"{source} is ignored"
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {project["readme"], *project["license-files"]} <= set(let_in), "the build reads them"


def test_what_is_copied_is_enough_to_build(lines: list[Line], root: Path, tmp_path: Path) -> None:
    """The wheel that `pip install .` makes of it, by the backend that pip would call."""
    for line in lines:
        if line.word == "COPY" and "--from" not in line.rest:
            *sources, target = shlex.split(line.rest)
            for source in sources:
                to = tmp_path / target / Path(source).name if target.endswith("/") else tmp_path / target
                to.parent.mkdir(parents=True, exist_ok=True)
                if (root / source).is_dir():
                    shutil.copytree(root / source, to, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    shutil.copy(root / source, to)
    build = "import hatchling.build as backend; print(backend.build_wheel('made'))"
    done = python("-c", build, cwd=tmp_path)
    with zipfile.ZipFile(tmp_path / "made" / done.stdout.split()[-1]) as wheel:
        names = wheel.namelist()
    assert "bide/service/server.py" in names
    assert any(name.endswith(".lua") for name in names), "what is no Python is there too"


def test_the_command_is_one_that_bide_takes(last_stage: dict[str, Line]) -> None:
    assert last_stage["ENTRYPOINT"].words == ["bide"]
    options = check_command(last_stage["CMD"].words)
    assert options["host"] == "0.0.0.0"
    assert str(options["port"]) == last_stage["EXPOSE"].rest
    assert options["log_format"] == "json"
    assert last_stage["STOPSIGNAL"].rest == "SIGTERM"


def test_the_place_of_a_file_store_is_the_users(lines: list[Line], last_stage: dict[str, Line]) -> None:
    directory = last_stage["WORKDIR"].rest
    [made] = [line.words for line in lines if line.word == "RUN" and line.words[0] == "install"]
    uid, gid = last_stage["USER"].rest.split(":")
    assert made == ["install", "-d", "-o", uid, "-g", gid, "-m", "0700", directory]


@contextmanager
def answering(status: int) -> Iterator[int]:
    """A server whose every answer has that status; its port."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/readyz" else 404)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            """Not to the tests' output."""

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def test_the_health_check_tells_well_from_ill(last_stage: dict[str, Line]) -> None:
    options, _, command = last_stage["HEALTHCHECK"].rest.partition(" CMD ")
    assert {option.partition("=")[0] for option in options.split()} >= {"--interval", "--timeout", "--retries"}
    program, flag, code = json.loads(command)
    assert (program, flag) == ("python", "-c")
    port = last_stage["EXPOSE"].rest
    assert f"127.0.0.1:{port}/readyz" in code
    for status, well in ((200, True), (503, False)):
        with answering(status) as server:
            done = python("-c", code.replace(f":{port}/", f":{server}/"), code=None)
        assert (done.returncode == 0) is well
    timeout = re.search(r"timeout=(\d+)", code)
    given = re.search(r"--timeout=(\d+)s", options)
    assert timeout is not None
    assert given is not None
    assert 2 < int(timeout[1]) < int(given[1]), "longer than /readyz takes, shorter than the check may"


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
    assert one.policy() is not None
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
    run("docker", "compose", "--file", copy / "compose.yaml", "config", "--quiet")


BIDE = [sys.executable, "-m", "bide"]


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


@contextmanager
def serving(words: Sequence[str], given: Mapping[str, str], folder: Path, name: str) -> Iterator[str]:
    """The URL of a process of `bide WORDS`; it is told to stop, and has to, as systemd and Docker do."""
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
        yield url
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def test_what_the_containers_start(deploy: Path, tmp_path: Path, redis_server: StartsRedis) -> None:
    compose = yaml.safe_load((deploy / "compose.yaml").read_text(encoding="utf-8"))
    words: list[str] = compose["services"]["bide-1"]["command"]
    (tmp_path / "store").write_text(redis_server().url + "\n", encoding="utf-8")
    given = {**compose["services"]["bide-1"]["environment"], "BIDE_STORE_FILE": str(tmp_path / "store")}

    def bide(*words: str, code: int = 0) -> Ended:
        return python("-m", "bide", *words, environ=given, cwd=tmp_path, code=code)

    # without a token it does not listen beyond its own machine
    assert "bide token add" in bide(*command(words, deploy / "bide.toml", host="0.0.0.0"), code=Exit.SETUP).stderr

    tokens = []
    for arguments in (["ops"], ["prometheus", "--verb", "metrics"]):
        made = bide("token", "add", *arguments)
        found = re.search(r"bide_\S{30,}", made.stdout)
        assert found is not None, made.stdout + made.stderr
        tokens.append(found[0])
    ops, prometheus = tokens

    [check] = [line.rest.partition(" CMD ")[2] for line in read(deploy / "Dockerfile") if line.word == "HEALTHCHECK"]
    with (
        serving(command(words, deploy / "bide.toml"), given, tmp_path, "bide-1") as first,
        serving(command(words, deploy / "bide.toml"), given, tmp_path, "bide-2") as second,
    ):
        code = json.loads(check)[2].replace("http://127.0.0.1:8420", first)
        python("-c", code)
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
