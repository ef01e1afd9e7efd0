"""Timers in one process.

A data structure in the memory of one process knows what is next. Nothing is as quick, and nothing of it is left when
the process ends.
"""
