"""The command: who plays, in which order, and how the outcome is shown."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import command
from bench.command import say, whole
from bench.contest.contestants import BIDE, PEERS, Contestant, Environment, default_place, environment_of
from bench.contest.report import Figures, middle, ratio, show
from bench.contest.servers import Server, servers_of
from bench.contest.stage import Run
from bench.contest.workloads import COMPARED, WORKLOADS

from bide._version import __version__
from bide.cli.bench.plan import machine
from bide.cli.bench.processes import BenchFault

_PROG = "bench/peers.py"
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


def parser(about: str | None) -> argparse.ArgumentParser:
    made = command.parser(_PROG, about)
    add = made.add_argument
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
    return made


def main(about: str | None) -> int:
    """Run it; the exit code."""
    given = parser(about)
    options = given.parse_args()
    unknown = [name for name in options.peers if name not in PEERS]
    if unknown:
        given.error(f"{unknown[0]} is not a peer; there are {', '.join(PEERS)}")
    return command.run(_PROG, _contest(options))


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
        say(f"{name}: installing {PEERS[name].version}, unless it is there")
        try:
            environments[name] = environment_of(PEERS[name], place)
        except BenchFault as reason:
            absent[name] = str(reason)
            say(f"{name}: not measured: {reason}")
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
        say(f"{workload}: {contestant.name}: {', '.join(f'{key} {value}' for key, value in figures.items())}")
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
                    say(f"{workload}: {name}: round {number + 1}: not measured: {reason}")
                    continue
                outcome.ours.append(await play(BIDE, workload, PEERS[name].server))
                outcome.theirs.append(theirs)
