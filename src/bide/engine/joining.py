"""Which transaction the verbs of this coroutine take part in, if any.

A verb awaited inside `task.transaction()` or `app.using(connection)` must go through that very connection: through the
store's own it would wait for a lock that its caller holds, for ever. So the open transaction travels in the context.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from bide.ports import Joined, Store

_joined: ContextVar[tuple[Store, Joined] | None] = ContextVar("bide_joined", default=None)


def joined_to(store: Store) -> Joined | None:
    """The open transaction on `store` that this coroutine is inside of."""
    found = _joined.get()
    return found[1] if found is not None and found[0] is store else None


@contextmanager
def joining(store: Store, joined: Joined) -> Iterator[None]:
    """Within this block the verbs of this coroutine take part in `joined`."""
    mark = _joined.set((store, joined))
    try:
        yield
    finally:
        _joined.reset(mark)
