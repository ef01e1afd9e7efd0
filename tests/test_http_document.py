"""docs/http.md is true: each of its requests is sent to a running `bide serve`, and what it shows is what came back."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.programs import environment, run
from tests.service.calling import Api
from tests.test_docs import ROOT, load_runner, text_of
from tests.waiting import PATIENCE, wait_until

from bide.service.contract import CALLS, contents
from bide.service.serving import ServeConfig, TopicConfig, WebhooksConfig

DOCUMENT = ROOT / "docs" / "http.md"
SHOWN = "localhost:8420"
MARK = "=== command "

VOLATILE = {
    r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}": "<id>",
    r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z": "<instant>",
    r"\b\d{13}-[0-9a-f]{8}\b": "<event>",
    r"\b1[78]\d{14}\b": "<token>",
}
"""What is different each time. Years beyond this century's first half are the document's own."""


def needed(program: str) -> str:
    found = shutil.which(program)
    if found is None:
        if os.environ.get("CI"):
            pytest.fail(f"{program} is not installed")
        pytest.skip(f"{program} is not installed")
    return found


class Command:
    """A command of a console block, and the output that it is shown with."""

    def __init__(self, line: int, text: str) -> None:
        self.line = line
        self.text = text
        self.shown = ""


def commands_of(text: str) -> list[Command]:
    """In order. A command goes on in lines that begin with `> `, and while a quote is open."""
    found: list[Command] = []
    for block in load_runner().blocks_of(text):
        if block.language != "console" or block.not_run is not None:
            continue
        for number, line in enumerate(block.text.splitlines()):
            if line.startswith("$ "):
                found.append(Command(block.line + number, line[2:]))
            elif line.startswith("> "):
                found[-1].text += f"\n{line[2:]}"
            elif not found[-1].shown and found[-1].text.count("'") % 2:
                found[-1].text += f"\n{line}"
            else:
                found[-1].shown += f"{line}\n"
    return found


def _named(found: re.Match[str]) -> str:
    [name] = [name for pattern, name in VOLATILE.items() if re.fullmatch(pattern, found[0])]
    return found[0] if name == "<instant>" and found[0] > "205" else name


def normal(text: str) -> str:
    """Without what is volatile, and without spaces, which the document adds for readers."""
    for pattern in VOLATILE:
        text = re.sub(pattern, _named, text)
    return re.sub(r"\s+", "", text)


def matches(shown: str, got: str) -> bool:
    """Whether `got` is what is shown, where `...` stands for anything."""
    pattern = ".*".join(re.escape(part) for part in normal(shown).split("..."))
    return re.fullmatch(pattern, normal(got)) is not None


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """One store for the service and the commands; curl shows no progress."""
    (tmp_path / ".curlrc").write_text("silent\nshow-error\n", encoding="utf-8")
    store = f"sqlite:///{tmp_path}/tasks.db"
    return environment({"BIDE_STORE": store, "CURL_HOME": str(tmp_path), "NO_PROXY": "*", "NO_COLOR": "1"})


@pytest.fixture
def served(tmp_path: Path, environ: dict[str, str]) -> Iterator[str]:
    """Where `bide serve` listens, as HOST:PORT."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "bide", "serve", "--port", str(port)]
    with (
        (tmp_path / "log").open("wb") as log,
        subprocess.Popen(command, env=environ, cwd=tmp_path, stderr=log) as serving,
    ):
        try:

            def listens() -> bool:
                assert serving.poll() is None, (tmp_path / "log").read_text()
                socket.create_connection(("127.0.0.1", port), PATIENCE).close()
                return True

            wait_until(listens, "the service to listen")
            yield f"localhost:{port}"
        finally:
            serving.terminate()
            assert serving.wait(PATIENCE) == 0, (tmp_path / "log").read_text()


def test_every_request_has_the_answer_that_is_shown(served: str, environ: dict[str, str], tmp_path: Path) -> None:
    needed("curl"), needed("jq")
    commands = commands_of(text_of(DOCUMENT))
    assert len(commands) > 40
    script = "".join(
        f"{command.text.replace(SHOWN, served)}\necho; echo '{MARK}'$?\n" for command in commands
    )  # one shell, so that variables last
    done = run(needed("bash"), "-uc", script, cwd=tmp_path, environ=environ, code=None)
    outputs = re.split(rf"\n{MARK}(\d+)\n", done.stdout)
    wrong = []
    for command, output, code in zip(commands, outputs[::2], outputs[1::2], strict=False):
        if code != "0" or not matches(command.shown, output):
            wrong.append(f"{DOCUMENT.name}:{command.line}: {command.text}\nexit code {code}, shows\n{output}\n")
    assert not wrong, "\n".join(wrong) + done.stderr
    assert len(outputs) == 2 * len(commands) + 1


PEOPLE = ("ann", 'bo\u00e9 "x"')


def test_the_consumer_consumes(served: str, environ: dict[str, str], tmp_path: Path) -> None:
    needed("curl"), needed("jq")
    [block] = [block for block in load_runner().blocks_of(text_of(DOCUMENT)) if block.text.startswith("# consumer.sh")]
    (tmp_path / "consumer.sh").write_text(block.text.replace(SHOWN, served), encoding="utf-8")
    tasks = [
        {"topic": "mail.send", "delay": f"{500 * place}ms", "payload": {"to": to}} for place, to in enumerate(PEOPLE)
    ]
    api = Api(f"http://{served}")
    api.done("POST", "/v1/schedule", tasks)
    said = tmp_path / "said"
    with said.open("wb") as output, subprocess.Popen(
        [needed("bash"), "-u", "consumer.sh"], env=environ, cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=output,
        start_new_session=True,
    ) as consumer:  # fmt: skip
        try:
            done = "/v1/tasks?topic=mail.send&state=done"
            wait_until(lambda: len(api.done("GET", done)["tasks"]) == len(PEOPLE), "all to be done")
            settled = b'{"settled":[true]}'
            wait_until(lambda: said.read_bytes().count(settled) == len(PEOPLE), "the answers to be shown")
        finally:
            os.killpg(consumer.pid, signal.SIGKILL)
            api.close()
    assert all(f"sending to {to}\n" in said.read_text() for to in PEOPLE)


def rows_below(mark: str) -> list[list[str]]:
    """The rows of the table below a comment."""
    table = text_of(DOCUMENT).partition(f"<!-- {mark}:")[2].partition("\n\n")[0]
    lines = [line for line in table.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_table_of_calls_is_the_contracts() -> None:
    assert rows_below("calls") == [[f"`{call.method} {call.path}`", call.summary] for call in CALLS]


def test_the_table_of_statuses_is_the_contracts() -> None:
    statuses = {
        int(status)
        for operations in contents()["paths"].values()
        for operation in operations.values()
        for status in operation["responses"]
    }
    rows = [int(status) for status, _ in rows_below("statuses")]
    assert rows == sorted({*statuses, 431, 500}), "and the two that no call answers by itself"


def test_every_call_has_an_example() -> None:
    shown = "\n".join(command.text for command in commands_of(text_of(DOCUMENT)))
    for call in CALLS:
        if call.path.endswith("{key}"):
            method = "" if call.method == "GET" else f"-X {call.method} "
            assert f"curl {method}{SHOWN}/v1/topics/" in shown
        elif "{topic}" in call.path:
            path = re.escape(call.path).replace(re.escape("{topic}"), r"\S+")
            assert re.search(f"curl -X {call.method} {SHOWN}{path}", shown), call.name
        else:
            assert f"{SHOWN}{call.path}" in shown


def test_the_file_has_every_field(tmp_path: Path) -> None:
    [block] = [block for block in load_runner().blocks_of(text_of(DOCUMENT)) if block.language == "toml"]
    read: dict[str, Any] = tomllib.loads(block.text)
    config = msgspec.convert(read, ServeConfig)
    assert set(read) == set(ServeConfig.__struct_fields__)
    assert set(read["webhooks"]) == set(WebhooksConfig.__struct_fields__)
    assert {*read["topics"]["order.close"], *read["topics"]["report.send"]} == set(TopicConfig.__struct_fields__)
    for one in config.topics.values():
        assert one.policy() is not None


def test_a_command_that_shows_something_else_is_told() -> None:
    assert matches('{"a": 1, "b": ...}', '{"a":1,"b":{"c":2}}\n')
    assert not matches('{"a": 1}', '{"a":2}')
    assert not matches("", '{"a":2}')
    assert matches('"2026-02-03T10:00:00.000Z"', '"2027-01-01T00:00:00.123Z"')
    assert not matches('"2099-02-03T10:00:00.000Z"', '"2099-02-03T10:00:00.001Z"')
