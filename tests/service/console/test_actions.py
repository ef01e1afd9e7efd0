"""Actions of the console, by its forms as a browser sends them: on one task, on those chosen, on all that match."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.service.calling import Api, Running, running
from tests.service.console.browsing import Browser, over
from tests.service.console.conftest import Visit
from tests.service.test_access import make
from tests.waiting import wait_until

from bide.core.events import Event
from bide.core.names import SHOWN_TOPIC
from bide.core.records import Filter, State
from bide.engine.settings_store import SettingsStore
from bide.insight.bulk import BulkRequest, BulkVerb
from bide.insight.bulk_run import KEPT, LOST_AFTER, BulkState, Progress
from bide.service.access import Verb
from bide.service.console.actions import ACTIONS, REASONS
from bide.service.console.i18n import translations
from bide.service.console.rendering import ref_field

HOUR = 3_600_000


@pytest.fixture(scope="module")
def one() -> Iterator[Running]:
    """Of the stores, tests/insight/test_bulk.py plays every change on each."""
    with running("memory:", keep_cancelled="1h") as found:
        yield found


@pytest.fixture
def api(browser: Browser) -> Api:
    return browser.api


def fill(one: Running, topic: str, number: int, **more: Any) -> None:
    how = {"delay": "2h", **more}
    one.run(one.app.schedule_many([one.app.new(topic, n, key=f"k{n:03}", **how) for n in range(number)]))


def seen(one: Running, topic: str, key: str) -> tuple[str, str]:
    """The field of a form that names this task as it now is."""
    task = one.run(one.app.get(topic, key))
    assert task is not None
    return "ref", ref_field(task.record)


def noted(one: Running, topic: str, key: str, what: str) -> Event:
    """The newest event of a task, once it is this one: it is written down a moment after it happened."""

    def newest() -> Event | None:
        found = one.run(one.app.events(topic, key))
        return found[0] if found and found[0].what == what else None

    event = wait_until(newest, f"the event {what} of {key}")
    assert event is not None
    return event


# --- one


def test_one_task_is_changed_at_once(one: Running, browser: Browser, api: Api, topic: str) -> None:
    fill(one, topic, 4)
    page = browser.send([("verb", "move"), seen(one, topic, "k000"), ("to", "9h")])
    assert browser.status == 200
    assert "Move: " in page.words
    assert " moved " in page.words
    assert "Would have woken at" in page.words
    due = api.get(topic, "k000")["due_at"]
    browser.send(
        [("verb", "shift"), ("scope", "chosen"), seen(one, topic, "k000"), ("by", "-1h"), ("back", "/changes?x=1")]
    )
    assert browser.where == "/changes?x=1&said=moved"
    assert api.get(topic, "k000")["due_at"] < due
    browser.send([("verb", "fire"), seen(one, topic, "k001")])
    assert api.lease(topic)[0]["key"] == "k001"
    browser.send([("verb", "cancel"), seen(one, topic, "k002"), ("back", "https://evil.example/")])
    assert browser.where == "/changes", "never to another site"
    assert api.get(topic, "k002")["state"] == "cancelled"
    assert noted(one, topic, "k002", "cancel: cancelled").who == "anonymous"


def test_a_stale_page_is_told_what_changed_meanwhile(one: Running, browser: Browser, api: Api, topic: str) -> None:
    fill(one, topic, 1)
    ref = seen(one, topic, "k000")
    api.done("PATCH", f"/v1/topics/{topic}/tasks/k000", {"delay": "5h"})
    noted(one, topic, "k000", "reschedule: moved")
    page = browser.send([("verb", "cancel"), ref, ("back", "/changes")])
    assert browser.status == 409
    assert "Not done: stale_token" in page.words
    assert "it was changed in the meantime" in page.words
    assert "As you saw it since" in page.words
    assert "reschedule: moved" in page.words
    assert "anonymous" in page.words
    assert api.get(topic, "k000")["state"] == "waiting"
    browser.press("Do it anyway, to the task as it is now")
    assert api.get(topic, "k000")["state"] == "cancelled"
    noted(one, topic, "k000", "cancel: cancelled")
    page = browser.send([("verb", "fire"), ref])
    assert browser.status == 409
    assert "Not done: finished" in page.words
    assert "cancel: cancelled" in page.words
    fill(one, topic, 2)
    api.done("POST", "/v1/fire", [{"topic": topic, "key": "k001"}])
    [leased] = api.lease(topic)
    page = browser.send([("verb", "move"), seen(one, topic, "k001"), ("to", "1h")])
    assert "Not done: under_way" in page.words
    assert "Held by" in page.words
    assert api.settle(leased, "done")
    page = browser.send([("verb", "cancel"), ("ref", f"{topic}/nothing@5")])
    assert "Not done: not_found" in page.words


@pytest.mark.parametrize(
    ("language", "one_task", "on_page", "many"),
    [
        ("en", "has passed (2d 2h ago), so it is due now", "has passed (2d 2h ago), so it is due now",
         "has passed (2d 2h ago), so each task becomes due now"),
        ("zh", "已经过去（2天2小时前），因此任务现已到期", "一个过去的时间（2天2小时前），因此现已到期",
         "已经过去（2天2小时前），因此每个任务都立即到期"),
    ],
)  # fmt: skip
def test_a_time_that_is_over_is_said(
    one: Running, visit: Visit, topic: str, language: str, one_task: str, on_page: str, many: str
) -> None:
    browser = visit(one, language=language)
    fill(one, topic, 3)
    page = browser.send([("verb", "move"), seen(one, topic, "k000"), ("to", "-50h")])
    assert one_task in page.words
    page = browser.send([("verb", "move"), seen(one, topic, "k001"), ("to", "-50h"), ("back", f"/tasks/{topic}/k001")])
    assert on_page in page.words
    page = browser.send([("verb", "move"), ("scope", "matching"), ("topic", topic), ("to", "-50h")])
    assert many in page.words
    page = browser.send([("verb", "move"), seen(one, topic, "k002"), ("to", "9h")])
    assert one_task not in page.words


# --- many


def test_all_that_match_are_previewed_confirmed_and_done_once(
    one: Running, browser: Browser, api: Api, topic: str
) -> None:
    fill(one, topic, 25)
    before = api.get(topic, "k007")["due_at"]
    page = browser.send([("verb", "shift"), ("scope", "matching"), ("topic", topic), ("by", "1h"), ("pace", "")])
    assert browser.status == 200
    assert "Confirm: Shift" in page.words
    assert "25 tasks" in page.words
    assert "Each becomes due 1h later." in page.words
    assert len(page.rows) == 11, "ten of them are shown"
    assert api.get(topic, "k007")["due_at"] == before, "nothing has happened"
    form = page.form("Shift: 25 tasks")
    browser.press("Shift: 25 tasks")
    ended = over(browser)
    assert "25 moved" in ended.words
    assert "dealt with, of 25" in ended.words
    where = browser.where
    browser.send([pair for pair in form.fields if pair[0] != "csrf"])
    assert browser.where == where, "a form that is sent again starts nothing"
    tasks = api.done("GET", f"/v1/tasks?topic={topic}&limit=100")["tasks"]
    assert {task["due_at"] for task in tasks} != {before}
    assert api.get(topic, "k007")["due_at"] > before
    event = noted(one, topic, "k007", "shift: moved")
    assert event.who == "anonymous"
    assert event.was is not None
    assert event.wake_at == event.was + HOUR
    page = browser.open("/changes")
    assert topic in page.words
    assert "anonymous" in page.words
    assert where in page.hrefs


def test_those_chosen_are_done_with_the_reasons_for_those_that_were_not(
    one: Running, browser: Browser, api: Api, topic: str
) -> None:
    fill(one, topic, 5)
    refs = [seen(one, topic, f"k{n:03}") for n in range(5)]
    api.done("PATCH", f"/v1/topics/{topic}/tasks/k001", {"delay": "5h"})
    noted(one, topic, "k001", "reschedule: moved")
    page = browser.send([("verb", "cancel"), ("scope", "chosen"), *refs])
    assert "4 tasks" in page.words
    assert "1 of the chosen tasks have changed or gone" in page.words
    assert "This cannot be undone" in page.words
    browser.press("Cancel: 4 tasks")
    ended = over(browser)
    assert "4 cancelled" in ended.words
    assert "1 stale_token" in ended.words
    assert "last by anonymous : reschedule: moved" in ended.words
    assert "seen as of" in ended.words
    assert api.get(topic, "k001")["state"] == "waiting"


def test_a_preview_warns_of_what_is_paused_and_what_is_under_way(
    one: Running, browser: Browser, api: Api, topic: str
) -> None:
    fill(one, topic, 3)
    api.done("POST", "/v1/fire", [{"topic": topic, "key": "k002"}])
    assert api.lease(topic)
    one.run(one.app.pause(topic))
    page = browser.send([("verb", "fire"), ("scope", "matching"), ("topic", topic)])
    assert "1 of them are being delivered now: they will be left unchanged." in page.words
    assert "Paused topics, whose tasks are not delivered until they are resumed:" in page.words
    page = browser.send([("verb", "cancel"), ("scope", "matching"), ("topic", topic)])
    assert "1 of them are being delivered now: their handlers are told to stop" in page.words
    assert "Paused" not in page.words
    page = browser.send([("verb", "fire"), seen(one, topic, "k000")])
    assert "Its topic is paused" in page.words
    one.run(one.app.resume(topic))


def test_nothing_that_matches_is_said(browser: Browser, topic: str) -> None:
    page = browser.send([("verb", "cancel"), ("scope", "matching"), ("topic", topic)])
    assert "No task matches, so there is nothing to do." in page.words
    assert "/changes" not in page.actions


def test_times_are_fixed_by_the_preview(one: Running, browser: Browser, topic: str) -> None:
    fill(one, topic, 2)
    began = one.app.clock.now()
    page = browser.send(
        [("verb", "move"), ("scope", "matching"), ("topic", topic), ("to", "90m"), ("wake_before", "3h")]
    )
    fields = dict(page.form("Move: 2 tasks").fields)
    now = one.app.clock.now()
    for name, hours in (("to", 1.5), ("wake_before", 3)):
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", fields[name])
        assert began <= round(_seconds(fields[name]) * 1000) - hours * HOUR <= now
    browser.press("Move: 2 tasks")
    assert "2 moved" in over(browser).words


def test_a_confirmed_change_covers_what_the_preview_did(one: Running, browser: Browser, topic: str) -> None:
    began = one.app.clock.now()
    fill(one, topic, 2)
    browser.send([("verb", "cancel"), ("scope", "matching"), ("topic", topic)])
    preview = browser.page
    asked = int(dict(preview.form("Cancel: 2 tasks").fields)["asked"])
    assert began <= asked <= one.app.clock.now()
    browser.press("Cancel: 2 tasks", asked=str(began - HOUR))
    assert "2 cancelled" not in over(browser).words, "they came after the preview"
    browser.page = preview
    browser.press("Cancel: 2 tasks", id="", asked=str(asked + HOUR))
    assert "2 cancelled" in over(browser).words


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ([("verb", "explode")], "verb"),
        ([("verb", "cancel")], "tasks"),
        ([("verb", "cancel"), ("scope", "some")], "scope"),
        ([("verb", "cancel"), ("ref", "nonsense")], "ref"),
        ([("verb", "move"), ("scope", "matching"), ("to", "tomorrow")], "to"),
        ([("verb", "move"), ("scope", "matching")], "to"),
        ([("verb", "shift"), ("scope", "matching"), ("by", "0s")], "by"),
        ([("verb", "shift"), ("scope", "matching"), ("by", "5 apples")], "by"),
        ([("verb", "cancel"), ("scope", "matching"), ("pace", "fast")], "pace"),
        ([("verb", "cancel"), ("scope", "matching"), ("state", "dead")], "state"),
        ([("verb", "cancel"), ("scope", "matching"), ("topic", "bide:settings")], "topic"),
        ([("verb", "cancel"), ("scope", "matching"), ("confirm", "yes"), ("id", "../x")], "id"),
        ([("verb", "cancel"), ("scope", "matching"), ("confirm", "yes"), ("asked", "soon")], "asked"),
        ([("verb", "shift"), ("by", "1h"), ("scope", "matching"), ("since", "-4")], "since"),
    ],
)
def test_bad_fields_are_named(browser: Browser, fields: list[tuple[str, str]], field: str) -> None:
    page = browser.send(fields)
    assert browser.status == 422
    assert field in page.words


def test_deadlines_are_shifted_along_where_one_says_so(one: Running, browser: Browser, api: Api, topic: str) -> None:
    fill(one, topic, 3, deadline="3h")
    asked = [("verb", "shift"), ("scope", "matching"), ("topic", topic), ("by", "5h")]
    assert "unchanged: past its deadline" in browser.send(asked).words
    browser.press("Shift: 3 tasks")
    ended = over(browser)
    assert "3 refused" in ended.words
    assert "the new time lies past its deadline" in ended.words
    browser.send(asked)
    browser.press("Shift: 3 tasks", ticked=["yes"])
    ended = over(browser)
    assert "3 moved" in ended.words
    assert "Deadlines move too." in ended.words


# --- progress


def test_it_is_stopped_and_gone_on_with(one: Running, browser: Browser, api: Api, topic: str) -> None:
    fill(one, topic, 300)
    due = {task["key"]: task["due_at"] for task in _all(api, topic)}
    browser.send([("verb", "shift"), ("scope", "matching"), ("topic", topic), ("by", "1h")])
    browser.press("Shift: 300 tasks", pace="1")
    assert "1 per second" in browser.page.words
    where = browser.where
    live = browser.open(f"{where}/live")
    assert not live.all("html")
    wait_until(lambda: " moved" in browser.open(where).words, "the first to be moved")
    browser.press("Stop")
    stopped = over(browser)
    assert "Stopped by anonymous 20" in stopped.words
    browser.press("Continue with the rest")
    left = re.search(r"(\d+) tasks Each becomes due", browser.page.words)
    assert left is not None, browser.page.words
    assert 0 < int(left[1]) < 300
    browser.press(f"Shift: {left[1]} tasks", pace="")
    assert f"{left[1]} moved" in over(browser).words
    moved = {task["key"]: task["due_at"] for task in _all(api, topic)}
    assert {_seconds(moved[key]) - _seconds(due[key]) for key in due} == {3600}, "each once"


def _all(api: Api, topic: str) -> list[dict[str, str]]:
    found: list[dict[str, str]] = api.done("GET", f"/v1/tasks?topic={topic}&limit=500")["tasks"]
    return found


def test_one_that_lost_its_instance_says_what_was_done(one: Running, browser: Browser, topic: str) -> None:
    fill(one, topic, 3)
    now = one.app.clock.now() - LOST_AFTER - 5_000
    progress = Progress(
        id="018f3c5e-aaaa-7bbb-8ccc-" + secrets.token_hex(6), chosen=0, who="ann", instance="gone:1234", asked_at=now,
        bulk=BulkRequest(verb=BulkVerb.CANCEL, where=Filter(topic=topic), pace=5), alive_at=now, started_at=now,
        state=BulkState.RUNNING, looked=4, total=7, counts={"cancelled": 4},
    )  # fmt: skip

    kept, row = SettingsStore(one.app.store, one.app.clock, SHOWN_TOPIC), msgspec.msgpack.encode(progress)
    one.run(kept.put(f"change:{progress.id}", row, until=now + KEPT))
    page = browser.open(f"/changes/{progress.id}")
    assert "Interrupted: its instance has not reported" in page.words
    assert "dealt with, of 7" in page.words
    assert "Stop" not in [each["text"] for form in page.forms for each in form.buttons]
    browser.press("Continue with the rest")
    assert dict(browser.page.form("Cancel: 3 tasks").fields)["pace"] == "5"
    browser.press("Cancel: 3 tasks", pace="")
    assert "3 cancelled" in over(browser).words


def test_a_change_that_is_not_there(browser: Browser) -> None:
    assert "No such change" in browser.open("/changes/018f3c5e-aaaa-7bbb-8ccc-0123456789ab").words
    assert browser.status == 404
    browser.open("/changes/nonsense")
    assert browser.status == 422


# --- who may


def test_rights_hold_for_each_task(tmp_path: Path, visit: Visit) -> None:
    with running(f"sqlite:///{tmp_path}/tasks.db") as one:
        for topic in ("mine.a", "mine.b", "theirs"):
            fill(one, topic, 3)
        _, token = one.run(make(one.app, "ann", frozenset({Verb.READ, Verb.CANCEL}), ("mine.*",)))
        _, watcher = one.run(make(one.app, "bo", frozenset({Verb.READ})))
        _, stranger = one.run(make(one.app, "cy", frozenset({Verb.READ}), ("other.*",)))
        browser = visit(one)
        browser.log_in(token)
        page = browser.send([("verb", "cancel"), ("scope", "matching")])
        assert "6 tasks" in page.words
        assert "theirs" not in page.words
        browser.press("Cancel: 6 tasks")
        assert "6 cancelled" in over(browser).words
        where = browser.where
        for fields in (
            [("verb", "cancel"), ("scope", "matching"), ("topic", "theirs")],
            [("verb", "fire"), ("scope", "matching")],
            [("verb", "cancel"), ("scope", "chosen"), ("ref", "theirs/k000@1"), ("ref", "mine.a/k000@1")],
        ):
            browser.send(fields)
            assert browser.status == 403, fields
        other = visit(one)
        other.log_in(watcher)
        assert "6 cancelled" in other.open(where).words, "whoever may read all topics may look"
        other.send([], f"{where}/stop")
        assert other.status == 403
        other.send([("verb", "cancel"), ("scope", "matching")])
        assert other.status == 403
        assert one.run(one.app.tally()).number("theirs") == 3
        page = other.log_in(stranger, "/changes")
        assert page.status == 200
        assert where not in page.hrefs


@pytest.mark.parametrize("backwards", [False, True])
def test_a_change_of_several_topics_is_seen_and_stopped_by_who_may_on_each(
    tmp_path: Path, visit: Visit, backwards: bool
) -> None:
    with running(f"sqlite:///{tmp_path}/tasks.db") as one:
        refs = []
        for topic in ("mine", "theirs"):
            fill(one, topic, 50)
            refs += [seen(one, topic, f"k{n:03}") for n in range(50)]
        _, token = one.run(make(one.app, "ann", frozenset({Verb.READ, Verb.SHIFT})))
        _, of_one = one.run(make(one.app, "bo", frozenset({Verb.READ, Verb.SHIFT}), ("mine",)))
        _, of_both = one.run(make(one.app, "cy", frozenset({Verb.READ, Verb.SHIFT}), ("mine", "theirs")))
        browser = visit(one)
        browser.log_in(token)
        browser.send([("verb", "shift"), ("by", "1h"), *(refs[::-1] if backwards else refs)])
        browser.press("Shift: 100 tasks", pace="1")
        where = browser.where
        other = visit(one)
        assert where not in other.log_in(of_one, "/changes").hrefs
        other.open(where)
        assert other.status == 403
        other.send([], f"{where}/stop")
        assert other.status == 403
        other = visit(one)
        assert where in other.log_in(of_both, "/changes").hrefs
        other.send([], f"{where}/stop")
        assert "Stopped by cy" in over(other).words


# --- what is shown


def test_in_chinese(one: Running, visit: Visit, topic: str) -> None:
    assert {*(one.name for one in ACTIONS.values()), *REASONS.values(), *REASONS} <= set(translations("zh"))
    chinese = visit(one, language="zh-CN")
    fill(one, topic, 2)
    page = chinese.send([("verb", "cancel"), ("scope", "matching"), ("topic", topic)])
    assert "确认：取消" in page.words
    chinese.press("取消 2 个任务")
    assert "已取消" in chinese.page.words or "进行中" in chinese.page.words


def test_stopping_the_service_leaves_what_was_done_and_says_so(tmp_path: Path, visit: Visit) -> None:
    url = f"sqlite:///{tmp_path}/tasks.db"
    with running(url) as one:
        fill(one, "t", 300)
        browser = visit(one)
        browser.send([("verb", "cancel"), ("scope", "matching"), ("topic", "t")])
        browser.press("Cancel: 300 tasks", pace="1")
        where = browser.where
    with running(url) as one:
        browser = visit(one)
        page = browser.open(where)
        assert "Stopped when the service stopped" in page.words
        browser.press("Continue with the rest")
        left = one.run(one.app.tally()).number("t", State.WAITING)
        browser.press(f"Cancel: {left} tasks", pace="")
        assert f"{left} cancelled" in over(browser).words
        assert one.run(one.app.tally()).number("t", State.WAITING) == 0
