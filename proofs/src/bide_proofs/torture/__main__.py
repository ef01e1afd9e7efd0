"""Processes against a real store under real faults: see the package."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from bide_proofs.harness.command import WrongByKind, add_seed, not_in_memory, parser_of, tried
from bide_proofs.torture.plain import server_at
from bide_proofs.torture.run import Plan, tortured
from bide_proofs.torture.server import Server


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
    parser.add_argument("--without", action="append", default=[], help="this fault is not caused; again")
    parser.add_argument("--only", action="append", default=[], help="no fault but this one is caused; again")
    parser.add_argument("--rate", type=float, default=100, help="verbs a second")
    parser.add_argument("--farthest", type=float, default=12, help="the longest delay, in seconds")
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--pace", type=float, default=1, help="2 for twice as many faults in the same time")
    parser.add_argument("--results", type=Path, help="a file to which the report is appended, as one line")
    parser.add_argument("--keep", type=Path, help="a folder to which journals are copied if something was wrong")
    add_seed(parser)
    given = parser.parse_args()
    if (given.url is None) == (given.server is None):
        parser.error("give either a URL or --server")
    if given.url is not None:
        not_in_memory(parser, given.url)
    plan = Plan(
        seconds=given.seconds, clients=given.clients, workers=given.workers, rate=given.rate, pace=given.pace,
        farthest=given.farthest, seed=given.seed, least=given.least, without=given.without, only=given.only,
    )  # fmt: skip

    async def run(folder: Path) -> tuple[dict[str, Any], WrongByKind]:
        server = server_at(given.url, folder) if given.server is None else _server_of(given.server, folder)
        return await tortured(server, plan, folder)

    return tried("torture", run, results=given.results, keep=given.keep)


def _server_of(name: str, folder: Path) -> Server:
    from bide_proofs.torture.servers import server_of  # a URL needs none of it

    return server_of(name, folder / "server")


if __name__ == "__main__":
    sys.exit(main())
