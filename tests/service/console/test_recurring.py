"""Recurring tasks in the console: the list and one's page, at changes of the clocks, who may do what, and the forms."""

from __future__ import annotations

import re
from typing import Any

import pytest
from tests.service.calling import Running, running
from tests.service.console.browsing import HOSTILE, Browser, Page
from tests.service.console.conftest import Visit
from tests.service.test_access import make

from bide import At, Bide, Cron, Every, Task
from bide.core.events import EventKind, event_of
from bide.core.instants import instant
from bide.core.recurrence.rules import Rule, rule_of
from bide.service.access import Verb
from bide.service.console.i18n import Locale, inert_line, zone_of
from bide.service.console.recurring import month_of
from bide.service.console.rendering import recurring_address
from bide.testing import ManualClock

NOW = instant("2026-10-24T12:00:00Z")
BERLIN = Cron("30 2 * * *", zone="Europe/Berlin")


def add(one: Running, topic: str, rule: Rule, **how: Any) -> None:
    answer = one.run(one.app.recurring.add(topic, rule, **how))
    assert answer.ok


def one_of(browser: Browser, topic: str, key: str, status: int = 200) -> Page:
    page = browser.open(recurring_address(topic, key))
    assert page.status == status, page
    return page


def task_of(one: Running, topic: str, key: str) -> Task[Any]:
    task = one.run(one.app.get(topic, key))
    assert task is not None
    return task


def test_the_list(browser: Browser, one: Running) -> None:
    assert "No task recurs here" in browser.open("/recurring").words
    add(one, "report", Cron("0 8 * * mon-fri", zone="Asia/Shanghai"), key="daily", overlap="queue", window="1h")
    add(one, "poll", Every("15s"), key="a", end_when_dead=True, deadline="5s")
    add(one, "poll", Every("1h"), key="held")
    one.run(one.app.recurring.pause("poll", "held"))
    one.run(one.app.schedule("poll", None, key="once", delay="2h"))
    page = browser.open("/recurring")
    [_, soon, daily, held] = page.rows
    assert soon[:3] == ["poll", "a", "every 15s"]
    assert re.search(r"(in [0-9.]+ ?m?s|now|[0-9.]+ ?m?s ago)$", soon[3]), "no worker: it may be over by now"
    assert soon[4] == "catch-up: latest · overlap: skip · deadline after 5s · ends with the first dead occurrence"
    assert daily[:3] == ["report", "daily", "at 08:00 on Monday to Friday, Asia/Shanghai"]
    assert daily[4] == "catch-up: latest · overlap: queue · at most 1h late"
    assert (held[1], held[3]) == ("held", "paused")
    for path in ("/tasks", "/tasks/poll/held"):
        assert ("never" in browser.open(path).words, "9999" in browser.page.words) == (True, False)
    assert len(browser.open("/recurring?topic=report").rows) == 2
    assert browser.open("/recurring?topic=" + "x" * 300).status == 422
    [task] = one.run(one.app.store.lease({"poll": 1}, now=one.app.clock.now() + 20_000, until=2**42, holder="w")).tasks
    assert task.key == "a"
    [running_one] = [row for row in browser.open("/recurring").rows if row[1] == "a"]
    assert running_one[3].startswith("running ")


def test_the_pages_of_every_store(url: str, visit: Visit) -> None:
    with running(url) as one:
        browser = visit(one)
        for key in ("a", "held", "runs"):
            add(one, "t", Every("1h"), key=key)
        one.run(one.app.recurring.pause("t", "held"))
        one.run(one.app.schedule("t", None, key="once", delay="1h"))
        one.run(one.app.schedule("other", None, key="once", delay="1h"))
        for path in ("/recurring", "/recurring?topic=t"):
            assert sorted(row[1] for row in browser.open(path).rows[1:]) == ["a", "held", "runs"]
            assert "too many" not in browser.page.words
        one_of(browser, "t", "a")
        assert "The next occurrence is skipped." in browser.press("Skip next").words
        assert "An occurrence runs now" in browser.press("Run now").words
        assert "It is paused" in browser.press("Pause").words
        assert "later occurrences of recurring tasks" in browser.open("/timeline").words
        browser.open("/recurring/t/a")
        browser.press("Remove")
        assert "It has ended" in browser.press("Remove").words
        assert sorted(row[1] for row in browser.page.rows[1:]) == ["held", "runs"]


def test_no_more_tasks_are_read_than_some_thousand(browser: Browser, one: Running, monkeypatch: Any) -> None:
    monkeypatch.setattr("bide.insight.recurring.MOST", 300)
    one.run(one.app.schedule_many([one.app.new("many", None, delay="1h") for _ in range(301)]))
    for topic in ("later", "many"):
        add(one, topic, Every("30d"))
    page = browser.open("/recurring")
    assert "too many tasks to look at all of them" in page.words
    assert [row[0] for row in page.rows[1:]] == ["later"], "a small topic is read to its end"
    assert "there may be more of these" in browser.open("/timeline").words
    page = browser.open("/recurring?topic=later")
    assert "too many" not in page.words
    assert len(page.rows) == 2


def test_ones_page_at_the_change_of_the_clocks(visit: Visit) -> None:
    """2026-10-25 has 02:30 twice in Berlin."""
    with running("memory:", clock=ManualClock(NOW)) as one:
        browser = visit(one, zone="America/New_York")
        add(one, "t", BERLIN, key="once")
        add(one, "t", Cron("*/30 * * * *", zone="Europe/Berlin"), key="both")
        page = one_of(browser, "t", "once")
        walls = [row[1] for row in page.rows if len(row) in (2, 3) and row[1].startswith("20")]
        assert walls[:3] == ["2026-10-25 02:30:00 +0200", "2026-10-26 02:30:00 +0100", "2026-10-27 02:30:00 +0100"]
        assert walls[10:12] == ["2026-10-24 02:30:00 +0200", "2026-10-23 02:30:00 +0200"]
        assert "20" not in {row[0][:2] for row in page.rows[:1]}
        assert next(one["datetime"] for one in page.all("time")) == "2026-10-25T00:30:00.000Z"
        weeks = [row for row in page.rows if len(row) == 7]
        assert weeks[0] == ["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"]
        assert weeks[1] == ["", "", "", "1 1×", "2 1×", "3 1×", "4 1×"]
        assert "Gap" not in page.words
        days = {day: number for row in month_of(rule_of("*/30 * * * *", zone="Europe/Berlin"), NOW) for day, number, _
                in filter(None, row)}  # fmt: skip
        assert (days[24].number, days[25].number) == (48, 50)
        assert "25 50×" in one_of(browser, "t", "both").words


def test_ones_page_says_what_the_clocks_have_moved(visit: Visit) -> None:
    with running("memory:", clock=ManualClock(instant("2026-03-28T12:00:00Z"))) as one:
        browser = visit(one, zone="Europe/Berlin")
        add(one, "t", BERLIN, key="k")
        page = one_of(browser, "t", "k")
        assert "2026-03-29 03:00:00" in page.rows[1][0]
        assert "after a gap in local time" in page.rows[1][0]
        assert page.rows[0] == ["Europe/Berlin"]
        assert "2026-03-29 03:00:00 +0200" in page.rows[1][0], "the offset, also in the viewer's own zone"
        assert "after the gap" not in page.rows[2][0]
        assert page.words.count("1×") == 31, "also on the day of the gap"


@pytest.mark.parametrize("zone", ["America/Havana", "Africa/Cairo", "Pacific/Apia", "America/Sao_Paulo", "UTC"])
def test_a_calendar_has_each_day_once_where_midnight_is_skipped_or_comes_twice(zone: str) -> None:
    for month in (instant("2011-12-20T00:00:00Z"), instant("2018-11-05T00:00:00Z"), instant("2024-04-15T00:00:00Z")):
        days = [day for row in month_of(Every("1h") if zone == "UTC" else rule_of("30 * * * *", zone=zone), month)
                for day in row if day is not None]  # fmt: skip
        assert [day for day, _, _ in days] == list(range(1, len(days) + 1))
        assert {runs.number for _, runs, _ in days} <= {0, 23, 24, 25}
        assert sum(runs.number == 0 for _, runs, _ in days) <= 1
        assert [today for _, _, today in days].count(True) == 1


def test_what_did_not_run(browser: Browser, one: Running) -> None:
    add(one, "t", Every("1h"), key="k")
    task = task_of(one, "t", "k")
    now = one.app.clock.now()

    async def note(kind: EventKind, what: str, ago: int = 0) -> None:
        one.app.recorder.note(event_of(task.record, kind, now - ago, "w", what, was=now - ago, wake_at=None))

    one.run(note(EventKind.DROPPED, "late: 2 occurrences did not run", 3_600_000))
    one.run(note(EventKind.DEAD, HOSTILE))
    page = one_of(browser, "t", "k")
    past = [row[-1] for row in page.rows if len(row) == 2]
    assert past[1:5] == [f"dead {inert_line(HOSTILE)}", *["did not run: too late"] * 2, ""]
    assert "2 did not run: too late" in page.words
    browser.language = "zh"
    assert "2 次未运行：过期太久" in one_of(browser, "t", "k").words
    browser.language = "en"
    assert browser.open("/recurring").rows[1][5].startswith(f"dead {inert_line(HOSTILE)}")
    assert "and 1 more" in browser.page.rows[1][5]


NAMES = [HOSTILE, "..", ".", "a/b", "%2f", "订单 \u202e", "?x=1&y#z"]


@pytest.mark.parametrize("name", NAMES)
def test_any_name_has_its_page_and_forms(browser: Browser, one: Running, name: str) -> None:
    add(one, name, Every("1h"), key=name)
    [row] = browser.open("/recurring").rows[1:]
    assert row[:2] == [inert_line(name, 80)] * 2
    page = one_of(browser, name, name)
    assert inert_line(name) in page.words
    browser.press("Pause")
    assert "It is paused: no occurrence runs until it is resumed." in browser.page.words
    assert "u202e" not in repr(browser.page.words)
    assert browser.open("/recurring?topic=" + "x").status == 200


def test_each_button_does_what_it_says(browser: Browser, one: Running) -> None:
    app: Bide = one.app
    add(one, "t", Every("1h"), key="k")
    [first, second] = one.run(app.recurring.next("t", "k", 2))
    one_of(browser, "t", "k")
    assert "The next occurrence is skipped." in browser.press("Skip next").words
    assert one.run(app.recurring.next("t", "k", 1)) == [second] != [first]

    assert "An occurrence runs now" in browser.press("Run now").words
    own = [record.key for record in one.run(all_of(app, "t")) if record.key != "k"]
    assert len(own) == 1
    assert own[0].startswith("k@")

    page = browser.press("Pause")
    assert "It is paused: no occurrence runs until it is resumed." in page.words
    assert "There are none while it is paused." in page.words
    assert one.run(app.recurring.next("t", "k")) == []
    stale = [("topic", "t"), ("key", "k"), ("do", "skip_next")]
    assert "it is paused, so no occurrence is next" in browser.send(stale, "/recurring").words
    assert task_of(one, "t", "k").state == "waiting"
    assert "It was already paused" in browser.send([*stale[:2], ("do", "pause")], "/recurring").words
    assert "It recurs again" in browser.press("Resume").words
    assert one.run(app.recurring.next("t", "k", 1)) == [first]
    changes = [(event.who, event.what) for event in one.run(app.events("t", "k"))]
    assert changes == [("anonymous", what) for what in ("resume: replaced", "pause: replaced", "reschedule: moved")]

    page = browser.press("Remove")
    title, _, rest = page.words.partition("Remove this recurring task?")
    assert title.startswith("Remove · k · bide"), "the page is not read as the one before"
    assert "Policies" in rest, "far from where the button was: its second click confirms nothing"
    assert task_of(one, "t", "k").state == "waiting", "not yet"
    page = browser.press("Remove")
    assert browser.where.startswith("/recurring?")
    assert "It has ended: no occurrence follows." in page.words
    assert task_of(one, "t", "k").state == "cancelled"
    assert not one_of(browser, "t", "k").forms
    for do in ("pause", "resume", "skip_next", "run_now", "remove"):
        sent = [*stale[:2], ("do", do), ("if_token", "1"), ("confirm", "yes")]
        assert "it has finished" in browser.send(sent, "/recurring").words, do
    assert browser.send([*stale[:2], ("do", "explode")], "/recurring").status == 422


@pytest.mark.parametrize("button", ["Skip next", "Run now"])
def test_a_second_click_does_nothing(browser: Browser, one: Running, button: str) -> None:
    add(one, "t", Every("1h"), key="k")
    shown = one_of(browser, "t", "k")

    def done() -> tuple[object, ...]:
        return len(one.run(all_of(one.app, "t"))), task_of(one, "t", "k").due_at

    browser.press(button)
    before = done()
    assert "Press again to do it now." in browser.press(button).words, "on the page that follows"
    browser.page = shown
    assert "Press again to do it now." in browser.press(button).words, "on the same page"
    assert done() == before
    browser.press(button)
    assert done() != before


async def all_of(app: Bide, topic: str) -> list[Any]:
    return [task async for task in app.find(topic=topic)]


def test_what_does_not_recur_is_left_alone(browser: Browser, one: Running) -> None:
    one.run(one.app.schedule("t", None, key="once", delay="1h"))
    add(one, "t", Cron("0 8 * * *"), key="k")
    assert browser.open("/tasks/t/k").links["at 08:00, UTC"] == "/recurring/t/k"
    assert "Recurs" not in browser.open("/tasks/t/once").words
    assert "No such recurring task" in one_of(browser, "t", "once", 404).words
    for do in ("remove", "pause", "run_now"):
        sent = [("topic", "t"), ("key", "once"), ("do", do), ("confirm", "yes")]
        assert browser.send(sent, "/recurring").status == 404
    assert task_of(one, "t", "once").state == "waiting"


def test_while_an_occurrence_runs(browser: Browser, one: Running, monkeypatch: Any) -> None:
    monkeypatch.setattr("bide.service.console.recurring._PATIENCE", 0.01)
    add(one, "t", Every("1h"), key="k")
    now = one.app.clock.now() + 3_600_000
    assert one.run(one.app.store.lease({"t": 1}, now=now, until=now + 3_600_000, holder="w")).tasks
    page = one_of(browser, "t", "k")
    assert "running" in page.words
    assert "an occurrence is running. Try again when it has ended." in browser.press("Pause").words
    assert "an occurrence is running. Try again when it has ended." in browser.press("Skip next").words
    assert "An occurrence runs now" in browser.press("Run now").words
    recurrence = task_of(one, "t", "k").recurrence
    assert recurrence is not None
    assert not recurrence.paused


def test_everybody_does_what_they_may(visit: Visit) -> None:
    with running("memory:") as one:
        for topic in ("shop.order", "bank.payment"):
            add(one, topic, Every("1h"), key="k")
        _, reader = one.run(make(one.app, "reader", verbs=frozenset({Verb.READ}), topics=("shop.*",)))
        _, mover = one.run(make(one.app, "mover", verbs=frozenset({Verb.READ, Verb.RESCHEDULE}), topics=("shop.*",)))
        _, canceller = one.run(make(one.app, "canceller", verbs=frozenset({Verb.CANCEL}), topics=("shop.*",)))
        browser = visit(one)
        for where, what in ("/recurring", "over all topics"), ("/recurring?topic=shop.order", "shop.order"):
            page = browser.log_in(canceller, where)
            assert (page.status, what in page.words) == (403, True)
        assert len(browser.log_in(reader, "/recurring").rows) == 2
        assert not one_of(browser, "shop.order", "k").actions.count("/recurring")
        for do in ("pause", "resume", "skip_next", "run_now", "remove"):
            sent = [("topic", "shop.order"), ("key", "k"), ("do", do), ("confirm", "yes")]
            assert browser.send(sent, "/recurring").status == 403, do
        browser.log_in(mover)
        one_of(browser, "shop.order", "k")
        buttons = [button["text"] for button in browser.page.form("Pause").buttons if button["text"]]
        assert buttons == ["Pause", "Skip next"]
        browser.press("Pause")
        [event] = one.run(one.app.events("shop.order", "k"))
        assert event.who == "mover"
        for do in ("run_now", "remove"):
            assert browser.send([("topic", "shop.order"), ("key", "k"), ("do", do)], "/recurring").status == 403
        assert browser.send([("topic", "bank.payment"), ("key", "k"), ("do", "pause")], "/recurring").status == 403
        assert task_of(one, "shop.order", "k").state == "waiting"


def test_all_that_a_rule_has_is_shown(browser: Browser, one: Running) -> None:
    rule = Every("1h", start="2030-01-01T00:00Z", until="2030-06-01T00:00Z", times=9, jitter="1m",
                 except_on=["2030-02-03"])  # fmt: skip
    add(one, "t", rule, key="k", declared=True)
    page = one_of(browser, "t", "k")
    for text in ("Starts 2030-01-01 00:00:00", "Ends 2030-06-01 00:00:00", "Occurrences in all 9", "up to 1m after",
                 "Not on 2030-02-03", "declared by a program"):  # fmt: skip
        assert text in page.words
    assert len([row for row in page.rows if row[0].startswith("2030-")]) == 9
    assert "There are none." in page.words, "in the past"
    assert "A program declares it" in browser.press("Remove").words


@pytest.mark.parametrize(
    ("rule", "chinese"),
    [
        (Cron("0 8 * * mon-fri", zone="Asia/Shanghai"), "于 08:00，周一至周五，Asia/Shanghai"),
        (Cron("*/15 * * * *"), "每 15 分钟，UTC"), (Cron("0 * * * *"), "每 小时，UTC"), (Every("90s"), "每 1分30秒"),
        (Cron("0 8,20 3 * *"), "于 08:00，20:00，每月 3 日，UTC"), (Cron("0 8 L * *"), "于 08:00，每月最后一天，UTC"),
        (Cron("0 0 1 1 *"), 'cron "0 0 1 1 *"，时区 UTC'), (Cron("0 0 * * 2,7"), "于 00:00，周二，周日，UTC"),
        (At("2030-01-01T00:00Z", "2031-01-01T00:00Z"), "于 2030-01-01T00:00:00.000Z 及另外 1 个时刻"),
    ],
)  # fmt: skip
def test_rules_in_words(rule: Rule, chinese: str) -> None:
    assert Locale("zh", *zone_of("UTC"), NOW).rule_words(rule.words) == chinese
    assert Locale("en", *zone_of("UTC"), NOW).rule_words(rule.words) == rule.words


def test_without_a_zone_that_the_rule_names_the_page_says_so(browser: Browser, one: Running, monkeypatch: Any) -> None:
    add(one, "t", BERLIN, key="k")

    def gone(name: str) -> None:
        from bide.core.errors import BadInput

        raise BadInput("zone", name, "a name of the IANA time zone database")

    monkeypatch.setattr("bide.service.console.recurring.zone_info", gone)
    page = one_of(browser, "t", "k")
    assert "Its instants cannot be computed here:" in page.words
    assert "remove" in page.form("Remove").buttons[-1].values()
