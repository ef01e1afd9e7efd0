"""Held in memory.

A worker fetches a task at once and holds it, unacknowledged, until its time. The broker takes that for a worker that is
slow, and after a while for one that is dead.
"""
