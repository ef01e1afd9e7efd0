"""The shipped suites live outside the tests, and their assertions are to be explained all the same."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("bide.testing.store_suite", "bide.testing.store_machine")
