"""Processes against a real store under real faults: see the package."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from bide_proofs import torture
from bide_proofs.harness.command import WrongByKind, parser_of, tried
from bide_proofs.torture.plain import server_at
from bide_proofs.torture.run import add_options, tortured
from bide_proofs.torture.servers import server_of


def main() -> int:
    parser = parser_of("bide_proofs.torture", torture.__doc__)
    parser.add_argument("url", nargs="?", help="a store that several processes can share, on this machine")
    parser.add_argument(
        "--server",
        help="instead of a URL, one of its own, which may be broken: sqlite, redis, redis-cluster, redis-sentinel, "
        "postgres, mariadb, http",
    )
    add_options(parser, seconds=60, rate=100)
    parser.add_argument("--without", action="append", default=[], help="this fault is not caused; again")
    parser.add_argument("--only", action="append", default=[], help="no fault but this one is caused; again")
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--results", type=Path, help="a file to which the report is appended, as one line")
    parser.add_argument("--keep", type=Path, help="a folder to which journals are copied if something was wrong")
    given = parser.parse_args()
    if (given.url is None) == (given.server is None):
        parser.error("give either a URL or --server")

    async def run(folder: Path) -> tuple[dict[str, Any], WrongByKind]:
        server = server_at(given.url, folder) if given.server is None else server_of(given.server, folder / "server")
        return await tortured(server, given, folder)

    return tried("torture", run, results=given.results, keep=given.keep)


if __name__ == "__main__":
    sys.exit(main())
