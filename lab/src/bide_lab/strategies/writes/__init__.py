"""Two writes.

A row is written in one place and its timer in another. Between the two writes the process may die; what differs is who
notices.
"""
