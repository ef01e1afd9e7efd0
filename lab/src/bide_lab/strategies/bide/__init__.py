"""bide.

One index of wake times and leases, on the store that is there.
"""
