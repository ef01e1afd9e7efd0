"""`bide demo`: the live traffic of a small town, for the console to show.

Begin with a story (in `orders` or `ahead`): each declares handlers as any app does, and plays the people who schedule,
cancel and change their minds. `story` is their common base, and `town` runs all of them.
"""
