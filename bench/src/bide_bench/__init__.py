"""`bide bench`: measures this machine, checks its own results, and cleans up after itself.

`command` runs a workload of `verbs`, `deliver`, `pending`, `shapes` or `timers` against a store (`target`), as `plan`
says. `workers` starts the processes that deliver (`worker`, by `processes`), and examines what they wrote down. The lab
and the proofs use these parts too.
"""
