"""The store of another process, over HTTP: bide's own service."""

from bide.stores.http.store import HttpStore

__all__ = ["HttpStore"]
