"""Processes against a real store under real faults, judged by the checker of histories.

    python -m bide_proofs.torture URL --seconds 60
    python -m bide_proofs.torture --server redis --seconds 600 --results FILE
    python -m bide_proofs.torture redis://127.0.0.1:6379/0 --seconds 120 --rate 500 --only "kill -9 of a worker"

`server` is the interface to the store under torture. `plain` has a SQLite file and a server that runs already;
`servers/` has private servers, which may be killed, promoted, filled up and given another time.
`bide.testing.history.check` is the judge. If workers are killed and nothing else is broken, no call of a client may
fail either.
"""
