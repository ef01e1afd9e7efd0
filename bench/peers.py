"""bide beside other task queues, on the same server, in turns: the ratios, not the figures, are what to quote.

    python bench/peers.py                                    all peers, all workloads, three rounds
    python bench/peers.py docket arq --workload burst --n 20000 --rounds 5
    python bench/peers.py --json > peers.json

    python bench/peers.py graphile procrastinate             those on PostgreSQL

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
               worker's tasks come back after bide's default of 10 seconds, for everybody who lets that be set

In every round each peer's run is followed by one of bide, on an emptied server; a ratio is bide / peer of such a pair,
and what is printed is the median over the rounds. For rates more is better, for milliseconds less. Every task carries
100 bytes, and every handler writes one line to a log in its first step; a thousand tasks are scheduled and done before
each run, so that nobody starts cold. All of it takes some 35 minutes. Each library has the settings that its
documentation gives for throughput and punctuality; the modules in `bench/contest/` say which, and why. Run it on a
machine that does nothing else: with two cores, a worker, a scheduling process and Redis share them already.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from bench.contest.command import main

    sys.exit(main(__doc__))
