"""What a worker owes its deliveries: each rule with a history that keeps it and one that does not."""

from __future__ import annotations

from msgspec.structs import replace

from bide.core.records import OutcomeKind, Result, State
from bide.testing.history import events as ev
from bide_proofs.simulate.judge import owed

SECOND = 1_000_000_000
WHO, OTHER = "worker-0.1", "worker-1.1"


def broken(*history: ev.Event) -> list[str]:
    return [one.promise for one in owed(history, calm=0, lease=2_000, room=_room, late=60)]


def _room(topic: str) -> int:
    return 1 if topic == "slow" else 20


def leasing(call: int, at: float, who: str = WHO) -> ev.Leasing:
    return ev.Leasing(call, who, round(at * SECOND), round(at * 1000), {"slow": 1, "work": 20}, 0)


def leased(call: int, at: float, topic: str, token: int, losses: int = 0) -> ev.Leased:
    task = ev.Seen("id", State.LEASED, 0, 0, 0, 1, 0, losses, token, 0)
    return ev.Leased(call, round(at * SECOND), round(at * 1000), [ev.Held(topic, "k", task)], None)


def began(at: float, topic: str, token: int, planned: float, who: str = WHO) -> ev.Began:
    return ev.Began(who, round(at * SECOND), round(at * 1000), topic, "k", "id", token, 1, round(planned * 1000))


def ended(at: float, topic: str, token: int, how: str = "returned", who: str = WHO) -> ev.Ended:
    return ev.Ended(who, round(at * SECOND), topic, "k", token, how)


def settling(call: int, at: float, token: int, verdict: OutcomeKind = OutcomeKind.DONE) -> ev.Settling:
    return ev.Settling(call, WHO, round(at * SECOND), round(at * 1000), "work", "k", token, verdict)


def test_done_is_what_a_handler_has_said() -> None:
    assert broken(ended(1, "work", 7), settling(1, 1, 7)) == []
    assert broken(ended(1, "work", 7, "Done('done')"), settling(1, 1, 7)) == []
    assert broken(ended(1, "work", 7, "OSError('it fails')"), settling(1, 1, 7, OutcomeKind.RETRY)) == []
    assert broken(ended(1, "work", 7, "OSError('it fails')"), settling(1, 1, 7)) == ["P2"]
    assert broken(settling(1, 1, 7), ended(2, "work", 7)) == ["P2"]


def test_an_outcome_is_told_until_the_store_has_it() -> None:
    failed = ev.Failed(2, 2 * SECOND, True, "OutcomeUnknown")
    first, again = settling(2, 1, 7, OutcomeKind.RETRY), settling(3, 3, 7, OutcomeKind.RETRY)
    assert broken(first, failed, again) == []
    assert broken(first, failed) == ["P2"]
    assert broken(first, failed, ev.Died(WHO, 3 * SECOND)) == []
    assert broken(first, failed, ev.Died(WHO, 60 * SECOND)) == ["P2"], "it had time enough"
    assert broken(first, failed, ev.Fault(3 * SECOND, f"{WHO} is asked to end")) == []


def test_who_lives_keeps_its_leases() -> None:
    first: list[ev.Event] = [leasing(1, 1), leased(1, 1.01, "work", 7)]
    taken: list[ev.Event] = [leasing(2, 3, OTHER), leased(2, 3.01, "work", 8, losses=1)]
    assert broken(*first, *taken) == ["P3"]
    assert broken(*first, ev.Died(WHO, 2 * SECOND), *taken) == []
    assert broken(*first, leasing(2, 3, OTHER), leased(2, 3.01, "work", 8)) == []


def test_who_has_room_begins_what_is_due() -> None:
    first: list[ev.Event] = [leasing(1, 1), leased(1, 1.01, "slow", 7), began(1.01, "slow", 7, 1)]
    second: list[ev.Event] = [leasing(2, 4.01), leased(2, 4.02, "slow", 8), began(4.02, "slow", 8, 2)]
    late: list[ev.Event] = [leasing(2, 5.01), leased(2, 5.02, "slow", 8), began(5.02, "slow", 8, 2)]
    assert broken(*first, ended(4, "slow", 7), *second) == []
    assert broken(*first, ended(4, "slow", 7), *late) == ["P6"]
    assert broken(*first, leasing(3, 2.5, OTHER), ended(4, "slow", 7), *second) == ["P6"], "somebody else had room"
    gone = ev.Fault(2_600_000_000, f"{OTHER} is asked to end")
    assert broken(*first, leasing(3, 2.5, OTHER), gone, ended(4, "slow", 7), *second) == []
    lost: list[ev.Event] = [leasing(2, 5.01), leased(2, 5.02, "slow", 8, losses=1), late[-1]]
    assert "P6" not in broken(*first, ended(4, "slow", 7), *lost), "how late it was lost is no business of this rule"
    planned_later = replace(late[-1], planned_at=5_000)
    assert broken(*first, ended(4, "slow", 7), *late[:2], planned_later) == []


def test_a_worker_settles_what_has_ended_before_it_leases_it_again() -> None:
    first: list[ev.Event] = [leasing(1, 1), leased(1, 1.01, "work", 7), began(1.01, "work", 7, 1), ended(3, "work", 7)]
    again = leased(2, 3.02, "work", 8, losses=1)
    told = settling(9, 3, 7, OutcomeKind.DONE)
    itself = broken(*first, leasing(2, 3.01), again)
    assert len(itself) - len(broken(*first, told, leasing(2, 3.01), again)) == 1
    assert len(itself) - len(broken(*first, leasing(2, 3.01, OTHER), again)) == 1
    for failed_at, is_found in ((2.5, False), (1.9, True)):  # then it pauses before it tells the store anything more
        failed = ev.Failed(9, round(failed_at * SECOND), False, "StoreUnavailable")
        events: list[ev.Event] = [*first[:-1], settling(9, 1.8, 6), failed, first[-1], leasing(2, 3.01), again]
        assert broken(*events).count("P3") == itself.count("P3") - (not is_found)
    asks = ev.Extending(9, WHO, 2 * SECOND, 2_000, "work", "k", 7, 4_000)
    for ok in (True, False):  # what is lost, as it knows, has no outcome any more
        events = [*first[:-1], asks, ev.Told(9, 2 * SECOND, 2_000, ok), first[-1], leasing(2, 3.01), again]
        assert broken(*events).count("P3") == itself.count("P3") - (not ok)


def test_nobody_asks_for_more_than_there_is_room_for() -> None:
    first: list[ev.Event] = [leasing(1, 1), leased(1, 1.01, "slow", 7), began(1.01, "slow", 7, 1)]
    assert broken(*first, leasing(2, 2)) == ["P7"]
    assert broken(*first, ended(2, "slow", 7), leasing(2, 2)) == []
    assert broken(*first, leasing(2, 2, OTHER)) == []


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


def test_nothing_begins_whose_lease_has_run_out() -> None:
    first: list[ev.Event] = [leasing(1, 1), leased(1, 2.9, "work", 7)]
    assert broken(*first, began(2.9, "work", 7, 1)) == []
    assert broken(*first, began(3.1, "work", 7, 1)) == ["P3"]
    extending = ev.Extending(2, WHO, 2 * SECOND, 0, "work", "k", 7, 0)
    assert broken(*first, extending, began(3.1, "work", 7, 1)) == []


def test_nothing_begins_whose_deadline_has_passed() -> None:
    def delivered(deadline: int) -> list[ev.Event]:
        task = ev.Seen("id", State.LEASED, 0, 0, 0, 1, 0, 0, 7, 0, deadline=deadline)
        return [
            leasing(1, 1),
            ev.Leased(1, SECOND, 1_000, [ev.Held("work", "k", task)], None),
            began(1.01, "work", 7, 1),
        ]

    assert broken(*delivered(1_000)) == []
    assert broken(*delivered(999)) == ["P4"]
