"""Processes against a real store under real faults, and what the checker of histories says to it.

    python -m bide_proofs.torture URL --seconds 60
    python -m bide_proofs.torture --server redis --seconds 600 --results FILE
    python -m bide_proofs.torture redis://127.0.0.1:6379/0 --seconds 120 --rate 500 --only "kill -9 of a worker"

`server` is the seam to what is tortured; `plain` are a file of SQLite, and a server that runs already; `servers/` are
private ones, which may be killed, promoted, filled and told another time. `bide.testing.history.check` is the judge.
Where workers are killed and nothing else is broken, no call of a client may fail either.
"""
