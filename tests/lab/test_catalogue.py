"""The declarations that every strategy of the lab has to make, and how one is found."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.lab.playing import named
from tests.lab.reported import made

from bide.core.errors import BadInput
from bide_lab.figures import SHARES
from bide_lab.strategies import PARTS, card_of, catalogue, check, chosen, source_of
from bide_lab.strategy import VERBS, Harm, Strategy
from bide_lab.workloads import WORKLOADS

EVERY = catalogue()
WIDTH = 100

MINE = """
from bide_lab.strategy import Strategy

class Mine(Strategy):
    name = "mine"
    cannot = {cannot}

    async def schedule(self, items):
        pass

    async def run(self, role, effect):
        pass
"""


@pytest.mark.parametrize("strategy", EVERY.values(), ids=named)
def test_it_says_what_it_is_and_its_workloads_make_sense_for_it(strategy: type[Strategy]) -> None:
    check(strategy)
    card = card_of(strategy)
    assert all(card.parts[part] for part in PARTS)
    assert card.drawing
    assert max(len(line) for line in card.drawing.splitlines()) <= WIDTH
    assert strategy.title
    assert strategy.__doc__ != Strategy.__doc__
    assert strategy.in_process <= (not strategy.needs)
    for name in (*strategy.shows, *(flaw.workload for flaw in strategy.flaws)):
        assert not WORKLOADS[name].why_not(strategy)
    assert set(strategy.skips) <= set(WORKLOADS)
    assert set(strategy.cannot) <= set(VERBS)
    assert strategy.shows or strategy.flaws, "a quick run would not show it at all"


@pytest.mark.parametrize("strategy", EVERY.values(), ids=named)
def test_a_flaw_is_seen_where_its_harm_is_done_and_not_where_another_is_or_none(strategy: type[Strategy]) -> None:
    even = [0.1] * len(SHARES)
    harmed = {
        None: made(late=even),
        Harm.LOST: made(late=even, fired=40, lost=60),
        Harm.TWICE: made(late=even, duplicated=60),
        Harm.LATE: made(late=[1e7] * len(SHARES)),
    }
    for flaw in strategy.flaws:
        seen = [harm for harm, figures in harmed.items() if flaw.seen(figures)]
        assert seen == ([flaw.harm] if flaw.harm else []), flaw.text
        assert flaw.text[:1].islower()
        assert not flaw.text.endswith(".")


def test_all_that_the_requirement_names_are_there() -> None:
    numbers = {name.partition("-")[0] for name in EVERY}
    assert {f"S{number}" for number in range(1, 24)} <= numbers
    assert {f"bide-{store}" for store in ("memory", "sqlite", "redis", "postgres", "mysql")} <= set(EVERY)


def test_a_number_names_all_its_variants_and_a_name_one() -> None:
    assert [one.name for one in chosen(["s4-a"])] == ["S4-A"]
    variants = [one.name for one in chosen(["S4"])]
    assert variants[:2] == ["S4-A", "S4-B"]
    assert all(name.startswith("S4-") for name in variants)
    assert len(chosen([])) == len(EVERY)
    assert [one.name for one in chosen(["S4-A", "S4"])] == variants


def test_a_path_names_the_strategies_of_that_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    reasons = dict.fromkeys(VERBS[1:], "nobody asked for it")
    path.write_text(MINE.replace("{cannot}", repr(reasons)), encoding="utf-8")
    [mine] = chosen([str(path)])
    assert mine.name == "mine"
    assert source_of(mine) == str(path)


@pytest.mark.parametrize(
    ("word", "says"), [("S99", "a path of a .py file, or of S1"), ("nowhere.py", "a file that is there")]
)
def test_what_is_not_there_is_said_with_what_is(word: str, says: str) -> None:
    with pytest.raises(BadInput) as error:
        chosen([word])
    assert str(error.value).startswith(f"strategies: '{word}' is not accepted; give {says}")


@pytest.mark.parametrize("text", ["x = 1\n", MINE.replace("{cannot}", "{}")])
def test_a_file_that_holds_no_whole_strategy_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "half.py"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(BadInput):
        chosen([str(path)])
