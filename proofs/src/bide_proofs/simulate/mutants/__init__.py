"""Mutants: versions of bide that are broken on purpose, each in one place, for the simulation to catch.

A judge that finds no violation proves something only if it does find violations when there are some. So for every
promise there are mutants that break it, and `python -m bide_proofs.simulate.mutants` plays seed after seed of each
until the judge catches it.

A mutant replaces a few words in the source of one function, in the running program, and restores them afterwards. The
replacement is written in `catalogue.toml`. The changed source is compiled, and its code object replaces the function's
own, so that modules that have imported the function, and objects that hold a bound method of it, run the mutant too.
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
    """The promise that it breaks: "P1" to "P12"."""
    says: str
    """The change and its place, in one sentence."""
    where: str
    """The function: "bide.core.lifecycle:change"."""
    old: str
    """The text to replace, which is in the source of that function exactly once."""
    new: str
    minutes: float = 6
    """The virtual minutes of a play: fewer for mutants that take much real time."""
    recurring: bool = False
    """True if the play of recurring tasks catches it (`simulate.recurring`)."""

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Apply the change within this context. Raises BadInput unless `old` is in the source exactly once."""
        code, function = self.code(), _function(self)
        before = function.__code__
        function.__code__ = code
        try:
            yield
        finally:
            function.__code__ = before

    def code(self) -> CodeType:
        """The function's new code, compiled once, so that a file may be edited while mutants are played."""
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
"""All mutants, by name."""


def applied(name: str) -> AbstractContextManager[None]:
    """Apply the mutant of this name within a context. Raises BadInput for an unknown name."""
    if name not in MUTANTS:
        raise BadInput("mutant", name, f"one of {', '.join(MUTANTS)}")
    return MUTANTS[name].applied()
