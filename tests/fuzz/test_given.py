"""What a person gives a program: the arguments of the command line, and the settings file of a service."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from tests.fuzz.cases import NOISE, changed, damaged, fuzz, near, refusals
from tests.fuzz.test_text import LENGTHS

from bide.app import Bide
from bide.cli import main
from bide.cli.exits import Exit
from bide.core.errors import BadInput, MissingExtra, SetupError
from bide.service.serving import ServiceInstance, read_config

LINES = (
    "schedule t {} --key k --delay 15m", "schedule t --at 2030-01-01T00:00:00Z --group g", "ls --topic t --limit 3",
    "ls --state dead --json", "show t k --json", "move t k --delay 1h", "fire t k", "cancel t k", "shift g --by -2h",
    "redrive t k", "tally --json", "pause t", "resume t", "cancel --group g", "redrive --all-dead",
    "ls --group g --before 1h", "move t k --at 2030-01-01T00:00:00Z", "--version", "--help", "nothing", "migrate",
    "tally --ahead 24h --step 1h", "token ls",
)  # fmt: skip
ENDLESS = ("serve", "work", "top", "bench", "lab", "demo")
PUT_IN = st.sampled_from(["--json", "--limit", "--key", "--delay", "--", "-x"]) | LENGTHS | NOISE


@st.composite
def command_lines(draw: DrawFn) -> list[str]:
    words = draw(st.sampled_from(LINES)).split()
    for _ in range(draw(st.integers(0, 2))):
        place = draw(st.integers(0, len(words)))
        if draw(st.booleans()):
            words.insert(place, draw(PUT_IN))
        else:
            words[place : place + 1] = [draw(changed(word)) for word in words[place : place + 1] if draw(st.booleans())]
    return [word.replace("\0", "") for word in words if word not in ENDLESS]  # no system hands over a NUL


@fuzz(150, words=command_lines())
def test_the_command_line(words: list[str]) -> None:
    """Each ends with a code of the table that is no defect, and without a traceback."""
    done = CliRunner(env={"BIDE_STORE": "memory:", "COLUMNS": "80"}).invoke(main, words, input="")
    assert done.exit_code in set(Exit) - {Exit.DEFECT}, f"it ended with {done.exit_code}: {done.exception!r}"
    assert "Traceback" not in done.output
    assert done.exit_code == 0 or done.output.strip()


TOML = """\
keep_most = 100
[webhooks]
allow = ["10.1.0.0/16", "receiver.internal:8080"]
per_host = 5
plain_http = true
[topics."order.close"]
webhook = "https://hooks.example.com/x"
retry = ["15s", "1m"]
concurrency = 20
losses = 3
keep_done = "1h"
timeout = "10s"
headers = {a = "b"}
[topics.t]
webhook = "per-task"
retry = {policy = "exponential", first = "1s", tries = 3}
"""


@fuzz(
    150,
    text=(changed(TOML, 1) | near(TOML)).map(lambda text: text.encode("utf-8", "surrogatepass"))
    | damaged(TOML.encode(), 2),
)
def test_the_settings_file_of_a_service(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "service.toml"
    path.write_bytes(text)
    with refusals(BadInput, SetupError, MissingExtra):
        ServiceInstance(Bide("memory:"), read_config(str(path)), host="127.0.0.1")
