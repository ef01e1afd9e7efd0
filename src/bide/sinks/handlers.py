"""The sink that calls a Python function: a coroutine function on the loop, a plain one in a thread."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import CoroutineType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from bide.core.errors import BadPayload, SetupError
from bide.core.outcomes import Dead, Outcome
from bide.core.payloads import Decode, checker_for, decoder_for
from bide.core.tasks import Task
from bide.ports import call_in_thread, final_result, is_coroutine_function

_log = logging.getLogger("bide.handlers")
Function = Callable[[Task[Any]], Any]


class PythonHandler:
    """Decodes the payload to the declared type, calls the function, and returns its outcome.

    A payload that cannot be decoded is Dead at once, with the reason: a retry would not help, and other tasks are not
    delayed (P6). A return value counts only if it is an Outcome.
    """

    __slots__ = ("_decode", "_function", "_name", "_pool", "_threads", "_warned", "asynchronous", "check", "declared")

    def __init__(self, function: Function, *, threads: int, names: Mapping[str, Any] | None = None) -> None:
        self._function = function
        self._name = getattr(function, "__qualname__", repr(function))
        self._warned = False
        self.declared = declared_payload(function, names)
        try:
            self._decode: Decode = decoder_for(self.declared)
            self.check = checker_for(self.declared)
            """A function that raises BadPayload for a payload that is not of the declared type."""
        except (NameError, RuntimeError, TypeError) as error:  # msgspec's and pydantic's
            raise SetupError(f"handler {self._name}: no payload can be a {self.declared!r} ({error})") from None
        self.asynchronous = is_coroutine_function(function)
        self._threads = threads
        self._pool: tuple[int, ThreadPoolExecutor] | None = None
        """The threads of a plain function, and their process, since a fork does not inherit threads."""

    def described(self) -> tuple[str, str]:
        """The kind of sink and the name of its function, for consoles."""
        return "handler", f"{getattr(self._function, '__module__', '')}.{self._name}"

    def read(self, task: Task[Any]) -> None:
        """Decode the payload to the declared type. Raises BadPayload."""
        task.read_payload(self._decode)

    async def deliver(self, task: Task[Any]) -> Outcome | None:
        try:
            task.read_payload(self._decode)
        except BadPayload as error:
            return Dead(str(error))
        called = self._function(task) if self.asynchronous else call_in_thread(self._pool_here(), self._function, task)
        result = await called if type(called) is CoroutineType else called
        if result is None or isinstance(result, Outcome):
            return result
        return self._outcome_of(await final_result(result))

    def _outcome_of(self, result: object) -> Outcome | None:
        """The outcome of any result: TypeError for an outcome's class, done and one warning for what is no outcome."""
        if result is None or isinstance(result, Outcome):
            return result
        if isinstance(result, type) and issubclass(result, Outcome):
            raise TypeError(f"the handler returned the class {result.__name__}; return {result.__name__}(...)")
        if not self._warned:
            self._warned = True
            _log.warning("%s returned %s, which is not an outcome: counted as done", self._name, type(result).__name__)
        return None

    def _pool_here(self) -> ThreadPoolExecutor:
        process = os.getpid()
        if self._pool is None or self._pool[0] != process:
            self._pool = process, ThreadPoolExecutor(self._threads, f"bide {self._name}")
        return self._pool[1]


def declared_payload(function: Function, names: Mapping[str, Any] | None = None) -> Any:
    """The `P` of the function's `Task[P]` parameter; Any if none is declared. Raises SetupError."""
    parameters = [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    name = getattr(function, "__qualname__", repr(function))
    if not parameters or any(parameter.default is parameter.empty for parameter in parameters[1:]):
        raise SetupError(f"handler {name}: it must take one argument, the task: def {name}(task: Task[...])")
    annotated: Any = function
    while isinstance(annotated, partial):
        annotated = annotated.func
    if not (inspect.isroutine(annotated) or hasattr(annotated, "__wrapped__")):
        annotated = type(annotated).__call__
    try:
        hints = get_type_hints(annotated, localns=dict(names or {}), include_extras=True)
    except NameError as error:
        raise SetupError(f"handler {name}: its annotation cannot be resolved ({error})") from None
    hint = hints.get(parameters[0].name, Any)
    if get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    if hint is Any or hint is Task:
        return Any
    if get_origin(hint) is Task:
        declared = get_args(hint)[0]
        return bytes if getattr(declared, "__origin__", None) is bytes else declared
    raise SetupError(f"handler {name}: its argument is a Task or Task[YourType], not {hint!r}")
