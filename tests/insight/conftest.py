"""Fixtures of the tests of the read model: those of the engine."""

from tests.engine.conftest import store_url

__all__ = ["store_url"]
