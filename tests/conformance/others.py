"""The rules of the store suite in two parts: the cells take as long as all others together."""

from __future__ import annotations

from bide.testing.store_suite import StoreSuite
from bide.testing.store_suite.calls import Batches, EveryCell, Fairness, Holding, Leasing, OddInput, Racing, Tokens
from bide.testing.store_suite.capabilities import Announcing, Joining, Listening, Opening, Remembering, Retention
from bide.testing.store_suite.finding import Counting, Finding


class Others(
    Leasing, Fairness, Holding, Tokens, Retention, Finding, Counting, Batches, OddInput, Racing, Opening, Joining,
    Listening, Announcing, Remembering,
):  # fmt: skip
    """All rules but those of `EveryCell`."""


assert {EveryCell, *Others.__bases__} == {*StoreSuite.__bases__}
