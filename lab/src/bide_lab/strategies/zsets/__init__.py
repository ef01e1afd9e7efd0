"""Sorted sets.

Redis keeps ids ordered by their times, so that asking for what is due is cheap. What differs is who asks, and in which
order a task is taken out and done: that decides whether one is lost or done twice.
"""
