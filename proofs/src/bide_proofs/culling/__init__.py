"""Kills workers that share a store, one after another, under load, and checks what the store had promised.

    python -m bide_proofs.culling redis://127.0.0.1:6379/0 --seconds 120 --rate 2000 --every 2 --workers 2

One process schedules, moves and cancels, from many coroutines; worker processes deliver, and one of them at a time dies
by SIGKILL and is replaced. Each says in a log of its own what it did: a caller what it asks before it asks and each
answer *after* it came, a worker each delivery in its handler's first line and each outcome after the store took it.
Then killing ends, and once nothing waits any more the logs are read. Wrong is

- lost: acknowledged as scheduled, never delivered, and not cancelled (P2)
- early: begun before it was planned, or planned before the time that was last acknowledged (P1, P5)
- fired_after_cancel: begun after the answer `cancelled`, or leased after either answer of a cancel (P4)
- changed_while_held: `moved` or `cancelled` was the answer for a task that had been leased (P4)
- fired_after_settle, settled_twice: after its end was acknowledged (P2, P3)
- redelivered_unkilled: begun again within a lease, though nobody had killed who had it before (P3)
- not_rising: begun again without a higher token and a later attempt (P12); strange_id: a life that nobody asked for
- left: still in the store at the end (P10)
- not_done, failed_call, worker_ended: no handler fails here and only workers are killed, so everything else succeeds

To be delivered again after a kill is allowed (P2); that is counted apart, as `redelivered`. So is what comes back a
lease later since its holder stood still for as long, as `leases_lost_alive`: on a quiet machine nothing does.

"Leased after" goes by tokens, which rise with every change of a key, so no clock is trusted for it. "Within a lease"
goes by the store's clock, which tokens tell in microseconds. Starts are compared with answers, and with the store's
times, by the wall clock: run it on the machine that the store is on.
"""
