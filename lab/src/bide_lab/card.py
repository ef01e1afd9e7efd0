"""The card of a strategy: what its module's docstring tells, in parts with fixed names.

    ZSET poll: a sorted set of ids by due time, asked again and again.

    **Idea.** ...
    **Origin.** ...
    **Cost.** ...
    **Flaw.** ...
    **Right when.** ...
    **To bide.** ...

        a drawing, indented, of at most 100 columns

The first line is the title. `bide lab explain` prints it, and docs/strategies.md holds it.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from bide.core.errors import BadInput
from bide_lab.strategy import Strategy

PARTS = ("Idea", "Origin", "Cost", "Flaw", "Right when", "To bide")
"""What every card tells, in this order. The last: how to move from it to bide by hand."""
_PART = re.compile(r"^\*\*(?P<name>[^*]+)\.\*\* ", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What is to be known of a strategy before it is measured."""

    title: str
    parts: Mapping[str, str]
    """By the names in `PARTS`: a paragraph, in one line."""
    drawing: str
    """How it works, in plain characters."""


def card_of(strategy: type[Strategy]) -> Card:
    """Raises BadInput where a part is missing."""
    text = inspect.getdoc(sys.modules[strategy.__module__]) or ""
    title, _, rest = text.partition("\n")
    drawing = [line for line in rest.splitlines() if line.startswith("    ") or not line.strip()]
    prose = "\n".join("" if line.startswith("    ") else line for line in rest.splitlines())
    found = list(_PART.finditer(prose))
    ends = [*(one.start() for one in found[1:]), len(prose)]
    parts = {one["name"]: " ".join(prose[one.end() : end].split()) for one, end in zip(found, ends, strict=True)}
    if tuple(parts) != PARTS:
        raise BadInput(
            f"the docstring of {strategy.__module__}", f"parts {', '.join(parts) or 'none'}", f"{', '.join(PARTS)}"
        )
    lines = "\n".join(drawing).strip("\n")
    return Card(title=title.rstrip("."), parts=parts, drawing=inspect.cleandoc("\n" + lines) if lines else "")
