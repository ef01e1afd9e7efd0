"""Which strategy is picked, and why the others are not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.lab.reported import late, made, result

from bide_lab import choose as choosing
from bide_lab.choose import Choice, Twice, Wishes, choose
from bide_lab.figures import Result
from bide_lab.findings import findings
from bide_lab.running import ResultsFile
from bide_lab.strategies import catalogue

EVERY = catalogue()
ALL = frozenset({"redis", "postgres", "mysql", "rabbitmq", "rocketmq"})
EVERYTHING = ALL | {"mysql_replica"}
CLOSE = late(0.5, 2)


def choice_of(wishes: Wishes, results: Sequence[Result] = ()) -> Choice:
    return choose(wishes, findings(results))


def fitting(wishes: Wishes, *results: Result) -> list[str]:
    return [one.row.name for one in choice_of(wishes, results).fitting]


def why_not(name: str, wishes: Wishes, *results: Result) -> str:
    """All that speaks against it."""
    [one] = [one for one in choice_of(wishes, results).excluded if one.row.name == name]
    return "; ".join(why.words for why in one.against)


def test_every_strategy_is_either_in_or_out_with_a_reason() -> None:
    choice = choice_of(Wishes(servers=ALL))
    assert {one.row.name for one in (*choice.fitting, *choice.excluded)} == set(EVERY)
    assert all(one.against and all(why.words for why in one.against) for one in choice.excluded)
    assert all(one.merits for one in choice.fitting)
    assert not choice.measured


def test_what_lost_tasks_where_it_was_measured_is_out_also_where_nothing_was() -> None:
    measured = ResultsFile(Path(choosing.__file__).with_name("results.jsonl")).read()
    losers = {one.row.name for one in choice_of(Wishes(servers=EVERYTHING), measured).excluded
              if any("lost" in why.words and why.measured for why in one.against)}  # fmt: skip
    assert {"S5-B", "S18", "S1-tables"} <= losers
    assert not losers & {*fitting(Wishes(servers=EVERYTHING))}
    assert "loses what its holder had taken" in why_not("S5-B", Wishes(servers=EVERYTHING))
    assert "S5-B" in fitting(Wishes(servers=EVERYTHING, survive=False))


def test_what_needs_a_server_that_is_not_there_is_out() -> None:
    assert "needs redis" in why_not("S4-A", Wishes())
    assert not [name for name in fitting(Wishes()) if EVERY[name].needs]
    assert "bide-redis" in fitting(Wishes(servers=frozenset({"redis"})))


def test_what_lives_on_one_machine_is_out_where_several_take_part() -> None:
    wishes = Wishes(servers=ALL, survive=False, several=True)
    assert "in a process of one machine" in why_not("S12", wishes)
    assert "in a file of one machine" in why_not("bide-sqlite", wishes)
    assert all(EVERY[name].needs for name in fitting(wishes))
    assert "bide-sqlite" in fitting(Wishes(servers=ALL))


@pytest.mark.parametrize("verb", ["cancel", "reschedule"])
def test_what_lacks_a_verb_is_out_with_the_reason_that_it_gives(verb: str) -> None:
    wanted = Wishes(servers=ALL, cancel=verb == "cancel", move=verb == "reschedule")
    lacking = [name for name, strategy in EVERY.items() if verb in strategy.cannot]
    assert lacking
    for name in lacking:
        assert EVERY[name].cannot[verb] in why_not(name, wanted) or EVERY[name].unfit
    chosen = fitting(Wishes(servers=ALL, cancel=False, move=False, late=10**6, survive=False, twice=Twice.YES))
    assert set(lacking) & set(chosen)


def test_what_is_late_by_design_is_out_where_that_is_too_late() -> None:
    by_design = [name for name, strategy in EVERY.items() if strategy.precision >= 60]
    assert by_design
    for name in by_design:
        assert "late by design" in why_not(name, Wishes(servers=ALL, late=59))
    assert "S2-minute" in fitting(Wishes(servers=ALL, late=3600.0))


def test_what_lives_in_one_process_is_out_where_it_must_survive() -> None:
    within = [name for name, strategy in EVERY.items() if strategy.in_process]
    assert not set(within) & set(fitting(Wishes(servers=ALL)))
    measured = result("S12", "restarted", made(fired=0, lost=100))
    assert "lost 100 of 100 (restarted" in why_not("S12", Wishes(servers=ALL), measured)
    assert "S12" in fitting(Wishes(servers=ALL, survive=False), measured)


def test_a_measured_loss_counts_only_where_it_matters() -> None:
    killed = result("S5-A", "killed", made(late=CLOSE, fired=60, lost=40))
    assert "lost 40 of 100 (killed" in why_not("S5-A", Wishes(servers=ALL), killed)
    assert "S5-A" in fitting(Wishes(servers=ALL, survive=False), killed)
    two = result("S5-A", "two", made(late=CLOSE, fired=99, lost=1))
    assert "lost 1 of 100 (two" in why_not("S5-A", Wishes(servers=ALL, survive=False), two)


def test_a_known_loss_counts_until_it_was_looked_for() -> None:
    [flaw] = [flaw for flaw in EVERY["S4-B"].flaws if flaw.workload == "killed"]
    assert flaw.text in why_not("S4-B", Wishes(servers=ALL))
    assert "S4-B" in fitting(Wishes(servers=ALL), result("S4-B", "killed", made(late=CLOSE)))


def test_doing_a_task_twice_is_asked_in_three_degrees() -> None:
    after_a_crash = result("bide-redis", "killed", made(late=CLOSE, duplicated=9))
    for twice, fits in ((Twice.YES, True), (Twice.CRASH, True), (Twice.NO, False)):
        assert ("bide-redis" in fitting(Wishes(servers=ALL, twice=twice), after_a_crash)) is fits
    assert "did 9 of 100 twice (killed" in why_not("bide-redis", Wishes(servers=ALL, twice=Twice.NO), after_a_crash)
    always = result("S4-A", "two", made(late=CLOSE, duplicated=40))
    for twice, fits in ((Twice.YES, True), (Twice.CRASH, False), (Twice.NO, False)):
        assert ("S4-A" in fitting(Wishes(servers=ALL, twice=twice), always)) is fits


def test_who_gives_again_what_a_dead_consumer_held_may_do_it_twice() -> None:
    assert "second time" in why_not("bide-redis", Wishes(servers=ALL, twice=Twice.NO))


def test_more_tasks_than_fit_into_its_memory_are_too_many() -> None:
    heavy = result("S12", "idle", made(expected=0, fired=0, client_bytes_per_task=500.0))
    few = Wishes(tasks=1_000_000, survive=False)
    assert "S12" in fitting(few, heavy)
    many = Wishes(tasks=100_000_000, survive=False)
    assert "50.0 GB for 100,000,000 tasks" in why_not("S12", many, heavy)


def test_what_is_for_one_purpose_alone_is_out() -> None:
    special = [name for name, strategy in EVERY.items() if strategy.unfit]
    assert special
    for name in special:
        assert EVERY[name].unfit in why_not(name, Wishes(servers=ALL, survive=False))


def test_what_nobody_has_looked_at_is_said() -> None:
    def minds(name: str, wishes: Wishes, *results: Result) -> str:
        [one] = [one for one in choice_of(wishes, results).fitting if one.row.name == name]
        return "; ".join(one.minds)

    killed, two = (result("S3", name, made(late=CLOSE)) for name in ("killed", "two"))
    wishes = Wishes(servers=ALL)
    assert "lost when something dies was not measured" in minds("S3", wishes)
    assert "lost when something dies" not in minds("S3", wishes, killed)
    assert "twice when two of each consumer run was not measured" in minds("S3", wishes, killed)
    assert "was not measured" not in minds("S3", wishes, killed, two)
    assert "was not measured" not in minds("bide-memory", Wishes(survive=False)), "it is one process with its client"


def test_the_pick_is_measured_and_has_less_to_mind() -> None:
    wishes = Wishes(survive=False)
    results = [result("bide-memory", "steady", made(late=late(0.1, 1))),
               result("S17-B", "steady", made(late=late(0.1, 40)))]  # fmt: skip
    names = fitting(wishes, *results)
    assert names[0] == "bide-memory"
    assert names[1] == "S17-B"
    assert names.index("S12") > 1, "what was not measured comes after what was"
