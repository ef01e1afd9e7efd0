"""What a person gives a program: the arguments of the command line, and the file of settings of a service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from click.testing import CliRunner

from bide.app import Bide
from bide.cli import main
from bide.cli.exits import Exit
from bide.core.errors import BadInput, MissingExtra, SetupError
from bide.service.config import read_config
from bide.service.serving import Serving
from bide_proofs.fuzz.drawing import Draw
from bide_proofs.fuzz.running import Case, Target, check, clear
from bide_proofs.fuzz.targets.text import length_text

_LINES = (
    "schedule t {} --key k --delay 15m", "schedule t --at 2030-01-01T00:00:00Z --group g",
    "ls --topic t --limit 3",
    "ls --state dead --json", "show t k --json", "move t k --delay 1h", "fire t k", "cancel t k", "shift g --by -2h",
    "redrive t k", "tally --json", "pause t", "resume t", "cancel --group g", "redrive --all-dead",
    "ls --group g --before 1h", "move t k --at 2030-01-01T00:00:00Z", "--version", "--help", "nothing", "migrate",
    "tally --ahead 24h --step 1h",
    "token ls",
)  # fmt: skip
_TOML = """\
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


def arguments(draw: Draw) -> None:
    """Each ends with a code of the table that is no defect, and without a traceback."""
    words = draw.choice(_LINES).split()
    for _ in range(draw.randrange(3)):
        place = draw.randrange(len(words) + 1)
        kind = draw.randrange(4)
        if kind == 0:
            words.insert(
                place, draw.of("--json", "--limit", "--key", "--delay", length_text(draw), draw.noise(), "--", "-x")
            )
        elif kind == 1 and words:
            del words[place % len(words)]
        elif words:
            words[place % len(words)] = draw.changed(words[place % len(words)])
    words = [word.replace("\0", "") for word in words if word != "demo"]  # no system hands over a NUL
    if words and words[0] in ("serve", "work", "top", "bench", "lab", "demo"):
        return
    draw.note(words)
    environ = {"BIDE_STORE": "memory:", "COLUMNS": "80"}
    done = CliRunner(env=environ).invoke(main, words, input="")
    draw.note(done.output[-300:])
    check(done.exit_code in set(Exit) - {Exit.DEFECT}, f"it ended with {done.exit_code}: {done.exception!r}")
    check("Traceback" not in done.output, "a traceback")
    check(done.exit_code == 0 or done.output.strip(), f"it ended with {done.exit_code} and says nothing")


async def command_line(draw: Draw) -> None:
    await asyncio.to_thread(arguments, draw)  # each command has an event loop of its own


def config(path: Path, draw: Draw) -> None:
    text = draw.text(_TOML) if draw.chance(0.5) else draw.changed(_TOML, 1)
    draw.note(text[-300:])
    path.write_bytes(draw.of(text.encode("utf-8", "surrogatepass"), draw.damaged(text.encode("utf-8", "replace"))))
    try:
        Serving(Bide("memory:"), read_config(str(path)), host="127.0.0.1")
    except BadInput as error:
        clear(error)
    except (SetupError, MissingExtra) as error:
        check(str(error), "what is wrong")


@asynccontextmanager
async def lines(_: Path) -> AsyncIterator[Case]:
    yield command_line


@asynccontextmanager
async def configs(folder: Path) -> AsyncIterator[Case]:
    async def case(draw: Draw) -> None:
        config(folder / "service.toml", draw)

    yield case


TARGETS = (
    Target("arguments", "the command line", lines),
    Target("config", "the file of settings of a service (TOML)", configs),
)
