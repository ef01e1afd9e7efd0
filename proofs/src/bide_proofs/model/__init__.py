"""A small model of bide, checked exhaustively: see `explore`, and docs/correctness.md.

    python -m bide_proofs.model

Two workers, two clients, one task and a store, in every order of their steps. Messages are lost, delayed or sent twice,
notifications are lost, and workers are killed at any step. The model shares no code with bide.
"""

from bide_proofs.model.explore import INVARIANTS, Explorer, Found
from bide_proofs.model.store import MORE_VERBS, VERBS, Bounds, Rules, Verb

__all__ = ["INVARIANTS", "MORE_VERBS", "VERBS", "Bounds", "Explorer", "Found", "Rules", "Verb"]
