"""`bide bench`: measures this machine, checks its own results, and cleans up after itself."""
