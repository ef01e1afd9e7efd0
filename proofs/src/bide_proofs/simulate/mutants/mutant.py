"""A mutant: a few words of one function's source exchanged, in the running program, and put back afterwards.

So a mutant *is* its change, and can be read as one: `old` is what the function says, `new` what somebody might have
written by mistake. Its source is compiled anew and its code object takes the place of the function's own, so that
whoever has imported the function, or holds a bound method of it, runs the mutant too.
"""

from __future__ import annotations
import __future__

import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import CodeType, FunctionType
from typing import Any

from msgspec import Struct

from bide.core.errors import BadInput

_FLAGS = __future__.annotations.compiler_flag


class Mutant(Struct, frozen=True):
    """One small change that breaks one promise."""

    name: str
    promise: str
    """The one that it breaks: "P1" to "P12"."""
    says: str
    """The change and its place, in one sentence."""
    of: Callable[..., Any]
    old: str
    """In the source of `of`, exactly once."""
    new: str
    minutes: float = 6
    """Of virtual time that a play lasts: less for those that cost much of the real."""

    @property
    def where(self) -> str:
        """The function's full name."""
        return f"{self.of.__module__}.{self.of.__qualname__}"

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The program with this change, as long as it lasts. Raises BadInput where `old` is not once in the source."""
        code, function = self.code(), _function(self)
        before = function.__code__
        function.__code__ = code
        try:
            yield
        finally:
            function.__code__ = before

    def code(self) -> CodeType:
        """The replacement of the function: compiled once, so that a file may be edited while mutants are played."""
        return _changed(self)


def _function(mutant: Mutant) -> FunctionType:
    assert isinstance(mutant.of, FunctionType), f"{mutant.name}: only what is written in Python can be changed"
    return mutant.of


@cache
def _changed(mutant: Mutant) -> CodeType:
    function = _function(mutant)
    source = textwrap.dedent(inspect.getsource(function))
    if source.count(mutant.old) != 1:
        raise BadInput(
            f"{mutant.name}: old",
            mutant.old,
            f"what {mutant.where} says once; it is there {source.count(mutant.old)} times",
        )
    module = compile(source.replace(mutant.old, mutant.new), function.__code__.co_filename, "exec", _FLAGS, True)
    [code] = [const for const in module.co_consts if isinstance(const, CodeType) and const.co_name == function.__name__]
    if code.co_freevars != function.__code__.co_freevars:
        raise BadInput(f"{mutant.name}: of", mutant.where, "a function that uses nothing of one around it")
    return code.replace(co_firstlineno=function.__code__.co_firstlineno, co_qualname=function.__code__.co_qualname)
