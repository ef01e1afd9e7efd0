"""A small model of bide, checked exhaustively: see `explore`, and docs/correctness.md.

    python -m bide_proofs.model

Two workers, two clients, one task, a store, messages that are lost, late or sent twice, wake-ups that are lost, and
workers that are killed at any step: in every order. It shares no code with bide.
"""

from bide_proofs.model.explore import INVARIANTS, Explorer, Found
from bide_proofs.model.store import MORE_VERBS, VERBS, Bounds, Rules, Verb

__all__ = ["INVARIANTS", "MORE_VERBS", "VERBS", "Bounds", "Explorer", "Found", "Rules", "Verb"]
