"""Simulate bide: real clients and workers on one event loop in virtual time, with every kind of fault.

    python -m bide_proofs.simulate --hours 1000 --state done.jsonl      continue an earlier run
    python -m bide_proofs.simulate --seed 4711 --seeds 1                play one seed again
    python -m bide_proofs.simulate --mutant keep-replaces               as if bide were broken in this way

`plan` draws all calls and faults from a seed, and `world` plays them: its processes, each an app of bide, run on `loop`
and reach a store of several shards (`server`) over a network that loses, duplicates and delays messages (`link`).
`judge` decides by the history and by facts that only such a world can see; it also reduces a failing plan to the few
steps that matter and tells its story. `mutants` are defects that the judge has to find. A seed always plays the same.
"""
