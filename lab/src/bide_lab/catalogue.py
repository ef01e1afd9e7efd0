"""Which strategies there are: the classes of the files in `strategies/`, and of any file that is named by its path."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from bide.core.errors import BadInput
from bide_lab import strategies
from bide_lab.strategy import VERBS, Strategy


def catalogue() -> dict[str, type[Strategy]]:
    """All that the lab comes with, by name, in the order of their numbers."""
    found: dict[str, type[Strategy]] = {}
    for module in sorted(pkgutil.iter_modules(strategies.__path__), key=lambda one: one.name):
        if not module.name.startswith("_"):
            for strategy in strategies_of(importlib.import_module(f"{strategies.__name__}.{module.name}")):
                found[strategy.name] = strategy
    return found


def strategies_of(module: ModuleType) -> list[type[Strategy]]:
    """The strategies that a module defines, in the order in which it does."""
    return [
        one for one in vars(module).values()
        if inspect.isclass(one) and issubclass(one, Strategy) and one.__module__ == module.__name__ and one.name
    ]  # fmt: skip


def chosen(words: Sequence[str]) -> list[type[Strategy]]:
    """By names (`S4-A`), numbers (`S4`: all its variants) and paths of files (`./mine.py`); all without any.

    Raises BadInput.
    """
    every = catalogue()
    if not words:
        return list(every.values())
    found: dict[str, type[Strategy]] = {}
    for word in words:
        some = _from_file(Path(word)) if word.endswith(".py") else _named(word, every)
        found |= {one.name: one for one in some}
    return list(found.values())


def _named(word: str, every: dict[str, type[Strategy]]) -> list[type[Strategy]]:
    wanted = word.lower()
    some = [one for name, one in every.items() if wanted in (name.lower(), name.lower().partition("-")[0])]
    if not some:
        raise BadInput("strategies", word, f"a path of a .py file, or of {', '.join(every)}")
    return some


def _from_file(path: Path) -> list[type[Strategy]]:
    if not path.is_file():
        raise BadInput("strategies", str(path), "a file that is there")
    name = f"bide_lab_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    some = strategies_of(module)
    if not some:
        raise BadInput(
            "strategies", str(path), "a file with a class that has bide_lab.strategy.Strategy as its base, and a name"
        )
    for one in some:
        check(one)
    return some


def check(strategy: type[Strategy]) -> None:
    """Raises BadInput where it is not what it says: a verb that is neither there nor explained."""
    for verb in VERBS[1:]:
        has = getattr(strategy, verb) is not getattr(Strategy, verb)
        if has == (verb in strategy.cannot):
            raise BadInput(
                f"{strategy.name}.{verb}", "both" if has else "neither", "the method, or a reason in `cannot`"
            )
    if strategy.run is Strategy.run or strategy.schedule is Strategy.schedule:
        raise BadInput(strategy.name, "a class without them", "the methods schedule and run")


def source_of(strategy: type[Strategy]) -> str:
    """The path of its file: what another process finds it by."""
    return str(Path(inspect.getfile(strategy)).resolve())
