"""The timeline over HTTP: what it says of what comes and what was, for whom, and what it refuses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from tests.service.calling import Running, running
from tests.service.console.browsing import Browser, Page
from tests.service.console.conftest import Visit
from tests.service.test_access import make

from bide import Bide
from bide.core.instants import Millis, as_datetime, instant
from bide.core.records import OutcomeKind
from bide.service.authz import Verb
from bide.service.console.rendering import inert_line
from bide.testing import ManualClock

HOUR, MINUTE = 3_600_000, 60_000
PART = {"hx-request": "true"}


def look(browser: Browser, **query: Any) -> Page:
    """What a browser gets there."""
    page = browser.get("/timeline", **query)
    assert page.status == 200, page
    return page


async def put(app: Bide, topic: str, count: int, at: Millis) -> None:
    await app.schedule_many([app.new(topic, None, at=as_datetime(at)) for _ in range(count)])


def test_the_timeline_of_a_store_from_empty_to_a_peak(url: str, visit: Visit) -> None:
    with running(url) as service:
        browser = visit(service)
        empty = look(browser)
        assert "No task is waiting. Scheduled tasks appear here" in empty.text
        assert empty.chart is None

        now = service.app.clock.now()
        hour = now - now % HOUR
        peak = hour + 8 * HOUR
        service.run(put(service.app, "coupon.remind", 400, peak))
        service.run(put(service.app, "order.close", 12, peak))
        service.run(put(service.app, "order.close", 30, peak + 5 * MINUTE))
        service.run(put(service.app, "overdue", 3, now - HOUR))
        for number in range(10):
            service.run(put(service.app, f"small.{number}", 1, hour + 3 * HOUR))

        until = {"from": hour + 7 * HOUR, "until": hour + 9 * HOUR, "rate": 100}
        found = look(browser, **until)
        assert "412 tasks in this second: coupon.remind 400 · order.close 12" in found.text
        assert "At 100/s the last of them is 4.1s late. The backlog is gone by " in found.text
        assert "To be at most 1 s late it needs 412/s." in found.text
        assert "exactly" in found.text
        assert "Due now" not in found.text, "the range begins later"
        assert link(found, "Zoom in").startswith("/timeline?from=")
        assert "rate=100" in link(found, "Zoom in")
        assert "wake_from=" in link(found, "Show its tasks")
        assert instant_of(link(found, "Show its tasks"), "wake_from") == peak
        assert instant_of(link(found, "Show its tasks"), "wake_before") == peak + 1_000
        chart = found.chart
        assert [one["name"] for one in chart["series"]] == ["coupon.remind", "order.close"]
        assert sum(map(sum, (one["counts"] for one in chart["series"]))) == 442
        assert chart["peaks"][0] == peak
        assert len(chart["lows"]) == len(chart["labels"]) <= 120
        assert chart["keep"] == "rate=100"

        one = look(browser, **until, topic="order.close")
        assert [series["name"] for series in one.chart["series"]] == ["order.close"]
        assert sum(one.chart["series"][0]["counts"]) == 42
        assert {"overdue", "coupon.remind"} <= {found["value"] for found in one.all("option")}, (
            "all topics can be chosen"
        )

        month = look(browser, span="month", rate="5000")
        assert [series["name"] for series in month.chart["series"]][-1] == "others"
        assert len(month.chart["series"]) == 8
        assert "needs" not in month.text, "nobody has to wait for long"
        assert "others" in month.text
        hours = look(browser, span="hour")
        assert re.search(r"Due now 3 ", hours.text)
        assert "assumed: no whole minute of the last day was spent on a backlog, which would tell it" in hours.text

        part = browser("GET", "/timeline?span=month", headers=PART)
        assert not part.all("html")
        assert b'data-live="/timeline/live?span=month"' in part.body
        live = browser("GET", "/timeline/live?span=month", headers=PART)
        assert b"timeline-part" not in live.body
        assert live.chart is not None


def link(page: Page, begins: str) -> str:
    """Where the first link whose words begin so leads."""
    return next(where for words, where in page.links.items() if words.startswith(begins))


def instant_of(where: str, name: str) -> Millis:
    return instant(parse_qs(urlsplit(where).query)[name][0])


@pytest.fixture(scope="module")
def one() -> Iterator[Running]:
    with running("memory:") as found:
        yield found


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("span=year", "span"), ("from=soon", "from"), ("until=2030-13-01", "until"), ("from=1h&until=30m", "until"),
        ("from=-2h&until=-90000000", "until"), ("rate=fast", "rate"), ("rate=0", "rate"), ("rate=-1", "rate"),
        ("topic=%00", "topic"), ("from=1h&until=9999-12-31", "until"), ("from=0s&until=4000d", "until"),
        ("from=99999999999999999999&until=1h", "from"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_by_its_name(browser: Browser, query: str, field: str) -> None:
    page = browser.get(f"/timeline?{query}")
    assert page.status == 422, page
    assert "A value is not accepted" in page.text
    assert f"{field}: " in page.text


def test_ranges_may_be_written_in_words_of_the_viewers_zone(one: Running, visit: Visit) -> None:
    browser = visit(one, zone="Europe/Berlin")
    page = look(browser, **{"from": "2030-06-01 08:00", "until": "2030-06-01 09:00"})
    assert "2030-06-01 08:00:00 to 2030-06-01 09:00:00, by 1m" in page.text
    ahead = look(browser, until="30m")
    assert b"data-live" not in ahead.body, "who has chosen a range keeps it"
    assert link(ahead, "Zoom out").startswith("/timeline?from=")


async def happened(app: Bide, planned: Millis, count: int) -> None:
    """So many deliveries begin now, and are done."""
    app.history.began("slow", [planned] * count, app.clock.now())
    for _ in range(count):
        app.history.ended("slow", OutcomeKind.DONE)
    await app.history.flush()


def test_the_past_stands_behind_it_and_says_how_fast_it_can_go(visit: Visit) -> None:
    clock = ManualClock(1_900_000_020_000)
    with running("memory:", clock=clock) as service:
        planned = clock.now() - 30_000
        for count in (600, 1):  # in the second minute some of the first one's are left
            service.run(happened(service.app, planned, count))
            clock.advance(MINUTE)
        service.run(put(service.app, "slow", 100, clock.now() + HOUR - MINUTE))
        browser = visit(service)
        page = look(browser, span="hour")
        past = page.chart["past"]
        assert (max(past["planned"]), max(past["done"])) == (601, 600)
        assert past["highs"][-1] == clock.now()
        assert "Assumed rate 10/s the fastest minute amid a backlog in the last day: " in page.text
        assert "At 10/s the last of them is 10s late" in page.text
        assert "it goes back one day" in page.text
        other = look(browser, span="hour", topic="quick")
        assert "There is no task of the topic quick" in other.text
        assert "Assumed rate 1,000/s assumed" in other.text
        seconds = look(browser, **{"from": clock.now() - MINUTE, "until": clock.now() + MINUTE})
        assert "The past is recorded by the minute" in seconds.text


def test_everybody_sees_their_own_topics_alone(visit: Visit) -> None:
    with running("memory:") as service:
        for topic in ("shop.order", "bank.payment"):
            service.run(put(service.app, topic, 5, service.app.clock.now() + HOUR))
        _, whole = service.run(make(service.app, "whole"))
        _, shop = service.run(make(service.app, "shop", verbs=frozenset({Verb.READ}), topics=("shop.*",)))
        _, blind = service.run(make(service.app, "blind", verbs=frozenset({Verb.SCHEDULE})))
        browser = visit(service)
        assert browser.get("/timeline").status == 303, "to the login"
        seen = browser.log_in(whole, "/timeline")
        assert sum(map(sum, (one["counts"] for one in seen.chart["series"]))) == 10
        seen = browser.log_in(shop, "/timeline")
        assert seen.status == 200
        assert b"bank" not in seen.body
        assert [one["name"] for one in seen.chart["series"]] == ["shop.order"]
        assert sum(seen.chart["series"][0]["counts"]) == 5
        assert browser.get("/timeline?topic=bank.payment").status == 403
        assert browser.log_in(blind, "/timeline").status == 403


def test_a_name_of_others_is_harmless_in_the_chart_too(browser: Browser) -> None:
    hostile = "'\"><script>alert(1)</script>{{7*7}}&amp;\u202e</template>"
    browser.api.put(hostile, "k")
    page = look(browser, topic=hostile)
    assert [series["name"] for series in page.chart["series"]] == [inert_line(hostile, 60)]
    assert inert_line(hostile) in page.text
    assert "\u202e" not in page.text
