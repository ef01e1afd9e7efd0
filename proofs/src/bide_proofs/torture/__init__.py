"""Processes against a real store under real faults, and what the checker of histories says to it.

    python -m bide_proofs.torture URL --seconds 60
    python -m bide_proofs.torture --server redis --seconds 600 --results FILE

`server` is the seam to what is tortured; `plain` are a file of SQLite, and a server of somebody's own; `servers/` are
private ones, which may be killed, promoted, filled and told another time.
"""
