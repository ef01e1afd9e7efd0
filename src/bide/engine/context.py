"""The context of a verb: its caller, the open transaction that it takes part in, and the delivery whose trace it
carries on.

A service has one client and many callers. So the caller travels in the context: no verb needs a parameter for it, and
every way to the store notes it.

A verb awaited inside `task.transaction()` or `app.using(connection)` must go through that very connection: through the
store's own it would wait for a lock that its caller holds, for ever. So the open transaction travels in the context.

A task made within such a block inherits its context, and may outlive the block. The connection is then in another
transaction or in none, so the verbs of such a task are refused: a rollback of another transaction would undo them.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeAlias, TypeVar

from bide.core.answers import Answer
from bide.core.errors import HAS_TO_BE_AWAITED, SetupError
from bide.core.options import carried_trace
from bide.core.records import Record
from bide.ports import Joined, Store

T = TypeVar("T")

# --- the caller

OnChange: TypeAlias = Callable[[str, Sequence[Answer], str], None]
"""Called on the event loop with a verb, its answers and the caller's name, before these are returned. Must not
raise.
"""


class Caller(NamedTuple):
    """The caller of the verbs in a context."""

    who: str
    on_change: OnChange | None


_caller: ContextVar[Caller | None] = ContextVar("bide_acting", default=None)


def current_caller() -> Caller | None:
    """The caller that this coroutine acts for; None: the client's own actor."""
    return _caller.get()


@contextmanager
def acting_as(who: str, on_change: OnChange | None = None) -> Iterator[None]:
    """Within this block the verbs are `who`'s, in the event log and for `on_change`.

    `on_change` is called with every answer of every verb that changes. Of schedules the event log notes only those that
    replaced something: thousands of new tasks a second would push all else out of it. A verb that has been sent runs to
    its end although its caller is cancelled, so that hanging up hides no change.
    """
    mark = _caller.set(Caller(who, on_change))
    try:
        yield
    finally:
        _caller.reset(mark)


# --- the open transaction, and the delivery


class _Block:
    """One block around verbs, on the connection of `joined`; `outer` is the block around this one."""

    __slots__ = ("here", "joined", "outer", "over", "store")

    def __init__(self, store: Store, joined: Joined, here: bool, outer: _Block | None) -> None:
        self.store, self.joined, self.here, self.outer = store, joined, here, outer
        self.over = False


_innermost: ContextVar[_Block | None] = ContextVar("bide_joined", default=None)
_running: ContextVar[Record | None] = ContextVar("bide_running", default=None)

set_running = _running.set


def inherited_headers() -> Mapping[str, str] | None:
    """The trace headers of the task whose delivery runs in this context; None: there are none."""
    record = _running.get()
    return None if record is None or not record.options else carried_trace(record.options) or None


def _block_on(store: Store) -> _Block | None:
    """The innermost block on `store` around this coroutine, or around the place where its task was made."""
    block = _innermost.get()
    while block is not None and block.store is not store:
        block = block.outer
    return block


def joined_to(store: Store) -> Joined | None:
    """The open transaction on `store` around this coroutine. Raises SetupError where it is over."""
    block = None if _innermost.get() is None else _block_on(store)
    if block is None:
        return None
    if block.over:
        raise SetupError(
            "the transaction is over in which this task was created: await the task within the block, or create it "
            "outside, or with create_task(..., context=contextvars.Context())"
        )
    return block.joined


def on_this_thread(store: Store) -> bool:
    """True if that transaction is on a connection which belongs to this thread, as synchronous ones do."""
    block = _block_on(store)
    return block is not None and block.here and not block.over


def enter(store: Store, joined: Joined, *, here: bool = False) -> None:
    """From now on the verbs of this context take part in `joined`; `here`: its connection belongs to this thread."""
    _innermost.set(_Block(store, joined, here, _innermost.get()))


def leave(joined: Joined) -> None:
    """End what `enter` began. Raises SetupError where `joined` is not what was entered last in this context."""
    block = _innermost.get()
    if block is None or block.joined is not joined:
        raise SetupError("a block of app.using(connection) is left in another context or order than it was entered")
    block.over = True
    _innermost.set(block.outer)


@contextmanager
def joining(store: Store, joined: Joined) -> Iterator[None]:
    """Within this block the verbs of this coroutine take part in `joined`."""
    enter(store, joined)
    try:
        yield
    finally:
        leave(joined)


def run_on_this_thread(verb: Coroutine[Any, Any, T]) -> T:
    """Run a verb on a synchronous connection to its end, without an event loop. Raises SetupError if it suspends."""
    try:
        verb.send(None)
    except StopIteration as ended:
        answer: T = ended.value
        return answer
    verb.close()
    raise SetupError(HAS_TO_BE_AWAITED)
