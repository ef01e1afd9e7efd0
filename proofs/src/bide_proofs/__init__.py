"""Evidence that bide keeps its promises: simulation, a model, real processes and servers under real faults.

This package may import all of bide, and bide imports nothing from it. Each proof is a package with its own command:
`python -m bide_proofs.simulate --help`. The judge is `bide.testing.history`, which ships with bide.
"""
