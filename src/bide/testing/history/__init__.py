"""What happened, as clients and workers saw it, and whether bide may have done so: see `events` and `check`.

    python -m bide.testing.history FILE...

reads the journals of the processes that worked on one store, says which promise was broken by which events, and exits 1
if any was.
"""
