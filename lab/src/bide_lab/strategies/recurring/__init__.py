"""Recurring work.

Nothing is scheduled one by one: a rule says when a run is due, again and again. What differs is who computes the next
instant, from what, and who knows of a run that was begun.
"""
