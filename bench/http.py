"""The service measured: `bide serve` in a process of its own, clients and receivers in others, all on this machine.

    python bench/http.py                                     all workloads, a SQLite file of its own
    python bench/http.py redis://127.0.0.1:6379/0            on Redis, in a namespace of its own
    python bench/http.py --only single --only batch --seconds 30 --rounds 3
    python bench/http.py > http.jsonl                        one line of JSON a figure; the table goes to stderr

Workloads, each on a service and an empty store of its own:

    single      a PUT a task by wrk, 64 connections, fresh keys, due in an hour; only 201 counts
    batch       POST /v1/schedule by wrk, 4 connections, batches of 500 fresh keys; only `created` counts
    long_poll   200 tasks a second, due a second ahead, to a client with eight long-polls that settles them; when the
                answer was read, less the time that the task was due at
    idle_polls  1,000 long-polls of 60 s that find nothing, renewed for ever; the processor time of the service, in
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

import sys

if __name__ == "__main__":
    # in the place of this folder, in which this file would be found as the standard library's `http`
    sys.path[0] = __file__.rpartition("bench")[0] or "."
    from bench.http_command import main

    sys.exit(main(__doc__))
