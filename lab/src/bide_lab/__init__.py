"""The lab: every classic way of doing something later, built as its users build it, and measured on the same workloads.

A *strategy* is a class in `strategies/`: it schedules, perhaps moves and cancels, and fires. A *workload* is a function
in `workloads/`: what is asked of a strategy, and what is done to it meanwhile. A *cell* is one strategy under one
workload, played by processes of its own (`processes`), which write down what they were asked and what they did
(`journal`); the judge reads that and nothing else. What comes out is a line of the results file, from which the report
is drawn.

Nothing of bide imports the lab: `bide lab` finds it by an entry point.
"""
