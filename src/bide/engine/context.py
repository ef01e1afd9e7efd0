"""The context of a verb: its caller, the open transaction it joins, and the delivery whose trace it continues.

A service has one client and many callers, so the caller travels in the context. No verb needs a parameter for it, and
every path to the store records it.

A verb awaited inside `task.transaction()` or `app.using(connection)` must use that same connection. On the store's own
connection it would deadlock on a lock that its caller holds. So the open transaction travels in the context too.

An asyncio task created inside such a block inherits its context and may outlive the block. By then the connection is
in another transaction or in none, so the verbs of that task are refused: a rollback elsewhere would undo them.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeAlias, TypeVar

from msgspec import Struct

from bide.core.answers import Answer
from bide.core.errors import HAS_TO_BE_AWAITED, SetupError
from bide.core.options import carried_trace
from bide.core.records import Record
from bide.ports import Joined, Store

T = TypeVar("T")

# --- the caller

OnChange: TypeAlias = Callable[[str, Sequence[Answer], str], None]
"""Called on the event loop with a verb, its answers and the caller, before the answers are returned. Must not raise."""


class Caller(NamedTuple):
    """The caller of the verbs in a context."""

    who: str
    on_change: OnChange | None


_caller: ContextVar[Caller | None] = ContextVar("bide_acting", default=None)


def current_caller() -> Caller | None:
    """The caller for which this coroutine acts; None: the client's own actor."""
    return _caller.get()


@contextmanager
def acting_as(who: str, on_change: OnChange | None = None) -> Iterator[None]:
    """Attribute the verbs in this block to `who`, in the event log and for `on_change`.

    `on_change` is called with every answer of every verb that makes changes. The event log records a schedule only if
    it replaced a task: thousands of new tasks a second would push everything else out of it. Once sent, a verb runs to
    its end even if its caller is cancelled, so that a disconnect hides no change.
    """
    mark = _caller.set(Caller(who, on_change))
    try:
        yield
    finally:
        _caller.reset(mark)


# --- the open transaction, and the delivery


class _Block(Struct, eq=False):
    """One block of verbs on the connection of `joined`; `outer` is the enclosing block."""

    store: Store
    joined: Joined
    here: bool
    outer: _Block | None
    over: bool = False


_innermost: ContextVar[_Block | None] = ContextVar("bide_joined", default=None)
_running: ContextVar[Record | None] = ContextVar("bide_running", default=None)

set_running = _running.set


def inherited_headers() -> Mapping[str, str] | None:
    """The trace headers of the task delivered in this context; None if there are none."""
    record = _running.get()
    return None if record is None or not record.options else carried_trace(record.options) or None


def _block_on(store: Store) -> _Block | None:
    """The innermost block on `store` around this coroutine, or around the creation of its asyncio task."""
    block = _innermost.get()
    while block is not None and block.store is not store:
        block = block.outer
    return block


def joined_to(store: Store) -> Joined | None:
    """The open transaction on `store` around this coroutine. Raises SetupError if it has ended."""
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
    """True if that transaction's connection belongs to this thread, as synchronous connections do."""
    block = _block_on(store)
    return block is not None and block.here and not block.over


def enter(store: Store, joined: Joined, *, here: bool = False) -> None:
    """Make the verbs of this context join `joined`; `here`: its connection belongs to this thread."""
    _innermost.set(_Block(store, joined, here, _innermost.get()))


def leave(joined: Joined) -> None:
    """End what `enter` began. Raises SetupError if `joined` was not entered last in this context."""
    block = _innermost.get()
    if block is None or block.joined is not joined:
        raise SetupError("a block of app.using(connection) is left in another context or order than it was entered")
    block.over = True
    _innermost.set(block.outer)


@contextmanager
def joining(store: Store, joined: Joined) -> Iterator[None]:
    """Make the verbs of this coroutine join `joined` within this block."""
    enter(store, joined)
    try:
        yield
    finally:
        leave(joined)


def run_on_this_thread(verb: Coroutine[Any, Any, T]) -> T:
    """Run a verb on a synchronous connection to its end without an event loop. Raises SetupError if it suspends."""
    try:
        verb.send(None)
    except StopIteration as ended:
        answer: T = ended.value
        return answer
    verb.close()
    raise SetupError(HAS_TO_BE_AWAITED)
