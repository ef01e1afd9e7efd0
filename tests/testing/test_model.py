"""The small model: nothing is broken in it as it is, and each of its mechanisms is missed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bide.core.lifecycle import TABLE
from bide.core.lifecycle import Verb as TrueVerb
from bide.core.records import State
from bide_proofs.model import MORE_VERBS, Bounds, Explorer, Rules, Verb
from bide_proofs.model.__main__ import defects
from bide_proofs.model.store import (
    ABSENT,
    CANCELLED,
    DEAD,
    DONE,
    LEASED,
    LIVE,
    WAITING,
    WORDS,
    Answer,
    Body,
    Ref,
    Shared,
    Store,
)

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "correctness.md"
STATES = (ABSENT, WAITING, LEASED, DONE, CANCELLED, DEAD)
KEPT = Bounds(keep=1)
"""So that an ended task can be seen in its state."""

SHOWS = {
    "checks_token": "P3",
    "extend_checks_token": "P3",
    "lease_raises_token": "P12",
    "replace_raises_token": "P12",
    "tokens_outlive": "P12",
    "new_life_new_id": "P4",
    "leases_what_was_lost": "P2",
    "cancel_knows_leased": "P4",
    "move_spares_leased": "P3",
    "journal": "P5",
    "numbers_rise": "P5",
    "subscribes_first": "P8",
    "forgets_before": "P8",
    "capped": "P2",
    "caps_from_sending": "P8",
    "tells_of_retry": "P8",
    "next_wake_of_leased": "P8",
    "looks_before_it_begins": "P4",
    "counts_from_sending": "P4",
    "leases_early": "P1",
    "settles_before_it_begins": "P2",
    "move_in_two_steps": "P2",
    "index_left_behind": "P10",
    "purges_what_waits": "P2",
}
"""What breaks first without it, in the order of ways that are as short as can be."""


def the_store(state: str) -> Shared:
    """One with a task in that state: due, and with a token that has been given."""
    if state == ABSENT:
        return Shared(token=1)
    live = state in LIVE
    return Shared(Body(state, 0, 1), 0 if live else None, 1, live)


HOLDER = Ref(1, True, True)


def asked(verb: TrueVerb, shared: Shared) -> Answer:
    """What the model's store does."""
    store = Store(Rules(), KEPT)
    if verb is TrueVerb.LEASE:
        return store.lease(shared, 1)
    if verb is TrueVerb.EXTEND:
        return store.extend(shared, HOLDER)
    if verb.startswith("settle"):
        return store.settle(shared, HOLDER, verb.removeprefix("settle "), True)
    # a time that wins: earlier than what waits would need one before now
    delay = 1 if verb is TrueVerb.LATEST else 0
    if verb is TrueVerb.EARLIEST and shared.body is not None and shared.state == WAITING:
        shared = shared._replace(body=shared.body._replace(wake=2), entry=2)
    return store.ask(shared, Verb(verb.value, delay))


@pytest.mark.parametrize("verb", [verb for verb in TrueVerb if verb is not TrueVerb.AGAIN])
def test_the_model_has_the_table_of_the_lifecycle(verb: TrueVerb) -> None:
    for name in STATES:
        word, to = TABLE[verb][None if name == ABSENT else State(name)]
        answer = asked(verb, the_store(name))
        assert answer.shared.state == (ABSENT if to is None else to), (verb, name)
        if verb.value in WORDS:
            assert answer.word == word, (verb, name)
        else:
            assert (answer.word in ("granted", "accepted")) is (word == "taken"), (verb, name)


def test_the_verbs_of_the_largest_size_are_all_there_are() -> None:
    assert {verb.name for verb in MORE_VERBS} == set(WORDS)
    assert set(WORDS) == {verb.value for verb in list(TrueVerb)[:8]}


@pytest.mark.parametrize(
    "bounds",
    [
        Bounds(verbs=(1, 1), loose=0),
        Bounds(verbs=(1, 0), may=MORE_VERBS, keep=1, verdicts=("done", "retry", "dead"), loose=0),
        Bounds(verbs=(1, 0), lease=1, cap=2, loose=0),
        Bounds(verbs=(1, 0), lease=3, cap=1, loose=0),
    ],
    ids=["two clients", "every verb", "a short lease", "a long lease"],
)
def test_nothing_is_broken_in_any_order(bounds: Bounds) -> None:
    found = Explorer(Rules(), bounds).explore()
    assert found.broken == "", "\n".join(found.trace)
    assert found.states > 1_000
    assert found.transitions > 5 * found.states
    assert found.lateness <= bounds.latest


def test_what_could_go_wrong_was_there_to_go_wrong() -> None:
    """A model in which nothing happens keeps every promise."""
    explorer = Explorer(Rules(), Bounds(verbs=(2, 0), lease=1, cap=1))
    assert explorer.explore().broken == ""
    steps = explorer.steps()
    for expected in (
        "answer: under_way", "answer: cancelled_while_leased", "answer: replaced", "answer: not_found", "which is lost",
        "given up", "a delayed move to +2 of {me} arrives: under_way", "answered as before", "wake-up for {me} is lost",
        "a wake-up is still on its way", "has heard of a wake meanwhile", "alarm rings early",
        "lease has ended before its handler began", "refused to extend: its handler is cancelled", "(retry): accepted",
        "(done): refused", "and the answer is lost", "a delayed lease of {me} arrives: the task is leased",
        "a delayed settle of {me} arrives: accepted", "a delayed extend of {me} arrives: accepted",
        "a delayed request of {me} never arrives", "what it had sent is still on its way", "gives the task back",
    ):  # fmt: skip
        assert any(expected in step for step in steps), expected


def test_losing_every_wake_up_costs_the_longest_sleep_and_no_less() -> None:
    sizes = [Bounds(verbs=(2, 0), lease=1, cap=cap, loose=0) for cap in (1, 2, 3)]
    assert [Explorer(Rules(), bounds).explore().lateness for bounds in sizes] == [1, 2, 3]


def test_states_that_differ_in_who_is_who_are_one() -> None:
    ways = [Explorer(Rules(), Bounds(verbs=verbs, loose=0)).explore() for verbs in ((1, 0), (0, 1))]
    assert ways[0].states == ways[1].states


def test_each_mechanism_is_missed_as_the_document_says() -> None:
    assert set(SHOWS) == set(Rules._fields)
    told = {}
    for rule, found in defects():
        assert found.broken.startswith(SHOWS[rule] + ":"), (rule, found.broken)
        told[rule] = (found.broken, str(found.trace.index(found.broken)))
        assert not any(step.startswith("P") for step in found.trace[: int(told[rule][1])])
    rows = re.findall(r"^\| `(\w+)`: [^|]+ \| ([^|]+) \| (\d+) \|$", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    assert {rule: (broken, steps) for rule, broken, steps in rows} == told


def test_a_trace_is_the_shortest_way_in_words() -> None:
    [(_, found)] = defects(["cancel_knows_leased"])
    assert found.trace == (
        "client 1 asks: schedule replace to +1; answer: created [waiting, due in 1]",
        "an instant passes [waiting, due]",
        "the store carries out worker A's lease: the task is leased [leased for another 2]",
        "worker A hears that it has the lease [leased for another 2]",
        "client 2 asks: cancel; answer: cancelled [no task]",
        "worker A's handler begins [no task]",
        "P4: a delivery began after `cancelled` was answered",
    )


def test_what_is_stuck_is_told_to_its_end() -> None:
    [(_, found)] = defects(["capped"])
    assert "from here, if nothing goes wrong any more:" in found.trace
    assert any("sleeps, with no alarm" in step for step in found.trace)
    assert found.trace[-1] == "and so on for ever"


def test_the_command_tells_what_was_found() -> None:
    command = [sys.executable, "-m", "bide_proofs.model"]
    done = subprocess.run(
        [*command, "--without", "leases_early", "--json"], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["without"] == "leases_early"
    assert told["broken"].startswith("P1:")
    unknown = subprocess.run([*command, "--without", "luck"], capture_output=True, text=True, check=False, timeout=300)
    assert unknown.returncode == 2
    assert "luck" in unknown.stderr
