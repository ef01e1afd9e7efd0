"""Works a store for a long time at half of what it can do, and measures whether anything grows or is left behind.

    python -m bide_proofs.soak redis://127.0.0.1:6379/0 --minutes 60 --results docs/reliability/soak.jsonl

One client process (this one) and worker processes, with the shipped defaults. First the maximum is measured for some
seconds: the same load, as fast as it is done. Then half of it is asked for, or `--rate`. What is asked for is in
`load`: tasks due soon and far off, moves, fires, cancels at any moment, shifts and cancels of groups, redrives; and
handlers fail, defer, die, and one kind runs in threads. Every few seconds it is sampled what each process has of
memory, open files, threads and Python's objects, what the server and the store have of memory, files, rows and dead
rows, and how late that interval was. The event log is filled to its cap first, so that it does not grow meanwhile.

Everything has an end: what is far off is cancelled, what is due is done, and what is remembered is forgotten, in long
runs by the workers' own sweepers. Then it is counted what is left in the store.

The exit code is 1 if anything was
- lost, or ended twice: the lives that answers say were begun are those that were settled as ended, or cancelled, by
  number and by the checksum of their ids
- early: begun before it was planned, by the clock of this machine
- left: alive when there had been time to end it, or still in the store after retention and purge (P10; see `remains`)
- failed: a call that raised, a worker that ended; nothing is broken here
- or if anything grows: see `slopes` for what that means, and how much is allowed. A run of less than five minutes
  still warms up, so its slopes are reported and do not count.

Redelivery (after a pause of this machine that was longer than a lease) is allowed by P2, and reported.

With `--service` the client and the workers reach the store through a `bide serve`, whose memory is measured too.

Run it on a quiet machine, and against a server that has nothing else to do; it works in a namespace or schema of its
own, which is removed. `--leak BYTES` lets the workers' handlers keep so much of each task to the end: it must be found.
"""
