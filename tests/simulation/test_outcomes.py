"""Rules for a worker that no mutant breaks, each with a history that keeps it and one that does not.

The mutants on record break the others, and `tests/proofs` plays both them and bide.
"""

from __future__ import annotations

from msgspec.structs import replace

from bide.core.records import Result
from bide.testing.history import events as ev
from bide_proofs.simulate.judge import owed

SECOND = 1_000_000_000
WHO = "worker-0.1"


def broken(*history: ev.Event) -> list[str]:
    return [one.promise for one in owed(history, calm=0, lease=2_000, room=lambda topic: 20, late=60)]


def leasing(call: int, at: float) -> ev.Leasing:
    return ev.Leasing(call, WHO, round(at * SECOND), round(at * 1000), {"slow": 1, "work": 20}, 0)


def test_nobody_asks_again_and_again_while_nothing_happens() -> None:
    def asks(pause: float, *between: ev.Event) -> list[ev.Event]:
        nothing = [ev.Leased(call, round(call * pause * SECOND), 0, [], None) for call in range(30)]
        return [event for one in nothing for event in (leasing(one.call, one.call * pause), one, *between)]

    assert broken(*asks(0.01)) == ["P11"]
    assert broken(*asks(0.5)) == []
    assert broken(*asks(0.01, ev.Fault(0, "something happens"))) == []


def test_whoever_asks_is_answered() -> None:
    ask = ev.Asked(1, WHO, 0, 0, ev.Asks.CANCEL, "work", "k")
    later = ev.Fault(60 * SECOND, "something happens")
    assert broken(ask, later) == ["P4"]
    assert broken(ask, ev.Answered(1, SECOND, 0, Result.NOT_FOUND), later) == []
    in_the_calm = replace(ask, at=1)
    assert broken(in_the_calm, ev.Answered(1, SECOND, 0, Result.NOT_FOUND)) == []
    assert broken(in_the_calm, ev.Answered(1, 3 * SECOND, 0, Result.NOT_FOUND)) == ["P4"]
    assert broken(ask, ev.Failed(1, SECOND, True, "OutcomeUnknown"), later) == []
    assert broken(ask, ev.Died(WHO, SECOND), later) == []
    assert broken(ask, ev.Fault(SECOND, "something happens")) == [], "it may be answered yet"
