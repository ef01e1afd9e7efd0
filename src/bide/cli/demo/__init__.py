"""`bide demo`: a small town's traffic in real time, for the console to show, for as long as it runs.

Read a story first (in `orders`, `payments`, `ahead`): each declares handlers as any app does, and plays the
people who schedule, cancel and change their minds. `story` is what they have in common, and `town` runs them all.
"""
