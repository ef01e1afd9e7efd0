"""Which strategies there are: the classes of the modules here, and of any file that is named by its path.

Each package here is a *family*, whose docstring is its title and the idea that its strategies share; they are drawn in
the same pictures. A module holds the variants of one strategy. The Markdown file beside it is their *card*, which
`bide lab explain` prints and docs/strategies.md holds: a title, parts with fixed names, and a drawing, indented, of at
most 100 columns. In a file of one's own the module's docstring may be the card.

    # ZSET poll: a sorted set of ids by due time, asked again and again

    **Idea.** ...
    **Origin.** ...
    **Cost.** ...
    **Flaw.** ...
    **Right when.** ...
    **To bide.** ...
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from bide.core.errors import BadInput
from bide_lab.strategy import VERBS, Strategy

PARTS = ("Idea", "Origin", "Cost", "Flaw", "Right when", "To bide")
"""The parts of a card, in this order. The last: how to move from it to bide by hand."""


class Card(NamedTuple):
    """All that is to be known of a strategy before it is measured."""

    title: str
    parts: Mapping[str, str]
    """By the names in `PARTS`: a paragraph, in one line."""
    drawing: str
    """How it works, in plain characters."""


class Family(NamedTuple):
    """Strategies that share an idea, and are drawn in one picture."""

    name: str
    """One word, as in the names of pictures."""
    title: str
    about: str
    """Their common idea, in two sentences or three."""


OWN = Family("own", "Your own", "Strategies from files of your own.")
"""All that is in no package of the lab's."""


def card_of(strategy: type[Strategy]) -> Card:
    """Raises BadInput where a part is missing."""
    file = Path(source_of(strategy))
    beside = file.with_suffix(".md")
    text = beside.read_text("utf-8") if beside.is_file() else inspect.getdoc(sys.modules[strategy.__module__]) or ""
    title, *lines = text.splitlines()
    drawing = "\n".join(line for line in lines if line.startswith("    ") or not line).strip("\n")
    prose = "\n".join(line for line in lines if not line.startswith("    "))
    _, *found = re.split(r"^\*\*([^*]+)\.\*\* ", prose, flags=re.MULTILINE)
    parts = {name: " ".join(told.split()) for name, told in zip(found[::2], found[1::2], strict=True)}
    if tuple(parts) != PARTS:
        raise BadInput(f"the card of {file}", f"parts {', '.join(parts) or 'none'}", ", ".join(PARTS))
    return Card(title.removeprefix("# ").rstrip("."), parts, textwrap.dedent(drawing))


def family_of(strategy: type[Strategy]) -> Family:
    """The one of its package; `OWN` if it is from a file of the user's."""
    package = strategy.__module__.rpartition(".")[0]
    if not package.startswith(f"{__name__}."):
        return OWN
    title, _, about = (inspect.getdoc(sys.modules[package]) or "").partition("\n\n")
    return Family(package.rpartition(".")[2], title.rstrip("."), " ".join(about.split()))


def families() -> list[Family]:
    """All that the lab comes with, in the order of their strategies' numbers."""
    return list(dict.fromkeys(map(family_of, catalogue().values())))


def catalogue() -> dict[str, type[Strategy]]:
    """All that the lab comes with, by name, in the order of their numbers."""
    names = [module.name for module in pkgutil.walk_packages(__path__, f"{__name__}.") if not module.ispkg]
    modules = [importlib.import_module(name) for name in sorted(names, key=lambda name: name.rpartition(".")[2])]
    return {one.name: one for module in modules for one in strategies_of(module)}


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


def _named(word: str, every: Mapping[str, type[Strategy]]) -> list[type[Strategy]]:
    wanted = word.lower()
    some = [one for name, one in every.items() if wanted in (name.lower(), name.lower().partition("-")[0])]
    if not some:
        raise BadInput("strategies", word, f"a path of a .py file, or of {', '.join(every)}")
    return some


def _from_file(path: Path) -> list[type[Strategy]]:
    if not path.is_file():
        raise BadInput("strategies", str(path), "a file that is there")
    spec = importlib.util.spec_from_file_location(f"bide_lab_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
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
    own = {verb for verb in VERBS if getattr(strategy, verb) is not getattr(Strategy, verb)}
    if "reschedule" in own and "fire_now" not in strategy.cannot:
        own.add("fire_now")  # by moving it
    for verb in VERBS[1:]:
        if (verb in own) == (verb in strategy.cannot):
            given = "both" if verb in own else "neither"
            raise BadInput(f"{strategy.name}.{verb}", given, "the method, or a reason in `cannot`")
    if strategy.run is Strategy.run or "schedule" not in own:
        raise BadInput(strategy.name, "a class without them", "the methods schedule and run")


def source_of(strategy: type[Strategy]) -> str:
    """The path of its file: what another process finds it by."""
    return str(Path(inspect.getfile(strategy)).resolve())
