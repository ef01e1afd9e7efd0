"""The frame of a command: its options, its own part of a store, its report with all violations, and its exit code."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from bide.app import Bide
from bide.core.errors import BadInput, BideError, StoreError, StoreMismatch
from bide.core.records import State
from bide.settings import Settings
from bide.wiring import store_maker, without_secrets
from bide_bench.plan import open_target
from bide_bench.target import Target
from bide_bench.worker import percentile
from bide_proofs.servers.process import ServerFailed, ServerMissing

POLL_EVERY = 0.25
"""Seconds between two polls of a store."""
PATIENCE = 120.0
"""Seconds after which an operation that must end counts as hung, which is a failure. A busy machine stays far below
this bound; the report shows how long operations took, for people to read."""
_SHOWN = 10
"""The number of cases shown of each kind of failure."""
R = TypeVar("R")
WrongByKind: TypeAlias = Mapping[str, Sequence[object]]
"""The failures found, by kind."""
Run: TypeAlias = Callable[[Path], Coroutine[Any, Any, tuple[dict[str, Any], WrongByKind]]]
"""One run in its own folder; returns the report and the failures."""


class ChildFailed(Exception):
    """A child process ended, or stayed silent, while the parent waited for its answer."""


# --- options


def parser_of(module: str, about: str | None) -> argparse.ArgumentParser:
    """The parser for `python -m MODULE`."""
    return argparse.ArgumentParser(
        prog=f"python -m {module}", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def whole(text: str) -> int:
    """Parse an option that is a whole number above 0. Raises ArgumentTypeError."""
    if not (text.isdecimal() and (number := int(text))):
        raise argparse.ArgumentTypeError(f"{text} is not accepted; give a whole number above 0")
    return number


def positive(text: str) -> float:
    """Parse an option that is a number above 0. Raises ValueError, ArgumentTypeError."""
    if not 0 < (number := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not accepted; give a number above 0")
    return number


def add_seed(parser: argparse.ArgumentParser) -> None:
    """Add the option `--seed`."""
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))


# --- a run and its report


def tried(name: str, run: Run, *, results: Path | None = None, keep: Path | None = None) -> int:
    """Run a proof, print its report and its failures, and return the exit code.

    The report is appended to the file `results`, as one line of JSON. If there were failures, journals are copied to
    the folder `keep`. SIGTERM cancels the run and leaves nothing behind.
    """
    with tempfile.TemporaryDirectory(prefix=f"bide-{name}-") as folder:
        try:
            report, wrong = run_until_terminated(run(Path(folder)))
        except (BideError, ChildFailed, ServerFailed, ServerMissing) as error:
            sys.stderr.write(f"{error}\n")
            return 2
        except asyncio.CancelledError:
            return 128 + signal.SIGTERM
        if any(wrong.values()) and keep is not None:
            _keep(Path(folder), keep, wrong)
    return tell(report, wrong, results)


def tell(report: Mapping[str, Any], wrong: WrongByKind, results: Path | None = None) -> int:
    """Print a report with the number of failures of each kind, show some of them, and return the exit code."""
    report = {**report, "wrong": {kind: len(cases) for kind, cases in wrong.items()}}
    for kind, cases in wrong.items():
        for case in cases[:_SHOWN]:
            sys.stderr.write(f"{kind}: {case}\n")
    sys.stdout.write(json.dumps(report, indent=2) + "\n")
    if results is not None:
        results.parent.mkdir(parents=True, exist_ok=True)
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(report) + "\n")
    return 1 if any(wrong.values()) else 0


def run_until_terminated(work: Coroutine[Any, Any, R]) -> R:
    """Run `work` and return its result. SIGTERM cancels it, which raises CancelledError."""

    async def run() -> R:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await work

    return asyncio.run(run())


def progress(text: str) -> None:
    """Print a line of progress to the standard error, apart from the report."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _keep(folder: Path, goal: Path, wrong: WrongByKind) -> None:
    goal.mkdir(parents=True, exist_ok=True)
    for path in (*folder.glob("*.jsonl"), *folder.glob("*.err")):
        shutil.copy(path, goal)
    (goal / "wrong.json").write_text(json.dumps({kind: [str(one) for one in cases] for kind, cases in wrong.items()}))


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, right: Collection[int] = ()) -> str:
    """Format a Markdown table with the columns numbered in `right` aligned to the right."""
    rules = ["---:" if number in right else "---" for number in range(len(heads))]
    lines = [f"| {' | '.join(heads)} |", f"|{'|'.join(rules)}|"]
    for row in rows:
        cells = [cell.replace("|", "\\|").replace("\n", " ") for cell in row]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def percentiles(lengths: Sequence[float]) -> dict[str, float]:
    """The percentiles of lengths in any order; empty if there are none."""
    ordered = sorted(lengths)
    parts = {"p50": 0.5, "p99": 0.99, "p999": 0.999, "most": 1.0}
    return {name: round(percentile(ordered, part), 2) for name, part in parts.items()} if ordered else {}


# --- the store, before and after


async def migrated(url: str) -> None:
    """Create or migrate the tables of a store that has tables."""
    schema = store_maker(url, Settings())().features.schema
    if schema is not None and await schema.plan():
        await schema.migrate()


async def refuse_unless_empty(app: Bide, topics: Collection[str]) -> None:
    """Raise StoreMismatch if there are tasks of these topics: they would be delivered and judged."""
    tally = await app.tally()
    if any(tally.number(topic) for topic in topics):
        raise StoreMismatch(f"the store has tasks of the topics {', '.join(topics)} already; give an empty one")


async def live_tasks(app: Bide, *topics: str) -> int:
    """The number of live tasks of these topics, or of all."""
    tally = await app.tally()
    return sum(tally.number(topic, state) for topic in topics or (None,) for state in State if state.live)


async def drained(app_of: Callable[[], Bide], *topics: str) -> float | None:
    """Wait until no task of these topics, or of all, is live; return the seconds. The store may be away meanwhile.

    Returns None if tasks are still live after `PATIENCE`.
    """
    began = time.monotonic()
    while time.monotonic() < began + PATIENCE:
        try:
            async with app_of() as app:
                while time.monotonic() < began + PATIENCE:
                    if not await live_tasks(app, *topics):
                        return time.monotonic() - began
                    await asyncio.sleep(POLL_EVERY)
        except StoreError:
            await asyncio.sleep(POLL_EVERY)
    return None


@asynccontextmanager
async def own_place(url: str, *, made: bool = False) -> AsyncIterator[Target]:
    """A fresh namespace or schema on a server, or the part or file that `url` names; a new one is removed afterwards.

    Raises BadInput for a store that other processes cannot see. Also raises it for a part that exists already, unless
    `made` is true: then the caller ensures that it is empty.
    """
    async with open_target(url) as place:
        if not place.shared:
            raise BadInput("store", url, "one that other processes can see: sqlite:///file.db, redis://host:6379/0")
        if not (place.owned or made):
            raise BadInput("store", without_secrets(url), "one that is empty: what is in it would be judged, too")
        yield place
