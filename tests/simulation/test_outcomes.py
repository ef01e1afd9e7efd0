"""What a worker owes its deliveries: each rule with a history that keeps it and one that does not."""

from __future__ import annotations

from msgspec.structs import replace

from bide.core.records import OutcomeKind, Result, State
from bide.testing.history.events import (
    Answered,
    Asked,
    Asks,
    Began,
    Died,
    Ended,
    Event,
    Extending,
    Failed,
    Fault,
    Held,
    Leased,
    Leasing,
    Seen,
    Settling,
    Told,
)
from bide_proofs.simulate.judge import owed

SECOND = 1_000_000_000
WHO, OTHER = "worker-0.1", "worker-1.1"


def broken(*history: Event) -> list[str]:
    return [one.promise for one in owed(history, calm=0, lease=2_000, room=_room, late=60)]


def _room(topic: str) -> int:
    return 1 if topic == "slow" else 20


def leasing(call: int, at: float, who: str = WHO) -> Leasing:
    return Leasing(call, who, round(at * SECOND), round(at * 1000), {"slow": 1, "work": 20}, 0)


def leased(call: int, at: float, topic: str, token: int, losses: int = 0) -> Leased:
    task = Seen("id", State.LEASED, 0, 0, 0, 1, 0, losses, token, 0)
    return Leased(call, round(at * SECOND), round(at * 1000), [Held(topic, "k", task)], None)


def began(at: float, topic: str, token: int, planned: float, who: str = WHO) -> Began:
    return Began(who, round(at * SECOND), round(at * 1000), topic, "k", "id", token, 1, round(planned * 1000))


def ended(at: float, topic: str, token: int, how: str = "returned", who: str = WHO) -> Ended:
    return Ended(who, round(at * SECOND), topic, "k", token, how)


def settling(call: int, at: float, token: int, verdict: OutcomeKind = OutcomeKind.DONE) -> Settling:
    return Settling(call, WHO, round(at * SECOND), round(at * 1000), "work", "k", token, verdict)


def test_done_is_what_a_handler_has_said() -> None:
    assert broken(ended(1, "work", 7), settling(1, 1, 7)) == []
    assert broken(ended(1, "work", 7, "Done('done')"), settling(1, 1, 7)) == []
    assert broken(ended(1, "work", 7, "OSError('it fails')"), settling(1, 1, 7, OutcomeKind.RETRY)) == []
    assert broken(ended(1, "work", 7, "OSError('it fails')"), settling(1, 1, 7)) == ["P2"]
    assert broken(settling(1, 1, 7), ended(2, "work", 7)) == ["P2"]


def test_an_outcome_is_told_until_the_store_has_it() -> None:
    failed = Failed(2, 2 * SECOND, True, "OutcomeUnknown")
    first, again = settling(2, 1, 7, OutcomeKind.RETRY), settling(3, 3, 7, OutcomeKind.RETRY)
    assert broken(first, failed, again) == []
    assert broken(first, failed) == ["P2"]
    assert broken(first, failed, Died(WHO, 3 * SECOND)) == []
    assert broken(first, failed, Died(WHO, 60 * SECOND)) == ["P2"], "it had time enough"
    assert broken(first, failed, Fault(3 * SECOND, f"{WHO} is asked to end")) == []


def test_who_lives_keeps_its_leases() -> None:
    first: list[Event] = [leasing(1, 1), leased(1, 1.01, "work", 7)]
    taken: list[Event] = [leasing(2, 3, OTHER), leased(2, 3.01, "work", 8, losses=1)]
    assert broken(*first, *taken) == ["P3"]
    assert broken(*first, Died(WHO, 2 * SECOND), *taken) == []
    assert broken(*first, leasing(2, 3, OTHER), leased(2, 3.01, "work", 8)) == []


def test_who_has_room_begins_what_is_due() -> None:
    first: list[Event] = [leasing(1, 1), leased(1, 1.01, "slow", 7), began(1.01, "slow", 7, 1)]
    second: list[Event] = [leasing(2, 4.01), leased(2, 4.02, "slow", 8), began(4.02, "slow", 8, 2)]
    late: list[Event] = [leasing(2, 5.01), leased(2, 5.02, "slow", 8), began(5.02, "slow", 8, 2)]
    assert broken(*first, ended(4, "slow", 7), *second) == []
    assert broken(*first, ended(4, "slow", 7), *late) == ["P6"]
    assert broken(*first, leasing(3, 2.5, OTHER), ended(4, "slow", 7), *second) == ["P6"], "somebody else had room"
    gone = Fault(2_600_000_000, f"{OTHER} is asked to end")
    assert broken(*first, leasing(3, 2.5, OTHER), gone, ended(4, "slow", 7), *second) == []
    lost: list[Event] = [leasing(2, 5.01), leased(2, 5.02, "slow", 8, losses=1), late[-1]]
    assert "P6" not in broken(*first, ended(4, "slow", 7), *lost), "how late it was lost is no business of this rule"
    planned_later = replace(late[-1], planned_at=5_000)
    assert broken(*first, ended(4, "slow", 7), *late[:2], planned_later) == []


def test_a_worker_settles_what_has_ended_before_it_leases_it_again() -> None:
    first: list[Event] = [leasing(1, 1), leased(1, 1.01, "work", 7), began(1.01, "work", 7, 1), ended(3, "work", 7)]
    again = leased(2, 3.02, "work", 8, losses=1)
    told = settling(9, 3, 7, OutcomeKind.DONE)
    itself = broken(*first, leasing(2, 3.01), again)
    assert len(itself) - len(broken(*first, told, leasing(2, 3.01), again)) == 1
    assert len(itself) - len(broken(*first, leasing(2, 3.01, OTHER), again)) == 1
    for failed_at, is_found in ((2.5, False), (1.9, True)):  # then it pauses before it tells the store anything more
        failed = Failed(9, round(failed_at * SECOND), False, "StoreUnavailable")
        events: list[Event] = [*first[:-1], settling(9, 1.8, 6), failed, first[-1], leasing(2, 3.01), again]
        assert broken(*events).count("P3") == itself.count("P3") - (not is_found)
    asks = Extending(9, WHO, 2 * SECOND, 2_000, "work", "k", 7, 4_000)
    for ok in (True, False):  # what is lost, as it knows, has no outcome any more
        events = [*first[:-1], asks, Told(9, 2 * SECOND, 2_000, ok), first[-1], leasing(2, 3.01), again]
        assert broken(*events).count("P3") == itself.count("P3") - (not ok)


def test_nobody_asks_for_more_than_there_is_room_for() -> None:
    first: list[Event] = [leasing(1, 1), leased(1, 1.01, "slow", 7), began(1.01, "slow", 7, 1)]
    assert broken(*first, leasing(2, 2)) == ["P7"]
    assert broken(*first, ended(2, "slow", 7), leasing(2, 2)) == []
    assert broken(*first, leasing(2, 2, OTHER)) == []


def test_nobody_asks_again_and_again_while_nothing_happens() -> None:
    def asks(pause: float, *between: Event) -> list[Event]:
        nothing = [Leased(call, round(call * pause * SECOND), 0, [], None) for call in range(30)]
        return [event for one in nothing for event in (leasing(one.call, one.call * pause), one, *between)]

    assert broken(*asks(0.01)) == ["P11"]
    assert broken(*asks(0.5)) == []
    assert broken(*asks(0.01, Fault(0, "something happens"))) == []


def test_whoever_asks_is_answered() -> None:
    ask = Asked(1, WHO, 0, 0, Asks.CANCEL, "work", "k")
    later = Fault(60 * SECOND, "something happens")
    assert broken(ask, later) == ["P4"]
    assert broken(ask, Answered(1, SECOND, 0, Result.NOT_FOUND), later) == []
    in_the_calm = replace(ask, at=1)
    assert broken(in_the_calm, Answered(1, SECOND, 0, Result.NOT_FOUND)) == []
    assert broken(in_the_calm, Answered(1, 3 * SECOND, 0, Result.NOT_FOUND)) == ["P4"]
    assert broken(ask, Failed(1, SECOND, True, "OutcomeUnknown"), later) == []
    assert broken(ask, Died(WHO, SECOND), later) == []
    assert broken(ask, Fault(SECOND, "something happens")) == [], "it may be answered yet"


def test_nothing_begins_whose_lease_has_run_out() -> None:
    first: list[Event] = [leasing(1, 1), leased(1, 2.9, "work", 7)]
    assert broken(*first, began(2.9, "work", 7, 1)) == []
    assert broken(*first, began(3.1, "work", 7, 1)) == ["P3"]
    extending = Extending(2, WHO, 2 * SECOND, 0, "work", "k", 7, 0)
    assert broken(*first, extending, began(3.1, "work", 7, 1)) == []


def test_nothing_begins_whose_deadline_has_passed() -> None:
    def delivered(deadline: int) -> list[Event]:
        task = Seen("id", State.LEASED, 0, 0, 0, 1, 0, 0, 7, 0, deadline=deadline)
        return [leasing(1, 1), Leased(1, SECOND, 1_000, [Held("work", "k", task)], None), began(1.01, "work", 7, 1)]

    assert broken(*delivered(1_000)) == []
    assert broken(*delivered(999)) == ["P4"]
