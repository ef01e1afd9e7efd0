"""The history of a store as clients and workers saw it, and the check of its promises: see `events` and `check`.

    python -m bide.testing.history FILE...

reads the journals of the processes that worked on one store. It prints each broken promise with the events that show
it, and exits 1 if there is any.
"""
