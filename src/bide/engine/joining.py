"""Which transaction the verbs of this coroutine take part in, if any.

A verb awaited inside `task.transaction()` or `app.using(connection)` must go through that very connection: through the
store's own it would wait for a lock that its caller holds, for ever. So the open transaction travels in the context.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from bide.core.errors import HAS_TO_BE_AWAITED, SetupError
from bide.ports import Joined, Store

T = TypeVar("T")
_joined: ContextVar[tuple[Store, Joined, bool] | None] = ContextVar("bide_joined", default=None)


def joined_to(store: Store) -> Joined | None:
    """The open transaction on `store` that this coroutine is inside of."""
    found = _joined.get()
    return found[1] if found is not None and found[0] is store else None


def stays_here(store: Store) -> bool:
    """Whether that transaction is on a connection which belongs to this thread, as synchronous ones do."""
    found = _joined.get()
    return found is not None and found[0] is store and found[2]


@contextmanager
def joining(store: Store, joined: Joined, *, here: bool = False) -> Iterator[None]:
    """Within this block the verbs of this coroutine take part in `joined`; `here`: in this very thread."""
    mark = _joined.set((store, joined, here))
    try:
        yield
    finally:
        _joined.reset(mark)


def run_here(verb: Coroutine[Any, Any, T]) -> T:
    """Run to its end a verb on a connection that never lets go of the thread. Raises SetupError if it does."""
    try:
        verb.send(None)
    except StopIteration as ended:
        answer: T = ended.value
        return answer
    verb.close()
    raise SetupError(HAS_TO_BE_AWAITED)
