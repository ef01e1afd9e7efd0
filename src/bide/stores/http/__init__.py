"""The store of another process, reached over HTTP through bide's service."""

from bide.stores.http.store import HttpStore

__all__ = ["HttpStore"]
