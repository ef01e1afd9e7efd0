"""Shipped for users and store authors: the suites, a manual clock, virtual time, faults, the pytest plugin."""
