"""The shipped suites live outside the tests, and their assertions are to be explained all the same."""

from __future__ import annotations

import os

import pytest

pytest.register_assert_rewrite("bide.testing.store_suite", "bide.testing.store_machine")

from bide.testing.store_suite import StoreSuite  # noqa: E402 - once its assertions are rewritten

StoreSuite.races = int(os.environ.get("RACES", "100"))
"""A tenth of what the suite plays by itself; `make proofs-long` plays all."""
