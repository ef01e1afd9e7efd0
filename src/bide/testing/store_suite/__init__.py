"""The contract of a store, as tests: an object that passes all of them is a store.

Bind it to a store of your own (with pytest and pytest-asyncio installed):

    class TestMyStore(StoreSuite):
        durable = True

        async def make_store(self, tmp_path):
            return MyStore(tmp_path / "tasks")

The name of each test is a rule; its class names the promise (P1 to P12 of docs/correctness.md) that the rule serves.
Tests of optional capabilities are skipped for stores without them. No test sleeps: time is an argument of every call.
"""

from __future__ import annotations

from bide.testing.store_suite.calls import Batches, EveryCell, Fairness, Holding, Leasing, OddInput, Racing, Tokens
from bide.testing.store_suite.capabilities import Announcing, Joining, Listening, Opening, Remembering, Retention
from bide.testing.store_suite.finding import Counting, Finding

__all__ = ["StoreSuite"]


class StoreSuite(
    EveryCell, Leasing, Fairness, Holding, Tokens, Retention, Finding, Counting, Batches, OddInput, Racing, Opening,
    Joining, Listening, Announcing, Remembering,
):  # fmt: skip
    """All rules that a store must keep."""
