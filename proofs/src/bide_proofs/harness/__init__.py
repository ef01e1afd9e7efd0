"""The common base of all proofs with real processes.

`processes` starts, kills, halts and replaces the processes of a run, and has their side of it; `command` is the frame
of the command line: options, report and exit code, and what is asked of any store before and after a run.
"""
