"""The overview page: what it shows to whom, on real stores, and that it stays cheap and harmless."""

from __future__ import annotations

import re
from datetime import UTC
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.service.calling import Running, running
from tests.service.console.browsing import Browser, Page
from tests.service.console.conftest import Visit
from tests.service.test_access import make
from tests.waiting import wait_until

from bide.engine.history import DeliveryCounts, bucket_of
from bide.engine.pauses import Pauses
from bide.engine.registry import Channel
from bide.insight.minute_log import Flow
from bide.ports import COUNTED
from bide.service.authz import Verb
from bide.service.console.i18n import Locale, translations
from bide.service.console.overview import bars, grade, wake_up_status
from bide.service.health import Level


def shown(browser: Browser, path: str = "/") -> Page:
    page = browser.get(path)
    assert page.status == 200, page
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    return page


def test_an_empty_store_says_what_to_do_first(url: str, visit: Visit) -> None:
    with running(url) as one:
        browser = visit(one)
        page = shown(browser)
        assert "There is nothing here yet" in page.words
        assert f"curl -X PUT {one.url}/v1/topics/hello/tasks/1 " in page.words
        [command] = re.findall(r"-d '(\{.*?\})'", page.words)
        reply = browser.api("PUT", "/v1/topics/hello/tasks/1", body=command.encode())
        assert reply.status == 201, reply
        page = shown(browser)
        assert "There is nothing here yet" not in page.words
        assert "Pending 1 " in page.words


def test_what_it_shows(url: str, visit: Visit) -> None:
    with running(url) as one:
        browser = visit(one)
        api = browser.api
        api.dead("broken", "1")
        for key in ("1", "2", "3"):
            api.put("held", key, delay="0s")
        [held] = api.lease("held", 1)
        api.put("held", "3", delay="0s")  # of a topic that somebody has asked for
        api.put("later", "1", delay="1h")
        one.run(Pauses(one.app.store, one.app.clock).pause("held", who="anna"))
        one.run(one.app.history.flush())
        page = shown(browser)
        assert "Pending 3 Due now 2 the oldest for" in page.words
        assert "Leased 1 " in page.words
        assert "Dead 1 given up" in page.words
        assert re.search(r"Lateness, p99 [0-9.]+ ?m?s", page.words)
        assert "Held back by a pause held : 2 due; paused since" in page.words
        assert ", anna" in page.words
        assert f"anonymous@{one.serving.instance} a consumer, or a worker that is gone held 1 0" in page.words
        assert "ok: store it answers" in page.words
        assert "wake-ups last received" in page.words or url.startswith("redis"), "there one's own are no notifications"
        assert {"/tasks?state=waiting", "/tasks?state=due", "/tasks?state=leased", "/dead", "/topics/held"} <= set(
            page.hrefs
        )
        assert page.all("svg")
        part = shown(browser, "/overview/live")
        assert not part.all("html")
        assert "Due now 2" in part.words
        assert api.settle(held, "done")


async def _announce(one: Running, name: str) -> None:
    now = one.app.clock.now()
    await one.app.store.announce(f"worker of {name}", [name], now + 60_000, now=now)  # type: ignore[attr-defined]


def test_everybody_sees_what_they_may(one: Running, browser: Browser) -> None:
    some, entire, blind = (
        one.run(make(one.app, name, verbs, topics))[1]
        for name, verbs, topics in (
            ("some", frozenset(Verb), ("mine.*",)), ("all", frozenset(Verb), ("*",)),
            ("blind", frozenset({Verb.SCHEDULE}), ("*",)),
        )
    )  # fmt: skip
    one.run(_work(one, "mine.a", 2))
    one.run(_work(one, "yours", 3))
    page = browser.log_in(entire, "/")
    assert "Pending 3 " in page.words
    assert "Scheduled / s" in page.words
    assert "yours" in page.words
    page = browser.log_in(some, "/")
    assert "Pending 1 Due now 1 " in page.words
    assert "Leased 1 " in page.words
    assert "yours" not in page.words
    assert "Scheduled / s" not in page.words
    assert "You see only the topics that you may read." in page.words
    browser.log_in(blind, "/")
    for path in ("/", "/overview/live"):
        page = browser.get(path)
        assert page.status == 403, page
        assert b"read" in page.body
        assert b"yours" not in page.body


async def _work(one: Running, topic: str, number: int) -> None:
    """So many tasks, one of them held by somebody, a pause, and a worker."""
    app, now = one.app, one.app.clock.now()
    await app.schedule_many([app.new(topic, key=str(key), delay="0s") for key in range(number)])
    await app.store.lease({topic: 1}, now=app.clock.now(), until=now + 600_000, holder="me")
    await Pauses(app.store, app.clock).pause(topic)
    await app.store.announce(f"worker of {topic}", [topic], now + 600_000, now=now)  # type: ignore[attr-defined]
    await app.history.flush()


def test_more_than_a_store_counts_is_counted_all_the_same(visit: Visit, tmp_path: Path) -> None:
    with running(f"sqlite:///{tmp_path}/tasks.db") as one:
        one.run(_fill(one, COUNTED + 500))
        browser = visit(one)
        exact = f"Pending {COUNTED + 500:,}"
        wait_until(lambda: exact in shown(browser, "/overview/live").words, "the exact count")
        page = shown(browser)
    assert exact in page.words
    assert "10,000+" not in page.words


async def _fill(one: Running, number: int) -> None:
    await one.app.schedule_many([one.app.new("big", None, delay="1h") for _ in range(number)])


def test_bars() -> None:
    assert bars([]) == bars([0] * 60) == ""
    assert bars([0] * 58 + [1, 1_000]) == "M232 40v-1h3v1zM236 40v-40h3v40z"


class Says:
    """A visit, as far as words go: tells which sentence was asked for."""

    def t(self, english: str, **values: object) -> str:
        assert english in translations("zh"), english
        return "* " + english.format(**values)


def test_what_is_wake_up_status() -> None:
    class Viewer(Says):
        locale = Locale("en", "UTC", UTC, 0)

    def words(**changes: object) -> tuple[Level, str]:
        well = Channel(notifies=True, loops=2, heard=3, heard_ago=4.2, missed=0, missed_lately=False)
        return wake_up_status(Viewer(), replace(well, **changes))  # type: ignore[arg-type]

    assert words() == (Level.OK, "* last received 4.2s ago")
    assert words(missed=2) == (Level.OK, "* last received 4.2s ago · * 2 missed since the start")
    assert words(missed=2, missed_lately=True)[0] is Level.WARNING
    assert words(heard_ago=None) == (Level.OK, "* none received here so far")
    assert words(notifies=False) == (Level.OK, "* this store sends none: its workers poll")


@pytest.mark.parametrize(("late", "expected"), [(None, ""), (0, "good"), (95, "good"), (120, "warn"), (2_000, "bad")])
def test_how_late_is_bad(late: int | None, expected: str) -> None:
    past = DeliveryCounts() if late is None else DeliveryCounts(begun=1, late={bucket_of(late): 1})
    assert grade(Flow(60_000, past, 0)) == expected
    assert grade(None) == ""
