"""The service measured: `bide serve` in a process of its own, clients and receivers in others, all on this machine.

    python -m bench.http                                     all workloads, a SQLite file of its own
    python -m bench.http redis://127.0.0.1:6379/0            on Redis, in a namespace of its own
    python -m bench.http --only single --only batch --seconds 30 --rounds 3
    python -m bench.http > http.jsonl                        one line of JSON a figure; the table goes to stderr

Workloads, each on a service and an empty store of its own:

    single      a PUT a task by wrk, 64 connections, fresh keys, due in an hour; only 201 counts
    batch       POST /v1/schedule by wrk, 4 connections, batches of 500 fresh keys; only `created` counts
    long_poll   200 tasks a second, due a second ahead, to a client with eight long-polls that settles them; when the
                answer was read, less the time that the task was due at
    idle_polls  1,000 long-polls of 60 s that find nothing, renewed without end; the processor time of the service, in
                percent of one core, and the same before they were there
    webhooks    20,000 tasks due at one instant, signed, to a receiver that answers 204 at once; deliveries a second
                from that instant to the last one
    webhooks_stall
                the same, but the receiver stands still once, for half a second, after a fifth of them
    hanging     200 tasks a second each to two receivers; the lateness at the first, while the second answers (without),
                and while it takes 30 s for every answer (with)
    console     a million tasks of ten topics wait, 41,000 of them for one second: the time from the request of each
                page to its last byte, of ten; the processor time of the service for an open overview, which asks for
                what is new every two seconds

Everything is as it ships: no token, one process, `--webhook` defaults, 100 bytes of payload. Whatever was refused, was
acknowledged and is not in the store, never came, or came twice, is shown as a fault, and the figures of that run do not
count. The exit code is 1 if there was one, or a bar was not met. `wrk` and Linux are needed; the receivers, the clients
and the server of the store share the processors with the service, so run it on a machine that does nothing else.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
from pathlib import Path

from bench.command import FAULTS, Found, run, show_table
from bench.http_workloads import WORKLOADS, Plan

from bide_bench.plan import machine
from bide_proofs.harness.command import parser_of, positive, progress, whole

_PROG = "bench.http"


def main() -> int:
    """The exit code: 1 if a figure may not be believed or a bar is not met."""
    parser = parser_of(_PROG, __doc__)
    add = parser.add_argument
    add("store", nargs="?", default="sqlite:", metavar="STORE_URL",
        help="sqlite: (a file of its own), redis://host:port/0 (a namespace of its own), ...; (sqlite:)")  # fmt: skip
    add("--only", action="append", choices=list(WORKLOADS), help="may be given several times; default: all")
    add("--seconds", type=positive, default=20, help="for so long, each but webhooks (20)")
    add("--rate", type=positive, default=200, help="long_poll, hanging: tasks a second (200)")
    add("--n", type=whole, default=20_000, help="webhooks: tasks (20000)")
    add("--polls", type=whole, default=1_000, help="idle_polls: long-polls (1000)")
    add("--tasks", type=whole, default=1_000_000, help="console: so many wait (1000000)")
    add("--rounds", type=whole, default=1, help="each workload so often, in turns (1)")
    add("--uvloop", action="store_true", help="the service runs on uvloop")
    return run(_PROG, _measure(parser.parse_args(namespace=Plan())))


async def _measure(plan: Plan) -> int:
    _raise_open_files()
    good, rows = True, []
    with tempfile.TemporaryDirectory(prefix="bide-http-", ignore_cleanup_errors=True) as folder:
        plan.folder = Path(folder)
        for number in range(plan.rounds):
            for name in plan.only or list(WORKLOADS):
                progress(f"{name}: round {number + 1} of {plan.rounds}")
                try:
                    found = await WORKLOADS[name](plan)
                except FAULTS as fault:
                    found = Found(faults=[f"not measured: {fault}"])
                for text in found.faults:
                    progress(f"{_PROG}: {name}: {text}")
                for figure in found.figures:
                    line = {
                        "workload": name, "figure": figure.name, "value": figure.value,
                        **({"bar": figure.bar, "met": figure.met} if figure.bar else {}), "faults": found.faults,
                        "round": number + 1, "store": plan.store.partition(":")[0], "seconds": plan.seconds,
                        "loop": "uvloop" if plan.uvloop else "asyncio", **machine(),
                    }  # fmt: skip
                    sys.stdout.write(json.dumps(line) + "\n")
                    sys.stdout.flush()
                    verdict = "faults" if found.faults else ("met" if figure.met else "not met") if figure.bar else ""
                    rows.append((name, figure.name, figure.shown, figure.bar, verdict))
                good = good and found.good
    show_table("bide serve", ("workload", "figure", "value", "bar", ""), rows, right=("value",))
    return 0 if good else 1


def _raise_open_files() -> None:
    """As many open files as are allowed: a thousand connections need more than what is usual."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


if __name__ == "__main__":
    sys.exit(main())
