"""Simulates bide: real clients and workers on one event loop in virtual time, and everything that can break does.

    python -m bide_proofs.simulate --hours 1000 --state done.jsonl      go on where it was left
    python -m bide_proofs.simulate --seed 4711 --seeds 1                play one seed again
    python -m bide_proofs.simulate --mutant keep-replaces               as if bide were broken in this way

`plan` draws from a seed who asks for what and what breaks, and `world` plays it: its processes, each an app of bide,
run on `loop` and reach a store of several shards (`server`) over a network that loses, doubles and delays (`link`).
`judge` decides by the history and by what only such a world can see; `story` cuts a plan that went wrong down to the
few steps that matter, and tells what happened; `mutants` are what the judge has to find. A seed plays the same each
time.
"""
