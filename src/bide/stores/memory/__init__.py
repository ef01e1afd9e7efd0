"""Tasks in the memory of one process, on any timer: the reference that every other store is compared with."""

from bide.stores.memory.store import MemoryStore

__all__ = ["MemoryStore"]
