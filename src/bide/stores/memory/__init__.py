"""Tasks in the memory of one process, over any timer: the reference that every other store is compared with."""

from bide.stores.memory.store import MemoryStore

__all__ = ["MemoryStore"]
