"""The common base of all proofs with real processes.

`processes` starts, kills, halts and replaces the processes of a run, and contains the child's side of the protocol.
`command` is the frame of the command line: options, report and exit code, and queries to any store before and after a
run.
"""
