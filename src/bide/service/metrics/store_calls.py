"""How long a store's calls take and how they fail, timed at the store itself.

A store is told what it can do by `isinstance`, so nothing may stand before it: its own bound methods are exchanged for
timed ones, on that one object. That costs 0.5 µs a call, of which there is one for a whole batch of tasks.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import wraps
from time import perf_counter
from typing import ParamSpec, TypeVar

from bide.core import errors
from bide.ports import AnswersApart, Store

P = ParamSpec("P")
R = TypeVar("R")
_log = logging.getLogger("bide.metrics")

OPERATIONS = ("add", "change", "get", "find", "tally", "lease", "extend", "settle", "purge")
_APART = {"add": "add_apart", "change": "change_apart", "settle": "settle_apart"}
"""Where answers may come apart, the plain verbs are made of these, and would be counted twice."""
ERRORS = ("StoreUnavailable", "StoreFull", "StoreCorrupt", "StoreMismatch", "OutcomeUnknown", "PartlyFailed")
DEFECT = "defect"
"""Whatever else is raised: no store should."""

Took = Callable[[float], None]
Failed = Callable[[BaseException], None]


def time_calls(store: Store, watch: Callable[[str], tuple[Took, Failed]]) -> None:
    """Have each call of `store` timed: `watch(operation)` gives who is told of the seconds, and of the error."""
    apart = isinstance(store, AnswersApart)
    for operation in OPERATIONS:
        name = _APART.get(operation, operation) if apart else operation
        try:
            setattr(store, name, timed(getattr(store, name), *watch(operation)))
        except AttributeError:
            _log.warning("the calls of %s are not timed: its class has __slots__", type(store).__name__)
            return


def timed(call: Callable[P, Awaitable[R]], took: Took, failed: Failed) -> Callable[P, Awaitable[R]]:
    """`call`, timed. One that is cancelled is not counted."""

    @wraps(call)
    async def timed_call(*args: P.args, **kwargs: P.kwargs) -> R:
        began = perf_counter()
        try:
            answer = await call(*args, **kwargs)
        except Exception as error:
            took(perf_counter() - began)
            failed(error)
            raise
        took(perf_counter() - began)
        return answer

    return timed_call


def kind_of(error: BaseException) -> str | None:
    """The label of an error; None for one that is the caller's own mistake."""
    if isinstance(error, errors.BadInput):
        return None
    name = type(error).__name__
    return name if isinstance(error, errors.StoreError) and name in ERRORS else DEFECT
