"""The parts of docs/ that come from the code and from results: settings, a task's life, the lab, what trials found.

A generated part stands between two comments, `<!-- generated: name -->` and `<!-- end -->`; everything around it is
written by hand. `--check` writes nothing and fails where a file is not what the code says.

Tables and pictures of strategies are drawn from lab/src/bide_lab/results.jsonl: put another results file there and run
this again. A picture is drawn when the results have changed, or with `--draw`; that takes matplotlib. Those of
docs/reliability.md are drawn from docs/reliability/*.jsonl, the table of mutants from docs/correctness/mutants.jsonl.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path

from bide.core import lifecycle
from bide.core.lifecycle import TABLE
from bide.core.records import State
from bide.settings import describe
from bide_lab.report.page import Document
from bide_lab.strategies import families
from bide_proofs.reliability import Results
from bide_proofs.simulate.mutants.trial import table as mutants_table

ROOT = Path(__file__).resolve().parent.parent
PART = re.compile(r"(<!-- generated: (?P<name>[\w-]+) -->\n)(?P<body>.*?)(<!-- end -->)", re.DOTALL)
STATES = (None, *State)
RESULTS = ROOT / "lab" / "src" / "bide_lab" / "results.jsonl"
MUTANTS = ROOT / "docs" / "correctness" / "mutants.jsonl"


def settings_table() -> str:
    """One row per setting."""
    lines = ["| name | environment | default | accepted | what it is |", "|---|---|---|---|---|"]
    for one in describe():
        variables = f"`{one.variable}`" + (f" or `{one.file_variable}`" if one.file_variable else "")
        default = f"`{one.default_text}`" if one.default_text else "none"
        lines.append(f"| `{one.name}` | {variables} | {default} | {one.kind.accepted} | {one.sentence} |")
    return "\n".join(lines) + "\n"


def life_drawing() -> str:
    """The drawing in the docstring of `core.lifecycle`, without its indentation."""
    assert lifecycle.__doc__ is not None
    lines = lifecycle.__doc__.split("\n\n")[1].splitlines()
    margin = min(len(line) - len(line.lstrip()) for line in lines)
    return "\n".join(["```text", *(line[margin:] for line in lines), "```"]) + "\n"


def life_table() -> str:
    """Every verb in every state: the answer, and where the task goes if it goes anywhere."""
    heads = ["(nothing)" if state is None else state.value for state in STATES]
    lines = [f"| verb | {' | '.join(heads)} |", "|---" * (len(STATES) + 1) + "|"]
    for verb, row in TABLE.items():
        cells = []
        for state in STATES:
            word, to = row[state]
            named = "" if word in ("taken", "left alone") else f"`{word}`"
            arrow = f"→ {to.value}" if to is not None and word != "left alone" and _moves(word) else ""
            cells.append(" ".join(part for part in (named, arrow) if part) or "·")
        lines.append(f"| **{verb.value}** | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _moves(word: str) -> bool:
    return word not in ("kept", "refused", "under_way", "not_found", "finished")


@cache
def lab() -> Document:
    """The measured results of the strategies."""
    return Document(RESULTS, ROOT / "docs" / "lab")


def lab_parts() -> dict[str, Callable[[], str]]:
    """Those of all strategies, and for each family its cards and its figures, the latter in Chinese too."""
    parts: dict[str, Callable[[], str]] = {"lab-way": lambda: lab().way()}
    names = {"known": "flaws", "ahead": "ahead", "picks": "picks"}
    names |= {family.name: f"{family.name}-measured" for family in families()}
    for section, name in names.items():
        parts[f"lab-{name}"] = partial(_measured, section)
        parts[f"lab-{name}-zh"] = partial(_measured, section, chinese=True)
    return parts | {f"lab-{family.name}-cards": partial(_cards, family.name) for family in families()}


def _measured(section: str, *, chinese: bool = False) -> str:
    return lab().measured(section, chinese=chinese)


def _cards(family: str) -> str:
    return lab().cards(family)


@cache
def trials() -> Results:
    """The findings of torture and soak."""
    return Results(ROOT / "docs" / "reliability")


PARTS: Mapping[str, Callable[[], str]] = {
    "settings": settings_table,
    "life-drawing": life_drawing,
    "life-table": life_table,
    "reliability-torture": lambda: trials().torture(),
    "reliability-cannot": lambda: trials().cannot(),
    "reliability-soak": lambda: trials().soak(),
    "mutants": lambda: mutants_table(MUTANTS),
    **lab_parts(),
}


def regenerated(text: str) -> str:
    """`text` with every generated part as the code says it is now."""
    return PART.sub(lambda found: found[1] + PARTS[found["name"]]() + found[4], text)


def main(arguments: list[str]) -> int:
    stale = []
    for path in sorted((ROOT / "docs").glob("*.md")):
        text = path.read_text(encoding="utf-8")
        wanted = regenerated(text)
        if wanted != text:
            stale.append(path.relative_to(ROOT))
            if "--check" not in arguments:
                path.write_text(wanted, encoding="utf-8")
    stale += [path.relative_to(ROOT) for path in lab().stale_pictures()]
    if "--check" not in arguments and ("--draw" in arguments or lab().stale_pictures()):
        lab().draw()
    for path in stale:
        print(f"{path}: {'is out of date; run make generate' if '--check' in arguments else 'written'}")
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
