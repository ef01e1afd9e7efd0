"""For whom the verbs of this context are called: somebody else than the client's own `actor`, for one call.

A service has one client and many callers. Who calls travels in the context, as an open transaction does, so that no
verb needs a parameter for it, and no way to the store goes past it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeAlias, TypeVar

from bide.core.answers import Answer

T = TypeVar("T")
Told: TypeAlias = Callable[[str, Sequence[Answer], str], None]
"""Called on the event loop with a verb, its answers and who called it, before the caller has them. Must not raise."""


class Acting(NamedTuple):
    """The caller, and the function that is told of their changes."""

    who: str
    told: Told | None


_acting: ContextVar[Acting | None] = ContextVar("bide_acting", default=None)


def acting() -> Acting | None:
    """For whom this coroutine calls; None: for the client's own actor."""
    return _acting.get()


@contextmanager
def acting_as(who: str, told: Told | None = None) -> Iterator[None]:
    """Within this block the verbs are `who`'s, in the event log and for `told`.

    `told` hears every answer of every verb that changes. Of the schedules in the event log only those are noted that
    replaced something: thousands of new tasks a second would push all else out of it. A verb that has been sent runs to
    its end although its caller is cancelled, so that nobody changes anything unheard by hanging up.
    """
    mark = _acting.set(Acting(who, told))
    try:
        yield
    finally:
        _acting.reset(mark)


async def to_the_end(verb: Coroutine[Any, Any, T]) -> T:
    """Await `verb`. It runs to its end, in this context, although the caller is cancelled meanwhile."""
    return await asyncio.shield(asyncio.get_running_loop().create_task(verb))
