"""Processes against a real store under real faults: see the package."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from bide.core.errors import BideError
from bide_proofs.servers.process import ServerFailed, ServerMissing
from bide_proofs.torture.plain import server_at
from bide_proofs.torture.run import Plan, tortured
from bide_proofs.torture.server import Server
from bide_proofs.trial import WrongByKind, not_in_memory, parser_of

_SHOWN = 5


def main() -> int:
    parser = parser_of("torture", __doc__)
    parser.add_argument("url", nargs="?", help="a store that several processes can share, on this machine")
    parser.add_argument(
        "--server",
        help="instead of a URL, one of its own, which may be broken: sqlite, redis, redis-cluster, redis-sentinel, "
        "postgres, mariadb, http",
    )
    parser.add_argument("--seconds", type=float, default=60, help="how long faults go on")
    parser.add_argument("--least", type=int, default=0, help="clients go on until so many deliveries have begun")
    parser.add_argument(
        "--without", action="append", default=[], help="this trouble of the server is not caused; again"
    )
    parser.add_argument("--rate", type=float, default=100, help="verbs a second")
    parser.add_argument("--farthest", type=float, default=12, help="the longest delay, in seconds")
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--pace", type=float, default=1, help="2 for twice as many faults in the same time")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--results", type=Path, help="a file to which the report is appended, as one line")
    parser.add_argument("--keep", type=Path, help="a folder to which journals are copied if something was wrong")
    given = parser.parse_args()
    if (given.url is None) == (given.server is None):
        parser.error("give either a URL or --server")
    if given.url is not None:
        not_in_memory(parser, given.url)
    return _run(given)


def _run(given: argparse.Namespace) -> int:
    plan = Plan(
        seconds=given.seconds, clients=given.clients, workers=given.workers, rate=given.rate, pace=given.pace,
        farthest=given.farthest, seed=given.seed, least=given.least, without=given.without,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="bide-torture-") as name:
        folder = Path(name)
        try:
            server = server_at(given.url, folder) if given.server is None else _server_of(given.server, folder)
            report, wrong = asyncio.run(tortured(server, plan, folder))
        except (BideError, ServerFailed, ServerMissing) as error:
            sys.stderr.write(f"{error}\n")
            return 2
        except asyncio.CancelledError:
            return 128 + signal.SIGTERM
        if any(wrong.values()) and given.keep is not None:
            _keep(folder, given.keep, wrong)
    _tell(report, wrong, given.results)
    return 1 if any(wrong.values()) else 0


def _server_of(name: str, folder: Path) -> Server:
    from bide_proofs.torture.servers import server_of  # a URL needs none of it

    return server_of(name, folder / "server")


def _keep(folder: Path, goal: Path, wrong: WrongByKind) -> None:
    goal.mkdir(parents=True, exist_ok=True)
    for path in (*folder.glob("*.jsonl"), *folder.glob("*.err")):
        shutil.copy(path, goal)
    (goal / "wrong.json").write_text(json.dumps({kind: [str(one) for one in cases] for kind, cases in wrong.items()}))


def _tell(report: dict[str, Any], wrong: WrongByKind, results: Path | None) -> None:
    for kind, cases in wrong.items():
        for case in cases[:_SHOWN]:
            sys.stderr.write(f"{kind}: {case}\n")
    sys.stdout.write(json.dumps(report, indent=2) + "\n")
    if results is not None:
        results.parent.mkdir(parents=True, exist_ok=True)
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    sys.exit(main())
