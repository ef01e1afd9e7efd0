"""bide beside other task queues, on the same server, in turns: the ratios, not the figures, are what to quote.

    python -m bench.peers                                    all peers, all workloads, three rounds
    python -m bench.peers docket arq --workload burst --n 20000 --rounds 5
    python -m bench.peers --json > peers.json

    python -m bench.peers graphile procrastinate             those on PostgreSQL

Peers on Redis: docket (pydocket), arq, SAQ, Dramatiq, Celery, Huey, and BullMQ if there is a node.js. On PostgreSQL:
procrastinate with its fastest polling, and graphile (graphile-worker) if there is a node.js. Each is installed with
pinned versions (`bench/requirements-NAME.txt`) into an environment of its own under `--venvs`, once; one that cannot be
installed or fails is reported as "not measured" with the reason. bide runs in this one. Needs
`redis-server` and PostgreSQL's programs, of which it starts servers of its own, as they come.

Workloads:

    schedule   N tasks due in an hour, from one process: by one call each from 256 callers at once (or from as many
               fewer as the library is fastest with), and in bulk where the library has a call for it; tasks a second
    burst      N tasks due at one instant, one worker, a handler that does nothing; tasks a second from that instant to
               the last start (`completed_per_s`), and from the first start to the last (`drained_per_s`)
    lateness   200 tasks a second for 10 seconds, each due 2 seconds ahead, one worker: start less due time
    crash      500 tasks due in 3 to 6 seconds, two workers whose handlers take 50 ms, `kill -9` for one of them (with
               all its processes) at 4 s, or as soon after it as it is in the middle of a task (where a second's
               tasks are moved together, that is when they are moved); once, not in rounds.
               Counted 60 s after the last due time at the latest:
               `unfired` (no handler was started), `undone` (no handler ended), `lost` (those of them that are nowhere
               in the server any more), `redelivered` (started again, since the first start had not ended), `duplicated`
               (started again although it had ended), `recovered_ms` (the latest start less its due time). A dead
               worker's tasks come back after bide's default of 10 seconds, in all libraries that let that be set

In every round each peer's run is followed by one of bide, on an emptied server; a ratio is bide / peer of such a pair,
and what is printed is the median over the rounds. For rates more is better, for milliseconds less. Every task carries
100 bytes, and every handler writes one line to a log in its first step; a thousand tasks are scheduled and done before
each run, so that none starts cold. All of it takes some 35 minutes. Each library has the settings that its
documentation gives for throughput and punctuality; the modules in `bench/contest/peers/` say which, and why. Run it on
a machine that does nothing else: with two cores, a worker, a scheduling process and Redis share them already.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.command import run
from bench.contest.contestants import BIDE, PEERS, Contestant, Environment, default_place, environment_of
from bench.contest.report import Figures, middle, ratio, show
from bench.contest.servers import Server, servers_of
from bench.contest.stage import Run
from bench.contest.workloads import COMPARED, WORKLOADS

from bide._version import __version__
from bide_bench.plan import machine
from bide_bench.processes import BenchFault
from bide_proofs.harness.command import parser_of, progress, whole

_PROG = "bench.peers"
_NAMESPACE = "bench-peers"


@dataclass(slots=True)
class Outcome:
    """Of one peer at one workload: its rounds, and bide's beside them."""

    theirs: list[Figures] = field(default_factory=list)
    ours: list[Figures] = field(default_factory=list)
    reason: str = ""
    """The reason that it was not measured."""

    def as_json(self, workload: str) -> dict[str, Any]:
        if self.reason or not self.theirs:  # no figure of a peer that failed once
            return {"not_measured": self.reason or "there was no round"}
        names = list(self.theirs[0])
        return {
            "peer": {name: middle(self.theirs, name) for name in names},
            "bide": {name: middle(self.ours, name) for name in names},
            "ratio": {name: ratio(self.ours, self.theirs, name) for name in COMPARED[workload]},
            "rounds": {"peer": self.theirs, "bide": self.ours},
        }


Outcomes = Mapping[str, Mapping[str, Outcome]]
"""By workload, then by peer."""


def main() -> int:
    """The exit code."""
    parser = parser_of(_PROG, __doc__)
    add = parser.add_argument
    add("peers", nargs="*", metavar="PEER", help=f"of {', '.join(PEERS)}; all of them if none is named")
    add("--workload", action="append", choices=list(WORKLOADS), help="may be given several times; default: all")
    add("--n", type=whole, default=5_000, help="tasks of `schedule` and `burst` (5000)")
    add("--rate", type=whole, default=200, help="lateness: tasks a second (200)")
    add("--seconds", type=whole, default=10, help="lateness: for so long (10)")
    add("--rounds", type=whole, default=3, help="(3)")
    add(
        "--loop", choices=["asyncio", "uvloop"], default="asyncio", help="of bide and of all peers on asyncio (asyncio)"
    )
    add("--venvs", metavar="DIR", type=Path, default=default_place(), help=f"({default_place()})")
    add("--json", action="store_true", help="one JSON object instead of tables")
    options = parser.parse_args()
    if unknown := [name for name in options.peers if name not in PEERS]:
        parser.error(f"{unknown[0]} is not a peer; there are {', '.join(PEERS)}")
    return run(_PROG, _contest(options))


async def _contest(options: argparse.Namespace) -> int:
    names = options.peers or list(PEERS)
    workloads = options.workload or list(WORKLOADS)
    kinds = {PEERS[name].server for name in names}
    with (
        tempfile.TemporaryDirectory(prefix="bide-peers-", ignore_cleanup_errors=True) as directory,
        servers_of(kinds, Path(directory)) as servers,
    ):
        environments, absent = _install(names, options.venvs)
        outcomes = {workload: {name: Outcome(reason=absent.get(name, "")) for name in names} for workload in workloads}
        about = {
            "versions": {"bide": __version__, **{name: PEERS[name].version for name in names}},
            "servers": {kind: server.version for kind, server in servers.items()}, **machine(),
            "loop": options.loop, "n": options.n, "rounds": options.rounds,
        }  # fmt: skip
        try:
            await _rounds(options, servers, Path(directory), environments, outcomes)
        finally:  # also when it is interrupted: what was measured is not thrown away
            measured = {
                workload: {name: outcome.as_json(workload) for name, outcome in by_name.items()}
                for workload, by_name in outcomes.items()
            }
            if options.json:
                sys.stdout.write(json.dumps({**about, "workloads": measured}) + "\n")
            else:
                show(about, measured)
    return 0 if any(outcome.theirs for by_name in outcomes.values() for outcome in by_name.values()) else 1


def _install(names: Sequence[str], place: Path) -> tuple[dict[str, Environment], dict[str, str]]:
    """Environments by name, and why the others are absent."""
    environments: dict[str, Environment] = {BIDE.name: environment_of(BIDE, place)}
    absent: dict[str, str] = {}
    for name in names:
        progress(f"{name}: installing {PEERS[name].version}, unless it is there")
        try:
            environments[name] = environment_of(PEERS[name], place)
        except BenchFault as reason:
            absent[name] = str(reason)
            progress(f"{name}: not measured: {reason}")
    return environments, absent


async def _rounds(
    options: argparse.Namespace,
    servers: Mapping[str, Server],
    directory: Path,
    environments: Mapping[str, Environment],
    outcomes: Outcomes,
) -> None:
    async def play(contestant: Contestant, workload: str, kind: str) -> Figures:
        server = servers[kind]
        run = Run(
            contestant=contestant, environment=environments[contestant.name], server=server, loop=options.loop,
            url=f"{server.url}?namespace={_NAMESPACE}" if contestant is BIDE and kind == "redis" else server.url,
            directory=directory, count=options.n, rate=options.rate, seconds=options.seconds,
        )  # fmt: skip
        figures = await WORKLOADS[workload](run)
        progress(f"{workload}: {contestant.name}: {', '.join(f'{key} {value}' for key, value in figures.items())}")
        return figures

    for workload, by_name in outcomes.items():
        for number in range(1 if workload == "crash" else options.rounds):
            for name, outcome in by_name.items():
                if outcome.reason:
                    continue
                try:
                    theirs = await play(PEERS[name], workload, PEERS[name].server)
                except BenchFault as reason:
                    outcome.reason = str(reason)
                    progress(f"{workload}: {name}: round {number + 1}: not measured: {reason}")
                    continue
                outcome.ours.append(await play(BIDE, workload, PEERS[name].server))
                outcome.theirs.append(theirs)


if __name__ == "__main__":
    sys.exit(main())
