"""Builds of bide that are broken on purpose, each in one place: what the simulation has to catch.

A judge that finds nothing wrong has said something only if it does find what is wrong. So for every promise there are
mutants that break it, and `python -m bide_proofs.simulate.mutants` plays seed after seed of each until one shows it.

A mutant is a few words of one function's source exchanged, in the running program, and put back afterwards: it *is* its
change, and can be read as one in `catalogue.toml`. The source is compiled anew and its code object takes the place of
the function's own, so that a module that has imported the function, or an object that holds a bound method of it, runs
the mutant too.
"""

from __future__ import annotations
import __future__

import inspect
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from types import CodeType, FunctionType, MappingProxyType
from typing import Any

import msgspec
from msgspec import Struct

from bide.core.errors import BadInput

__all__ = ["MUTANTS", "Mutant", "applied"]

_FLAGS = __future__.annotations.compiler_flag


class Mutant(Struct, frozen=True, forbid_unknown_fields=True):
    """One small change that breaks one promise."""

    name: str
    promise: str
    """The one that it breaks: "P1" to "P12"."""
    says: str
    """The change and its place, in one sentence."""
    where: str
    """The function: "bide.core.lifecycle:change"."""
    old: str
    """In the source of that function, exactly once."""
    new: str
    minutes: float = 6
    """Of virtual time that a play lasts: less for those that cost much of the real."""

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
    function = resolve_name(mutant.where)
    assert isinstance(function, FunctionType), f"{mutant.name}: only what is written in Python can be changed"
    return function


@cache
def _changed(mutant: Mutant) -> CodeType:
    function = _function(mutant)
    source = textwrap.dedent(inspect.getsource(function))
    if (times := source.count(mutant.old)) != 1:
        raise BadInput(f"{mutant.name}: old", mutant.old, f"what {mutant.where} says once; it is there {times} times")
    module = compile(source.replace(mutant.old, mutant.new), function.__code__.co_filename, "exec", _FLAGS, True)
    [code] = [const for const in module.co_consts if isinstance(const, CodeType) and const.co_name == function.__name__]
    if code.co_freevars != function.__code__.co_freevars:
        raise BadInput(f"{mutant.name}: where", mutant.where, "a function that uses nothing of one around it")
    return code.replace(co_firstlineno=function.__code__.co_firstlineno, co_qualname=function.__code__.co_qualname)


def _catalogue() -> Iterator[Mutant]:
    text = Path(__file__).with_name("catalogue.toml").read_text(encoding="utf-8")
    for name, fields in msgspec.toml.decode(text, type=dict[str, dict[str, Any]]).items():
        yield msgspec.convert({"name": name, **fields}, Mutant)


MUTANTS: Mapping[str, Mutant] = MappingProxyType({mutant.name: mutant for mutant in _catalogue()})
"""All of them, by name."""


def applied(name: str) -> AbstractContextManager[None]:
    """The program as this mutant of it, for as long as it lasts. Raises BadInput for a name that there is not."""
    if name not in MUTANTS:
        raise BadInput("mutant", name, f"one of {', '.join(MUTANTS)}")
    return MUTANTS[name].applied()
