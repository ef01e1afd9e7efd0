"""The history of a store as clients and workers saw it, and the check of its promises: see `events` and `check`.

`python -m bide.testing.history` checks the journals of processes.
"""
