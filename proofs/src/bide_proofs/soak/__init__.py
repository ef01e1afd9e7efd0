"""Run a store for a long time at half of its maximum load, and check that nothing grows or is left behind.

    python -m bide_proofs.soak redis://127.0.0.1:6379/0 --minutes 60 --results docs/reliability/soak.jsonl

There is one client process (this one) and worker processes, with the shipped defaults. First the maximum is measured
for some seconds: the same load, as fast as possible. Then the client asks for half of it, or for `--rate`. `load`
defines the load: tasks due soon and far off, moves, fires, cancels at any moment, shifts and cancels of groups,
redrives. Handlers fail, defer and die, and one kind runs in threads. Every few seconds a sample is taken of memory,
open files, threads and Python objects of each process, of memory, files, rows and dead rows of the server and the
store, and of the lateness. The event log is filled to its cap first, so that it does not grow during the run.

In the end far-off tasks are cancelled, due tasks are done, and ended tasks are forgotten, in long runs by the workers'
own purge. Then the remains in the store are counted.

The exit code is 1 if anything was
- lost, or ended twice: the lives begun according to answers must be the lives settled as ended, or cancelled; their
  numbers and the checksums of their ids are compared
- early: begun before its planned time, by the clock of this machine
- left: alive when there had been time to end it, or still in the store after retention and purge (P10; see `remains`)
- failed: a call that raised, a worker that ended; nothing is broken here
- or if anything grows: `measure` defines that, and how much is allowed. A run of less than five minutes is still
  warming up, so its slopes are reported and do not count.

P2 allows redelivery (after a pause of this machine that was longer than a lease); it is reported.

With `--service` the client and the workers reach the store through a `bide serve`, whose memory is measured too.

Run it on a quiet machine, and against a server that has nothing else to do. It works in its own namespace or schema,
which it removes. With `--leak BYTES` the workers' handlers keep that many bytes of each task, which must be found.
"""
