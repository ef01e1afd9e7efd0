"""What pytest and models make of tasks."""

from __future__ import annotations

import json
import re
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.programs import python

from bide import BadInput, BadPayload, Bide, Retry, SetupError, Task
from bide.core.lifecycle import TABLE
from bide.core.lifecycle import Verb as TrueVerb
from bide.core.records import State
from bide.testing import task_for
from bide_proofs.model import MORE_VERBS, Bounds, Explorer, Rules, Verb
from bide_proofs.model import store as model
from bide_proofs.model.__main__ import defects

app = Bide("memory:")


@dataclass
class Order:
    number: int


@app.handler("order.close")
async def close(task: Task[Order]) -> Retry | None:
    if task.attempt < 3:
        return Retry(f"{task.payload.number} is not there yet: {task.error}")
    return None


@app.handler("order.pay")
async def pay(task: Task[Order]) -> None:
    async with task.transaction() as conn:
        conn.execute("UPDATE orders SET status = 'paid' WHERE number = ?", (task.payload.number,))
        if task.payload.number == 13:
            raise ConnectionError("after the effect")


@app.handler("report.render")
def render(task: Task[str]) -> None:
    task.payload.upper()


async def test_a_handler_is_called_like_the_function_that_it_is() -> None:
    outcome = await close(task_for(close, Order(42), attempt=2, error="ConnectionError: away"))
    assert isinstance(outcome, Retry)
    assert outcome.why == "42 is not there yet: ConnectionError: away"
    assert await close(task_for(close, Order(42), attempt=3)) is None
    render(task_for(render, "sales"))


def test_what_the_handler_sees() -> None:
    task = task_for(
        close, Order(42), key="42", group="user-7", attempt=3, id="life", token=9, due_at="2030-01-31T08:00:00+01:00",
        deadline=datetime(2030, 2, 1, tzinfo=UTC), headers={"traceparent": "00-1"},
    )  # fmt: skip
    assert (task.topic, task.key, task.group, task.id, task.token) == ("order.close", "42", "user-7", "life", 9)
    assert (task.state, task.attempt, task.failures, task.error) == ("leased", 3, 2, None)
    assert task.payload == Order(42)
    assert task.payload_bytes == b'{"number":42}'
    assert task.due_at == task.planned_at == datetime(2030, 1, 31, 7, tzinfo=UTC)
    assert task.deadline == datetime(2030, 2, 1, tzinfo=UTC)
    assert task.headers == {"traceparent": "00-1"}
    assert task.lateness == timedelta(0)


def test_it_is_as_late_as_one_says() -> None:
    task = task_for(close, Order(42), late="3s")
    assert task.lateness == timedelta(seconds=3)
    assert app.now() - task.due_at >= timedelta(seconds=3)
    assert task_for(close, Order(42), failures=0, attempt=4).failures == 0


def test_by_topic_alone_the_payload_is_what_json_holds() -> None:
    task = task_for("somebody.else", {"number": 42})
    assert (task.topic, task.payload) == ("somebody.else", {"number": 42})


def test_a_wrong_payload_is_refused_as_it_would_be_at_schedule() -> None:
    wrong: Any = {"number": "forty-two"}
    with pytest.raises(BadPayload, match="Expected `int`"):
        task_for(close, wrong)
    for attempt in (0, "2"):
        with pytest.raises(BadInput, match="attempt"):
            task_for(close, Order(42), attempt=attempt)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="topic"):
        task_for("", None)


@pytest.mark.parametrize("isolation", ["", None], ids=["implicit", "explicit"])
async def test_its_transaction_is_the_tests_own_connection(isolation: Any) -> None:
    with closing(sqlite3.connect(":memory:", isolation_level=isolation)) as database:
        database.execute("CREATE TABLE orders (number INTEGER, status TEXT)")
        database.execute("INSERT INTO orders VALUES (42, 'unpaid'), (13, 'unpaid')")
        database.commit()
        await pay(task_for(pay, Order(42), connection=database))
        with pytest.raises(ConnectionError):
            await pay(task_for(pay, Order(13), connection=database))
        database.rollback()
        assert database.execute("SELECT * FROM orders").fetchall() == [(42, "paid"), (13, "unpaid")]


async def test_without_a_connection_a_transaction_says_what_is_missing() -> None:
    with pytest.raises(SetupError, match="connection="):
        await pay(task_for(pay, Order(42)))


async def test_a_lease_is_always_kept() -> None:
    assert await task_for(close, Order(42)).extend("30s")
    with pytest.raises(BadInput):
        await task_for(close, Order(42)).extend("soon")


def test_helpers_are_loaded_when_they_are_asked_for() -> None:
    code = (
        "import sys, bide.testing\n"
        "assert not [name for name in sys.modules if name.startswith('bide.testing.')]\n"
        "assert all(getattr(bide.testing, name) for name in bide.testing.__all__)\n"
        "assert not {'pytest', 'hypothesis'} & set(sys.modules)\n"
        "try: bide.testing.nothing\n"
        "except AttributeError as error: print(error)\n"
    )
    assert "nothing" in python("-c", code).stdout


SHOP = """
from bide import Bide, Task

app = Bide("sqlite:////nowhere/that/exists.db")
closed = []

@app.handler("order.close")
async def close(task: Task[int]) -> None:
    closed.append(task.payload)

def number_of_the_next_order():
    return 42
"""
CONFTEST = """
import pytest
import shop

@pytest.fixture
def bide_app():
    return shop.app
"""
CLOSES = """
import shop

async def test_it_closes_after_15_minutes(bide_time):
    await shop.close.schedule(42, key="42", delay="15m")
    assert await bide_time.advance("14m59s") == []
    fired = await bide_time.advance("1s")
    assert [task.ref for task in fired] == [("order.close", "42")]
    assert shop.closed == [42]

async def test_each_test_begins_with_nothing(bide_time):
    assert await bide_time.waiting() == []
"""
FAILS = """
async def test_it_fails(bide_time):
    await shop.close.schedule(42, key="42", delay="15m")
    assert [task.ref for task in await bide_time.advance("15m")] == []
"""
PLAIN = """
import shop

def test_what_has_nothing_to_do_with_time():
    assert shop.number_of_the_next_order() == 42
"""
LOADED = """
import sys

def test_loaded():
    assert not {"sqlite3", "click", "rich", "bide.testing.time_machine", "bide.stores.memory"} & set(sys.modules)
"""
WITHOUT_ASYNC_PLUGIN = """
import sys
sys.modules["pytest_asyncio"] = None  # as if it were not installed
import pytest
sys.exit(pytest.main(["-q", "-W", "error", "-p", "no:cacheprovider", "-p", "bide.testing.plugin", *sys.argv[1:]]))
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(SHOP, encoding="utf-8")
    (tmp_path / "conftest.py").write_text(CONFTEST, encoding="utf-8")
    return tmp_path


def run(project: Path, test: str, *command: str, code: int = 0, **environ: str) -> str:
    """What the tests of the project say, run as its owner would."""
    (project / "test_shop.py").write_text(test, encoding="utf-8")
    words = command or ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "asyncio_mode=auto")
    return python(*words, cwd=project, code=code, environ={"PYTHONPATH": str(project), **environ}).stdout


def test_time_moves_in_a_users_project_with_nothing_switched_on_and_a_failing_test_shows_what_fired(
    project: Path,
) -> None:
    said = run(project, CLOSES + FAILS, code=1)
    assert "1 failed, 2 passed" in said
    assert "('order.close', '42')" in said
    assert "warning" not in said.lower()


def test_without_a_bide_app_it_says_what_to_write(project: Path) -> None:
    (project / "conftest.py").unlink()
    assert "define a fixture `bide_app` that returns your Bide app" in run(project, CLOSES, code=1)


def test_without_an_async_plugin_a_project_runs_as_before(project: Path) -> None:
    said = run(project, PLAIN, "-c", WITHOUT_ASYNC_PLUGIN, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    assert "1 passed" in said


def test_a_project_that_does_not_use_it_loads_next_to_nothing(project: Path) -> None:
    (project / "conftest.py").unlink()
    run(project, LOADED)


DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "correctness.md"
STATES = (model.ABSENT, model.WAITING, model.LEASED, model.DONE, model.CANCELLED, model.DEAD)
KEPT = Bounds(keep=1)
"""So that an ended task can be seen in its state."""

SHOWS = {
    "checks_token": "P3", "extend_checks_token": "P3", "lease_raises_token": "P12", "replace_raises_token": "P12",
    "tokens_outlive": "P12", "new_life_new_id": "P4", "leases_what_was_lost": "P2", "cancel_knows_leased": "P4",
    "move_spares_leased": "P3", "journal": "P5", "numbers_rise": "P5", "subscribes_first": "P8",
    "forgets_before": "P8", "capped": "P2", "caps_from_sending": "P8", "tells_of_retry": "P8",
    "next_wake_of_leased": "P8", "looks_before_it_begins": "P4", "counts_from_sending": "P4", "leases_early": "P1",
    "settles_before_it_begins": "P2", "move_in_two_steps": "P2", "index_left_behind": "P10",
    "purges_what_waits": "P2",
}  # fmt: skip
"""What breaks first without it, in the order of ways that are as short as can be."""


def the_store(state: str) -> model.Shared:
    """One with a task in that state: due, and with a token that has been given."""
    if state == model.ABSENT:
        return model.Shared(token=1)
    live = state in model.LIVE
    return model.Shared(model.Body(state, 0, 1), 0 if live else None, 1, live)


HOLDER = model.Ref(1, True, True)


def asked(verb: TrueVerb, shared: model.Shared) -> model.Answer:
    """What the model's store does."""
    store = model.Store(Rules(), KEPT)
    if verb is TrueVerb.LEASE:
        return store.lease(shared, 1)
    if verb is TrueVerb.EXTEND:
        return store.extend(shared, HOLDER)
    if verb.startswith("settle"):
        return store.settle(shared, HOLDER, verb.removeprefix("settle "), True)
    # a time that wins: earlier than what waits would need one before now
    delay = 1 if verb is TrueVerb.LATEST else 0
    if verb is TrueVerb.EARLIEST and shared.body is not None and shared.state == model.WAITING:
        shared = shared._replace(body=shared.body._replace(wake=2), entry=2)
    return store.ask(shared, Verb(verb.value, delay))


@pytest.mark.parametrize("verb", [verb for verb in TrueVerb if verb is not TrueVerb.AGAIN])
def test_the_model_has_the_table_of_the_lifecycle(verb: TrueVerb) -> None:
    for name in STATES:
        word, to = TABLE[verb][None if name == model.ABSENT else State(name)]
        answer = asked(verb, the_store(name))
        assert answer.shared.state == (model.ABSENT if to is None else to), (verb, name)
        if verb.value in model.WORDS:
            assert answer.word == word, (verb, name)
        else:
            assert (answer.word in ("granted", "accepted")) is (word == "taken"), (verb, name)


def test_the_verbs_of_the_largest_size_are_all_there_are() -> None:
    assert {verb.name for verb in MORE_VERBS} == set(model.WORDS)
    assert set(model.WORDS) == {verb.value for verb in list(TrueVerb)[:8]}


@pytest.mark.parametrize(
    "bounds",
    [
        Bounds(verbs=(2, 1), loose=0),
        Bounds(verbs=(1, 0), may=MORE_VERBS, keep=1, verdicts=("done", "retry", "dead"), loose=0),
        Bounds(verbs=(1, 0), lease=1, cap=2, loose=0),
        Bounds(verbs=(1, 0), lease=3, cap=1, loose=0),
    ],
    ids=["two clients", "every verb", "a short lease", "a long lease"],
)
def test_nothing_is_broken_in_any_order(bounds: Bounds) -> None:
    explorer = Explorer(Rules(), bounds)
    found = explorer.explore()
    assert found.broken == "", "\n".join(found.trace)
    assert found.states > 1_000
    different = {(state[0], *sorted(state[1:3]), *sorted(state[3:])) for state in explorer._order}
    assert len(different) == found.states, "states that differ only in who is who are one"
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
    command = ("-m", "bide_proofs.model", "--without")
    told = json.loads(python(*command, "leases_early", "--json").stdout)
    assert told["without"] == "leases_early"
    assert told["broken"].startswith("P1:")
    assert "luck" in python(*command, "luck", code=2).stderr
