"""The image: what it is made from, who it runs as, and that its health check tells well from ill."""

from __future__ import annotations

import fnmatch
import http.server
import json
import re
import shlex
import shutil
import subprocess
import sys
import threading
import tomllib
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement
from tests.deploy.commands import check_command

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
        if requirement.name != "bide":
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
    done = subprocess.run(
        [sys.executable, "-c", build], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
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
            done = subprocess.run(
                [sys.executable, "-c", code.replace(f":{port}/", f":{server}/")], capture_output=True, check=False
            )
        assert (done.returncode == 0) is well
    timeout = re.search(r"timeout=(\d+)", code)
    given = re.search(r"--timeout=(\d+)s", options)
    assert timeout is not None
    assert given is not None
    assert 2 < int(timeout[1]) < int(given[1]), "longer than /readyz takes, shorter than the check may"
