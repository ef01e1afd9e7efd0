"""Evidence that bide keeps its promises: simulation, a model, real processes and servers under real faults.

It may import all of bide, and nothing of bide imports it. Each proof is a package with a command of its own:
`python -m bide_proofs.simulate --help`. What happened is judged by `bide.testing.history`, which ships with bide.
"""
