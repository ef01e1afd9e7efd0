"""Sinks, the destinations of deliveries, and the routes to them."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextvars import copy_context
from types import AsyncGeneratorType, GeneratorType
from typing import Any, Protocol, TypeVar

from msgspec import Struct

from bide.core.errors import SetupError
from bide.core.instants import Millis
from bide.core.outcomes import Outcome
from bide.core.records import Topic
from bide.core.retry import RetryPolicy
from bide.core.tasks import Task

Got = TypeVar("Got")
Given = TypeVar("Given")


class Sink(Protocol):
    """The destination of deliveries. It returns or raises an Outcome; any other exception is a failed delivery.

    If it is an async context manager too, each worker enters it, before its first delivery.
    """

    async def deliver(self, task: Task[Any]) -> Outcome | None: ...


class Policy(Struct, frozen=True):
    """The treatment of a topic's failed deliveries."""

    retry: RetryPolicy
    losses: int = 10
    """The number of successive leases that may end unsettled before the task is dead ("holder lost")."""


class Route(Policy, frozen=True, kw_only=True):
    """The delivery of one topic: its sink and its policy."""

    topic: Topic
    sink: Sink
    concurrency: int
    """Concurrent deliveries of this topic in one worker process."""
    timeout: Millis | None = None
    on_dead: Sequence[Callable[[Task[Any]], Any]] = ()


def is_coroutine_function(function: Callable[..., Any]) -> bool:
    """True for a coroutine function, a decorated one, and an object whose `__call__` is one: it is called on the loop.

    Raises SetupError for a generator function: a call of it runs nothing.
    """
    its_call = getattr(function, "__call__", None)  # noqa: B004 - its own `__call__` counts
    if any(inspect.isgeneratorfunction(one) or inspect.isasyncgenfunction(one) for one in (function, its_call)):
        raise SetupError(f"{getattr(function, '__qualname__', function)} is a generator function: use no `yield`")
    return any(map(inspect.iscoroutinefunction, (function, inspect.unwrap(function), its_call)))


async def final_result(result: Any) -> Any:
    """The result of a handler, awaited if it is awaitable. Raises TypeError for a generator, which has run nothing."""
    while inspect.isawaitable(result):
        result = await result
    if isinstance(result, GeneratorType | AsyncGeneratorType):
        raise TypeError(f"the handler returned the generator {result.__qualname__}, which has not run")
    return result


async def call_in_thread(threads: Executor | None, function: Callable[[Given], Got], given: Given) -> Got:
    """Call it in a thread. A thread cannot be stopped, so even a cancelled call waits for its end.

    `threads`: None for those of the loop. Raises what it raises, and RuntimeError for its KeyboardInterrupt.
    """

    def call() -> tuple[Got, None] | tuple[None, BaseException]:
        try:
            return function(given), None
        except BaseException as raised:  # noqa: BLE001 - returned as a value, since a future cannot hold every error
            return None, raised

    running = asyncio.get_running_loop().run_in_executor(threads, copy_context().run, call)
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError as error:
            cancelled = error
    result, raised = running.result()
    if cancelled is not None:
        raise cancelled
    if isinstance(raised, KeyboardInterrupt):
        raise RuntimeError("the handler raised KeyboardInterrupt in its thread") from raised
    if raised is not None:
        raise raised
    return result  # type: ignore[return-value]
